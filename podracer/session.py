"""One start of a run: what it continues, what it shows and leaves, and how it is asked to end."""

import dataclasses
import json
import pathlib
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
from etils import epath

from podracer import bucket, trackers
from podracer import view as view_lib
from podracer import workdir as workdir_lib
from podracer.checkpoint import FOLDER, Checkpoints, Progress, load_weights
from podracer.config import Config, Sizes
from podracer.errors import ConfigError
from podracer.metrics import Clock, Row
from podracer.plot import draw_run
from podracer.processes import Address, Processes
from podracer.profile import Profile
from podracer.screen import Screen
from podracer.signals import StopSignals
from podracer.types import Device
from podracer.workdir import Workdir, check_same_run

# Packages whose versions must be the same in all processes.
ALIKE = ("podracer", "jax", "jaxlib")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is given beside its config.

    Attributes:
      workdir: folder for checkpoints, config.json, metrics.jsonl and summary.json, also as
        gs://BUCKET/FOLDER; a run that is there is continued. None writes nothing.
      restart: begin anew; a run that is in the workdir moves aside.
      init_from: workdir of another run, whose last weights this one begins with.
      quiet: print nothing.
      verbose: show all values of each row of metrics.
      profile: write a trace of so many updates into WORKDIR/profile, for XProf or TensorBoard.
      coordinator, num_processes, process_id: see ``processes.Address``. A workdir must be reached
        by all processes.
    """

    workdir: epath.PathLike | None = None
    restart: bool = False
    init_from: epath.PathLike | None = None
    quiet: bool = False
    verbose: bool = False
    profile: int = 0
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        if self.profile < 0 or (self.profile and self.workdir is None):
            raise ConfigError(
                f"profile={self.profile} must not be negative, and needs a workdir to write to"
            )
        for path in (self.workdir, self.init_from):
            if path is not None:
                bucket.locate(path)

    @property
    def address(self) -> Address:
        """Where the other processes are."""
        return Address(self.coordinator, self.num_processes, self.process_id)


class Session:
    """What a run keeps and shows; a context manager, so that all is let go of however it ends.

    Attributes:
      processes: that share the run.
      stop: whether the run has been asked to end.
    """

    def __init__(
        self,
        architecture: str,
        config: Config,
        sizes: Sizes,
        options: Options,
        processes: Processes | None = None,
    ):
        """Claims the workdir. Of several processes the first one does, and it alone writes there
        and prints; all save and restore.

        Args:
          architecture: "anakin" or "sebulba".
          config: of the run.
          sizes: of the run.
          options: what else it is given.
          processes: that share the run; None if this one is alone.

        Raises:
          ConfigError: the workdir can't be written to, is in use, or holds another run.
        """
        self._config, self._sizes, self._options = config, sizes, options
        self._architecture = architecture
        self.processes = processes or Processes()
        self.processes.check_devices()
        check_alike(architecture, config, options, self.processes)
        first = self.processes.first
        quiet = options.quiet or not first
        level = "quiet" if quiet else "verbose" if options.verbose else "normal"
        self._screen = Screen(level=level)
        self._tracker: trackers.Tracker | None = None
        self._files: Workdir | None = None
        self._checkpoints: Checkpoints | None = None
        self._rows: list[Row] = []
        self._saved_at = time.monotonic()
        self._profile = Profile(0, None)
        self.stop = StopSignals()
        if options.workdir is None:
            return
        with ExitStack() as on_error:
            path = epath.Path(self.processes.from_first(lambda: self._claim(on_error)))
            with bucket.reachable(path):
                check_shared(path, self.processes)
            self._checkpoints = Checkpoints(
                path, config.checkpoint.keep, self._warn, self.processes
            )
            on_error.pop_all()

    def _claim(self, on_error: ExitStack) -> str:
        """Locks the workdir and gives its whole path."""
        options, say = self._options, self._screen.say
        assert options.workdir is not None
        self._files = files = Workdir(options.workdir, restart=options.restart, say=say)
        on_error.callback(files.close)
        if files.config is not None:
            now = {"architecture": self._architecture, **dataclasses.asdict(self._config)}
            for line in check_same_run(files.config, now):
                say(line)
        files.hold()
        files.make(FOLDER)
        self._profile = Profile(options.profile, files.local / "profile")
        return str(files.path)

    @property
    def rows(self) -> list[Row]:
        """Of metrics, those of earlier starts among them; other processes than the first one know
        only the last of those."""
        return self._rows if self._files is None else self._files.rows

    def begin(self, devices: Sequence[Device], layout: Mapping[str, str]) -> None:
        """Says and writes down what was resolved.

        Args:
          devices: that the run uses.
          layout: what runs where, by architecture.
        """
        config, sizes = self._config, self._sizes
        lines = {
            **layout,
            "batch": f"{sizes.num_envs:,} x {sizes.unroll_length} = "
            f"{sizes.steps_per_update:,} steps, {config.num_epochs} epochs of "
            f"{config.num_minibatches} minibatches",
            "updates": f"{sizes.num_updates:,} = {sizes.num_calls:,} calls of "
            f"{sizes.updates_per_call:,}; {sizes.total_steps:,} steps",
            "workdir": str(self._options.workdir),
        }
        title = view_lib.title(dataclasses.asdict(config))
        text = "\n".join([title, *(f"  {name:<14} {line}" for name, line in lines.items())])
        self._screen.say(text)
        if self._files is not None:
            content = {
                "architecture": self._architecture,
                "config": dataclasses.asdict(config),
                "sizes": dataclasses.asdict(sizes),
                "layout": dict(layout),
                "devices": [str(device) for device in devices],
                "device_kind": devices[0].device_kind,
                "processes": jax.process_count(),
                "versions": workdir_lib.versions(),
            }
            self._files.dump(workdir_lib.CONFIG, content)

    def say(self, text: str) -> None:
        """Shows a line of text."""
        self._screen.say(text)

    def _warn(self, text: str) -> None:
        if self.processes.first:
            self._screen.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def restore(self, state: Any, clock: Clock) -> tuple[Any, Progress]:
        """Where the run goes on: at its newest checkpoint, else at its beginning.

        Args:
          state: the first one, with ``state.train`` a ``TrainState``. It is freed if the run has
            come further.
          clock: goes on from the run's earlier starts.

        Raises:
          ConfigError: the weights to begin with are of another network.
          SaveError: there are checkpoints, but none that can be used.
        """
        self.processes.reached(None, "restoring")
        progress = Progress()
        if self._checkpoints is not None:
            state, progress = self._checkpoints.restore(state)
        clock.resume(progress.wall_time, progress.seconds)
        step = progress.update * self._sizes.steps_per_update
        progress = self._rewind(progress, step, clock)
        if progress.update:
            self._screen.say(f"goes on from update {progress.update:,}, step {step:,}")
        elif self._options.init_from is not None:
            weights, update = load_weights(
                self._options.init_from, "last", state.train.weights, self.processes
            )
            state = state.replace(train=state.train.replace(weights=weights))
            self._screen.say(
                f"begins with the weights of {self._options.init_from} after {update:,} updates"
            )
        settings = dataclasses.asdict(self._config)
        if self._files is not None:
            folder, say = pathlib.Path(self._files.local), self._screen.say
            last = self.rows[-1]["step"] if self.rows else 0
            self._tracker = trackers.make(self._config.logging, folder, settings, int(last), say)
        title = view_lib.title(settings)
        self._screen.begin(self._sizes.total_steps, step, title=title, earlier=self.rows)
        self._saved_at = time.monotonic()
        return state, progress

    def _rewind(self, progress: Progress, step: int, clock: Clock) -> Progress:
        """Drops the rows after this step, and the last one if it waits for its evaluation: it will
        be written again."""

        def rewind() -> tuple[Row | None, list[Row]]:
            files, pending = self._files, progress.pending
            if files is not None:
                files.keep(step)
                over = progress.update >= self._sizes.num_updates
                last = files.rows[-1] if files.rows else {"step": step, "wall_time": clock.total()}
                if over and pending is None and "eval/episode_return" not in last:
                    # By the config it was run with, it was not over; or its rows were lost.
                    pending = last
                if pending is not None:
                    files.keep(step - 1)
            return pending, self.rows[-1:]

        pending, self._rows = self.processes.from_first(rewind)
        return progress._replace(pending=pending)

    def write(self, row: Row, clock: Clock) -> None:
        """Adds a row of metrics and shows it."""
        if self._files is None:
            self._rows.append(row)
        else:
            self._files.append(row)
        if self._tracker is not None:
            self._tracker.write(row)
        self._screen.show(row, {**clock.seconds, "training": clock.training()})

    def profile(self, state: Any, update: int) -> None:
        """Begins or ends the trace that was asked for.

        Args:
          state: which ``update`` updates have made.
          update: their number.
        """
        if self._profile.look(state, update):
            folder = epath.Path(self._options.workdir or "") / "profile"
            self.say(f"a trace of {self._options.profile} updates is in {folder}")

    def save_due(self, before: int, after: int) -> bool:
        """Whether a checkpoint is due when a run has come from update ``before`` to ``after``."""
        every = self._config.checkpoint.every
        return every > 0 and after // every > before // every

    def save_late(self) -> bool:
        """Whether a checkpoint is due by the clock, which other processes read otherwise."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return 0 < self._config.checkpoint.minutes <= minutes

    def save(self, state: Any, progress: Progress, score: float | None) -> None:
        """Saves the run while it goes on; all rows up to there have been written.

        Args:
          state: may be donated as soon as this returns.
          progress: of the run.
          score: mean return of this very state's evaluation, if there was one.
        """
        self._saved_at = time.monotonic()
        if self._checkpoints is None:
            return
        if self._files is not None and self._files.sync():
            self._screen.say(f"{self._files.path} had been deleted, and is written anew")
        self._checkpoints.save(state, progress, score)

    def finish_saving(self) -> None:
        """Waits for the last checkpoint. Raises ``SaveError`` if it could not be written."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json and says how it went."""
        if self._files is not None:
            self._files.dump(workdir_lib.SUMMARY, summary)
            try:
                draw_run(self._files.local)
            except OSError as error:
                self.say(f"{workdir_lib.LEARNING_CURVE} could not be written: {error.strerror}")
        text = (
            f"evaluation {summary['eval_return_mean']:,.2f} +- {summary['eval_return_std']:,.2f} "
            f"over {summary['eval_episodes']} episodes\n"
            f"{summary['env_steps']:,} steps in {summary['wall_seconds']:.1f} s, of which "
            f"{summary['compile_seconds']:.1f} s to compile; then "
            f"{summary['steps_per_second']:,.0f} steps a second"
        )
        self._screen.finish("\n".join([text, *filter(None, [summary.get("report")])]))

    def __enter__(self) -> "Session":
        self._screen.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as last_first:
            for each in (self._files, self._checkpoints, self._tracker, self._profile):
                if each is not None:
                    last_first.callback(each.close)
            last_first.callback(self._screen.__exit__)
            self.processes.ending(error)


def check_alike(architecture: str, config: Config, options: Options, processes: Processes) -> None:
    """Raises ``ConfigError`` where processes were not started by the same command."""
    own = {
        "architecture": architecture,
        "workdir": options.workdir is not None,
        "init_from": options.init_from is not None,
        **{x: version for x, version in workdir_lib.versions().items() if x in ALIKE},
        **dataclasses.asdict(config),
    }
    first, *others = processes.from_all(json.loads(json.dumps(own, default=str)))
    for index, other in enumerate(others, 1):
        for key, (expected, got) in workdir_lib.differences(first, other).items():
            raise ConfigError(
                f"process {index} has {key}={got!r} and process 0 has {expected!r}: all must be "
                "started by the same command"
            )


def check_shared(path: epath.Path, processes: Processes) -> None:
    """Raises ``ConfigError`` where a process does not find in the workdir what the first writes."""
    if processes.count == 1:
        return

    def write() -> str:
        # Of a new name: no machine can remember that there was none.
        mark = path / f".shared-{uuid.uuid4().hex}"
        mark.write_text("")
        return mark.name

    mark = path / processes.from_first(write)
    missing = [i for i, found in enumerate(processes.from_all(mark.exists())) if not found]
    if processes.first:
        mark.unlink()
    if missing:
        raise ConfigError(
            f"workdir {str(path)!r} is not the same folder for process 0 and process "
            f"{', '.join(map(str, missing))}; give one that all processes reach by --workdir"
        )
