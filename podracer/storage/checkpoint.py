"""Checkpoints of a run, over all its devices and processes, written by Orbax in the background."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from podracer.distributed.checksum import named_arrays, path_name
from podracer.distributed.processes import Processes
from podracer.errors import ConfigError, SaveError, TransientError, unknown
from podracer.storage import bucket, retry, upgrading
from podracer.storage import checkpoint_files as files
from podracer.storage.checkpoint_files import FOLDER, Progress
from podracer.storage.retry import Fault
from podracer.types import Array, ArrayTree, Weights

T = TypeVar("T")

DAMAGED = "damaged_checkpoints"
WHICH = ("last", "best")


class Checkpoints:
    """The checkpoints of a run in its workdir, written in the background."""

    def __init__(
        self,
        workdir: epath.Path,
        keep: int,
        log: Callable[[str], None],
        processes: Processes,
        *,
        replay: bool = True,
    ):
        """Reads and writes nothing yet.

        A failed save does not end a run of one process. With several processes, it may have failed
        in only one of them, for which the others wait; its error then ends all.

        Args:
          workdir: workdir of the run.
          keep: number of newest checkpoints to keep, in addition to the best one.
          log: called with a line of text if something goes wrong without ending the run.
          processes: the processes of the run, which save and restore together.
          replay: whether the contents of a replay buffer are saved.
        """
        self._workdir, self._keep, self._log = workdir, keep, log
        self._processes, self._replay = processes, replay
        self._manager: ocp.CheckpointManager | None = None
        self._failed: Exception | None = None
        # The highest score among the complete checkpoints, and the score of the one being written.
        self._best = -math.inf
        self._unconfirmed: float | None = None

    def restore(self, state: ArrayTree) -> tuple[ArrayTree, Progress]:
        """The newest undamaged checkpoint, placed on devices as ``state`` is.

        Args:
          state: the initial state of the run. It is freed if there is a checkpoint. Of a checkpoint
            without the contents of a replay buffer, the buffer is empty.

        Returns:
          State and progress; ``state`` and no progress where there is no checkpoint.

        Raises:
          SaveError: there are checkpoints, but all are damaged.
          TransientError: a checkpoint can't be read at present.
          ConfigError: permission to read a checkpoint is missing.
        """
        folder = self._workdir / FOLDER
        # Other processes may see older checkpoints, or not all of them.
        steps = self._processes.broadcast(
            lambda: self._reading(folder, lambda: files.list_steps(folder))
        )
        if not steps:
            return state, Progress()
        shapes, build = files.describe(state)
        for x in jax.tree.leaves(state):
            x.delete()
        scores, unreadable = self._processes.broadcast(lambda: self._read_scores(steps))
        damaged = dict(unreadable)
        for step in steps:
            if step in damaged:
                continue
            loaded, reason = self._load(step, shapes)
            if loaded is not None:
                arrays, progress = loaded
                self._processes.broadcast(lambda: self._set_aside(damaged))
                self._best = max(score for each, score in scores if each not in damaged)
                return build({**files.empty_replay(shapes, arrays), **arrays}), progress
            damaged[step] = reason
        raise SaveError(
            f"no checkpoint in {folder} can be used: "
            + "; ".join(f"{step} ({reason})" for step, reason in damaged.items())
            + "; --restart moves this run aside and starts over"
            + self._processes.broadcast(lambda: upgrading.note(files.read_writer(folder, steps[0])))
        )

    def _reading(self, path: epath.Path, function: Callable[[], T]) -> T:
        """Calls a function that reads from this path, with retries."""

        def log(text: str) -> None:
            self._log(text)
            self._processes.show_progress()

        try:
            return retry.call(f"{path} can't be read", function, log)
        except (ConfigError, TransientError) as error:
            raise type(error)(
                f"{error}; if it stays unreadable, move it away to resume without it"
            ) from error

    def _read_scores(
        self, steps: list[int]
    ) -> tuple[list[tuple[int, float]], list[tuple[int, str]]]:
        """The scores of checkpoints by number, and the reasons why others can't be read.

        Orbax reads the scores of all checkpoints to decide which ones to keep, so a damaged score
        would make every save fail.
        """
        folder = self._workdir / FOLDER
        scores, damaged = [], []
        for step in steps:
            try:
                scores.append((step, files.read_score(folder, step)))
            except Exception as error:
                if retry.fault(error) is not Fault.DAMAGED:
                    raise
                damaged.append((step, retry.reason(error)))
        return scores, damaged

    def _load(
        self, step: int, shapes: Mapping[str, Any]
    ) -> tuple[tuple[Mapping[str, Array], Progress] | None, str]:
        """The arrays and the progress of a checkpoint; if it is damaged, None and the reason."""
        folder = self._workdir / FOLDER
        # Other processes may not see a folder yet.
        if not self._processes.broadcast(
            lambda: self._reading(folder, lambda: files.has_replay(folder, step))
        ):
            absent = files.replay_arrays(shapes)
            shapes = {name: x for name, x in shapes.items() if name not in absent}
        read, reason = self._together(lambda: self._read(step, shapes))
        if reason:
            return None, reason
        # A sum over all devices, in which every process must take part.
        progress, reason = self._together(lambda: files.verify(*read))
        return (None, reason) if reason else ((read[0], progress), "")

    def _read(self, step: int, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        folder = self._workdir / FOLDER
        return self._reading(folder / str(step), lambda: files.read(folder, step, shapes))

    def _together(self, make: Callable[[], Any]) -> tuple[Any, str]:
        """What a function returns here, and the damage that any process has found; "" for none.

        Any other error ends this process, and thereby the others.
        """
        made, reason = None, ""
        try:
            made = make()
        except Exception as error:
            fault = retry.fault(error)
            if fault is Fault.TRANSIENT:
                raise retry.final_error("a checkpoint can't be read", error, SaveError) from error
            if fault is not Fault.DAMAGED:
                raise
            reason = retry.reason(error)
        reasons = self._processes.all_gather(reason)
        if self._processes.count > 1:
            reasons = [x and f"process {i}: {x}" for i, x in enumerate(reasons)]
        return made, "; ".join(filter(None, reasons))

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Moves damaged checkpoints away, as their numbers will be needed again."""
        aside = self._workdir / DAMAGED
        for step, reason in damaged.items():
            number = len(list(aside.iterdir())) if bucket.exists(aside) else 0
            target = aside / f"{step}.{number}"
            bucket.move(self._workdir / FOLDER / str(step), target)
            self._log(f"checkpoint {step} is damaged ({reason}) and was moved to {target}")

    def improves(self, score: float) -> bool:
        """Whether a score is higher than that of every complete checkpoint. Waits for one that is
        being written."""
        self._wait()
        return score > self._best

    def save(self, state: ArrayTree, progress: Progress, score: float | None) -> None:
        """Saves a state while training continues. A failure is logged, and older checkpoints are
        kept.

        Args:
          state: the state to save; it may be donated as soon as this returns.
          progress: how far the run has come; ``best`` is added here.
          score: the mean return of the evaluation of this state, if that is the best so far.

        Raises:
          SaveError, TransientError: this save or the previous one has failed, and other processes
            wait for this one.
        """
        # The previous checkpoint must be complete first.
        self._wait()
        try:
            folder = self._workdir / FOLDER
            self._processes.broadcast(lambda: folder.mkdir(parents=True, exist_ok=True))
            manager = self._manager = self._manager or files.open_manager(folder, self._keep)
            best = self._best if score is None else score
            progress = progress._replace(best=None if best == -math.inf else best)
            if not self._processes.broadcast(lambda: progress.update in manager.all_steps()):
                files.write(manager, state, progress, score, replay=self._replay)
            elif self._processes.broadcast(lambda: files.amend(folder, progress, score)):
                # A manager remembers the scores that it has read.
                manager.close()
                self._manager = None
            self._failed, self._unconfirmed = None, score
        except Exception as error:  # Of any type: training continues without this checkpoint.
            self.record_failure(error)

    def _wait(self) -> None:
        """Waits for the checkpoint that is being written."""
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:  # As above; errors of background threads appear here.
            self.record_failure(error)
        if self._unconfirmed is not None:
            self._best, self._unconfirmed = self._unconfirmed, None

    def record_failure(self, error: Exception) -> None:
        """Records that a checkpoint was not written because of this error.

        Raises:
          SaveError, TransientError: other processes wait for this one.
        """
        # This manager still expects the checkpoint that it began to write, so the next save opens a
        # new one.
        self._manager, self._unconfirmed = None, None
        self._failed = retry.final_error(
            "the last checkpoint could not be written", error, SaveError
        )
        if self._processes.count > 1:
            what = f"process {self._processes.index} could not write a checkpoint"
            raise retry.final_error(what, error, SaveError) from error
        self._log(f"a checkpoint could not be written ({retry.reason(error)}); training continues")

    def finish(self) -> None:
        """Waits for the last checkpoint. Raises ``SaveError`` or ``TransientError`` if it could not
        be written."""
        self._wait()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and releases Orbax's threads."""
        try:
            self._wait()
        except Exception as error:
            # The run has ended already, perhaps with another error.
            self._log(str(error))
        if self._manager is not None:
            self._manager.close()


def list_updates(workdir: epath.PathLike) -> list[int]:
    """The checkpoints of a run, each by the number of updates that made it, in their order.

    Raises:
      ConfigError: there are none.
      TransientError: they can't be read at present.
    """
    folder = bucket.resolve(workdir) / FOLDER
    what = f"the checkpoints of {str(workdir)!r} can't be read"
    steps = retry.call(what, lambda: files.list_steps(folder))
    if not steps:
        raise ConfigError(f"{str(workdir)!r} holds no checkpoints")
    return steps[::-1]


def find(workdir: epath.PathLike, which: str | int, processes: Processes | None = None) -> int:
    """The number of updates that made certain weights of a run.

    Args:
      workdir: workdir of the run.
      which: "last", or "best" according to the run's evaluations, or a number of ``list_updates``.
      processes: the processes that ask together; None if this one is alone.

    Raises:
      ConfigError: there are no such weights, or they are damaged.
      TransientError: they can't be read at present.
    """
    if isinstance(which, str) and which not in WHICH:
        raise unknown("choice of weights", which, WHICH)
    # Orbax reads from absolute paths only.
    folder = bucket.resolve(workdir) / FOLDER
    with _reading_weights(workdir, which) as what:
        # The run may be training, so that processes see different checkpoints.
        step = (processes or Processes()).broadcast(
            lambda: retry.call(what, lambda: _choose(folder, which))
        )
    if step is None:
        missing = f"checkpoint {which}" if isinstance(which, int) else "checkpoints"
        raise ConfigError(f"{str(workdir)!r} holds no {missing}")
    return step


def load_weights(
    workdir: epath.PathLike, which: str | int, like: Weights, processes: Processes | None = None
) -> tuple[Weights, int]:
    """The weights of a run.

    Args:
      workdir: workdir of the run.
      which: as of ``find``.
      like: arrays or shapes of the expected weights.
      processes: the processes that load the weights together; None if this one is alone.

    Returns:
      The weights, on the default device or placed as ``like`` is, and the number of updates that
      made them.

    Raises:
      ConfigError: there are no weights, they have other shapes, or they are damaged.
      TransientError: they can't be read at present.
    """
    step = find(workdir, which, processes)
    folder, shapes = bucket.resolve(workdir) / FOLDER, _placed_shapes(like)
    try:
        with _reading_weights(workdir, which) as what:
            found = retry.call(what, lambda: files.read_weights(folder, step, shapes))
    except files.ShapeError as error:
        raise ConfigError(
            f"the weights in {str(workdir)!r} are of another network: {error}"
        ) from error
    return jax.tree_util.tree_map_with_path(lambda path, _: found[path_name(path)], like), step


@contextmanager
def _reading_weights(workdir: epath.PathLike, which: str | int) -> Iterator[str]:
    """Turns what shows that weights are damaged into ``ConfigError``; gives what fails in words."""
    try:
        yield f"the weights of {str(workdir)!r} can't be read"
    except Exception as error:
        if retry.fault(error) is not Fault.DAMAGED:
            raise
        name, advice = "a checkpoint", "resuming that run replaces it"
        if isinstance(which, int):
            name, advice = f"checkpoint {which}", "move it away to continue without it"
        raise ConfigError(
            f"{name} of {str(workdir)!r} is damaged: {retry.reason(error)}; {advice}"
        ) from error


def _placed_shapes(like: Weights) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes by name, on the default device where they are not placed."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)
        for name, x in named_arrays(like).items()
    }


def _choose(folder: epath.Path, which: str | int) -> int | None:
    """The newest checkpoint, the newest of those with the highest score, or the one of a number;
    None if there is no such checkpoint."""
    steps = files.list_steps(folder)
    if isinstance(which, int):
        return which if which in steps else None
    if which == "last":
        return max(steps, default=None)
    return max(steps, key=lambda step: (files.read_score(folder, step), step), default=None)
