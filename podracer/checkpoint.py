"""Checkpoints of a whole run, of all devices and processes, by Orbax, written in the background.

A checkpoint is a folder ``checkpoints/UPDATE`` of a workdir with three items: the weights, the rest
of the state and the run's progress. Orbax writes it under another name and renames it when all
of it is there; in a bucket, it adds a file that says so. A sum over the bits of the state goes with
it, so that a damaged one is known.
"""

import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from podracer import bucket
from podracer.errors import ConfigError, SaveError, unknown
from podracer.metrics import Row
from podracer.processes import Processes
from podracer.types import Array, ArrayTree, Weights

FOLDER, DAMAGED = "checkpoints", "damaged_checkpoints"
WEIGHTS, REST, PROGRESS = "weights", "rest", "progress"
WHICH = ("last", "best")
# Where the weights are in the state of either architecture.
_PREFIX = "train/weights/"


class Progress(NamedTuple):
    """How far a run has come: what a checkpoint knows beside arrays.

    Attributes:
      update: updates done.
      wall_time: seconds so far, over all starts of the run.
      seconds: of them, what they went to, by name.
      best: mean return of the best evaluation; None before the first.
      pending: the last update's row of metrics, if the run ended before its evaluation did.
    """

    update: int = 0
    wall_time: float = 0.0
    seconds: Mapping[str, float] = {}
    best: float | None = None
    pending: Row | None = None


def named(tree: ArrayTree) -> dict[str, Array]:
    """A tree's arrays by their path; random keys as the numbers they are made of."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): jax.random.key_data(x) if _is_key(x) else x for path, x in paths}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _like(tree: ArrayTree) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[..., ArrayTree]]:
    """What is needed to restore a tree: shapes and places by name, and what puts it together."""
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in named(tree).items()
    }
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    kinds = {_name(path): jax.random.key_impl(x) if _is_key(x) else None for path, x in paths}

    def build(named: Mapping[str, Array]) -> ArrayTree:
        leaves = (
            jax.random.wrap_key_data(named[name], impl=kind) if kind else named[name]
            for name, kind in kinds.items()
        )
        return structure.unflatten(leaves)

    return shapes, build


def _split(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The two items of arrays: weights, named as in a tree of their own, and the rest."""
    items: dict[str, dict[str, Any]] = {WEIGHTS: {}, REST: {}}
    for name, x in named.items():
        short = name.removeprefix(_PREFIX)
        items[REST if short == name else WEIGHTS][short] = x
    return items


def _join(items: Mapping[str, Any]) -> dict[str, Any]:
    return {_PREFIX + name: x for name, x in items[WEIGHTS].items()} | dict(items[REST])


def _bits(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)


@jax.jit
def checksum(arrays: Mapping[str, Array]) -> Array:
    """A number that any one changed element changes: a sum of all bits, weighted by odd numbers.

    Whole numbers modulo 2^32: how arrays are spread over devices makes no difference.

    Args:
      arrays: by name, of any shapes and types.

    Returns:
      ``[]`` uint32.
    """
    total = jnp.uint32(0)
    for number, name in enumerate(sorted(arrays)):
        x = arrays[name]
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
        part = jnp.sum(_bits(x) * (2 * place + 1), dtype=jnp.uint32)
        total += part * jnp.uint32(2 * number + 1)
    return total


def _score(metrics: Mapping[str, float | None]) -> float:
    score = metrics["score"]
    return -math.inf if score is None else score


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier in the background, but for a process that has failed to write and tidies up:
    the others are not there, and its error is to be heard."""
    background = threading.current_thread() is not threading.main_thread()
    if not (background and sys.exception()):
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _manager(folder: epath.Path, keep: int = 1, *, writes: bool = True) -> ocp.CheckpointManager:
    """A manager that all processes write by together, or by which each one reads for itself.

    Where processes are named, they meet at JAX's coordinator, and not in a collective of all
    devices: that of a CPU may still be under way on some when the next one begins on others.
    """
    processes = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        active = set(range(jax.process_count())) if writes else {jax.process_index()}
        processes = ocp.options.MultiprocessingOptions(
            primary_host=min(active), active_processes=active
        )
    policies = ocp.checkpoint_managers
    preserve = [policies.LatestN(keep), policies.BestN(get_metric_fn=_score, n=1)]
    return ocp.CheckpointManager(
        folder,
        item_handlers={
            WEIGHTS: ocp.StandardCheckpointHandler(),
            REST: ocp.StandardCheckpointHandler(),
            PROGRESS: ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=policies.AnyPreservationPolicy(preserve),
            # What a process that was killed has left half-written. A manager that neither cleans up
            # nor saves only reads; Orbax's own option for it warns its users of itself.
            cleanup_tmp_directories=writes,
            # With named processes Orbax does not make it.
            create=False,
            multiprocessing_options=processes,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=_barrier),
        ),
    )


def _reason(error: Exception) -> str:
    """An error as part of a sentence."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


class Checkpoints:
    """The checkpoints of a run in its workdir, written in the background."""

    def __init__(
        self,
        workdir: epath.Path,
        keep: int,
        warn: Callable[[str], None],
        processes: Processes,
    ):
        """``warn`` is told, in a line, of what goes wrong without ending the run; all
        ``processes`` save and restore their parts together.

        A save that fails does not end a run of one process. Of several, only one may have failed,
        and the others wait for it: it ends by ``SaveError``, as which the others know it.
        """
        self._workdir, self._keep, self._warn = workdir, keep, warn
        self._processes = processes
        self._manager: ocp.CheckpointManager | None = None
        self._failed: str | None = None

    def restore(self, state: ArrayTree) -> tuple[ArrayTree, Progress]:
        """The newest whole checkpoint, placed on devices as ``state`` is.

        Args:
          state: where the run would begin. It is freed if there is a checkpoint.

        Returns:
          State and progress; ``state`` and the very beginning where there is no checkpoint.

        Raises:
          SaveError: there are checkpoints, but none that can be used.
        """
        folder = self._workdir / FOLDER
        # Others may see older ones, or not all.
        steps = self._processes.from_first(lambda: _steps(folder))
        if not steps:
            return state, Progress()
        shapes, build = _like(state)
        for x in jax.tree.leaves(state):
            x.delete()
        damaged: dict[int, str] = {}
        for step in steps:
            # Nothing of the one before is to take memory meanwhile.
            read = None
            read, reason = self._together(lambda step=step: self._read(step, shapes))
            if reason is None:
                # One sum over all devices, which none may miss.
                _, reason = self._together(lambda read=read: _check(*read))
            if reason is None:
                self._processes.from_first(lambda: self._set_aside(damaged))
                arrays, progress = read
                del progress["checksum"]
                return build(arrays), Progress(**progress)
            damaged[step] = reason
        raise SaveError(
            f"no checkpoint in {self._workdir / FOLDER} can be used: "
            + "; ".join(f"{step} ({reason})" for step, reason in damaged.items())
            + "; --restart begins anew and moves this run aside"
        )

    def _together(self, make: Callable[[], Any]) -> tuple[Any, str | None]:
        """What ``make`` gives here, and why it has failed if it has in any process."""
        made, reason = None, None
        try:
            made = make()
        except Exception as error:  # What a damaged file leads to: of any kind.
            if self._processes.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                # Rather another process that is gone.
                raise
            reason = _reason(error)
        reasons = self._processes.from_all(reason)
        if self._processes.count > 1:
            reasons = [x and f"process {i}: {x}" for i, x in enumerate(reasons)]
        return made, "; ".join(filter(None, reasons)) or None

    def _read(self, step: int, shapes: Mapping[str, Any]) -> tuple[dict[str, Array], Any]:
        """The arrays of this process' devices, and the content of the progress."""
        items = {k: ocp.args.StandardRestore(x) for k, x in _split(shapes).items()}
        arguments = ocp.args.Composite(**items, **{PROGRESS: ocp.args.JsonRestore()})
        with _manager(self._workdir / FOLDER, writes=False) as manager:
            found = manager.restore(step, args=arguments)
        return _join(found), dict(found[PROGRESS])

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Moves damaged checkpoints away: their numbers will be needed again."""
        for step, reason in damaged.items():
            aside = self._workdir / DAMAGED
            number = len(list(aside.iterdir())) if aside.exists() else 0
            target = aside / f"{step}.{number}"
            bucket.move(self._workdir / FOLDER / str(step), target)
            self._warn(f"checkpoint {step} is damaged and now {target} ({reason})")

    def save(self, state: ArrayTree, progress: Progress, score: float | None) -> None:
        """Saves while training goes on. If that fails, it is told of, and older ones stay.

        Args:
          state: may be donated as soon as this returns.
          progress: of the run.
          score: mean return of the evaluation of this very state, if there was one.

        Raises:
          SaveError: this or the one before has failed, and other processes wait for this one.
        """
        # The one before has to be whole first.
        self._wait()
        try:
            folder = self._workdir / FOLDER
            self._processes.from_first(lambda: folder.mkdir(parents=True, exist_ok=True))
            manager = self._manager = self._manager or _manager(folder, self._keep)
            if self._processes.from_first(lambda: progress.update in manager.all_steps()):
                return
            arrays = named(state)
            content = {**progress._asdict(), "checksum": int(jax.device_get(checksum(arrays)))}
            items = {k: ocp.args.StandardSave(x) for k, x in _split(arrays).items()}
            arguments = ocp.args.Composite(**items, **{PROGRESS: ocp.args.JsonSave(content)})
            metrics = {"score": score}
            self._manager.save(progress.update, args=arguments, metrics=metrics, force=True)
            self._failed = None
        except Exception as error:  # A full disk and the like: of any kind.
            self._fail(error)

    def _wait(self) -> None:
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:  # As above; this is where the background's come out.
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # A manager counts on what it has begun to write: the next save opens a new one.
        self._manager, self._failed = None, _reason(error)
        if self._processes.count > 1:
            text = f"process {self._processes.index} could not write a checkpoint: {self._failed}"
            raise SaveError(text) from error
        self._warn(f"a checkpoint could not be written ({self._failed}); training goes on")

    def finish(self) -> None:
        """Waits for the last one. Raises ``SaveError`` if that one could not be written."""
        self._wait()
        if self._failed is not None:
            raise SaveError(f"the last checkpoint could not be written: {self._failed}")

    def close(self) -> None:
        """Waits for what is being written, and lets go of it."""
        try:
            self._wait()
        except SaveError as error:
            # Too late to end by it: the run has ended by another.
            self._warn(str(error))
        if self._manager is not None:
            self._manager.close()


def _check(arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    if (got := int(checksum(arrays))) != progress["checksum"]:
        raise ValueError(f"its checksum is {got}, not {progress['checksum']}")


def _steps(folder: epath.Path) -> list[int]:
    """The checkpoints of a folder, newest first."""
    with bucket.reachable(folder):
        if not folder.exists():
            return []
        with _manager(folder, writes=False) as manager:
            return sorted(manager.all_steps(), reverse=True)


def load_weights(
    workdir: epath.PathLike, which: str, like: Weights, processes: Processes | None = None
) -> tuple[Weights, int]:
    """The weights of a run.

    Args:
      workdir: of the run.
      which: "last" or "best", by evaluation.
      like: shapes, which must be those of the run.
      processes: that all load them; None if this one is alone.

    Returns:
      The weights, on the default device or as ``like`` is placed, and the number of updates that
      made them.

    Raises:
      ConfigError: there are none, or of other shapes.
    """
    # Orbax reads from absolute paths only.
    folder = bucket.resolve(workdir) / FOLDER
    if which not in WHICH:
        raise unknown("choice of weights", which, WHICH)
    with bucket.reachable(folder):
        if not folder.exists():
            raise ConfigError(f"{str(workdir)!r} holds no checkpoints")
        manager = _manager(folder, writes=False)
    # The run may go on meanwhile.
    step = (processes or Processes()).from_first(
        manager.latest_step if which == "last" else manager.best_step
    )
    if step is None:
        raise ConfigError(f"{str(workdir)!r} holds no checkpoint that is whole")
    there = manager.item_metadata(step)[WEIGHTS]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)
        for name, x in named(like).items()
    }
    for name in sorted(there.keys() | wanted.keys()):
        shapes = [tuple(x[name].shape) if name in x else None for x in (there, wanted)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"the weights in {str(workdir)!r} are of another network: {name} has the shape "
                f"{shapes[0]} there and {shapes[1]} here"
            )
    arguments = ocp.args.Composite(**{WEIGHTS: ocp.args.StandardRestore(wanted)})
    found = manager.restore(step, args=arguments)[WEIGHTS]
    manager.close()
    return jax.tree_util.tree_map_with_path(lambda path, _: found[_name(path)], like), step
