"""One start of a run: what it resumes, writes and prints, and whether it must stop."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
from etils import epath

from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed.processes import Processes
from podracer.distributed.signals import StopSignals
from podracer.errors import TransientError
from podracer.monitoring import dashboard, hparams, writers
from podracer.monitoring.console import RunDisplay
from podracer.monitoring.curves import INTERVAL
from podracer.monitoring.figures import draw_run
from podracer.monitoring.formatting import mean_and_error
from podracer.monitoring.metrics import Clock
from podracer.monitoring.profiler import Profile
from podracer.storage import bucket, upgrading
from podracer.storage import workdir as workdir_lib
from podracer.storage.checkpoint import Checkpoints, Progress, load_weights
from podracer.storage.compatibility import check_num_agents, check_same_run
from podracer.storage.versions import versions
from podracer.storage.workdir import CHECKPOINTS, Workdir
from podracer.training import builder
from podracer.training.agreement import check_alike, check_shared
from podracer.training.options import Options
from podracer.types import Device, Row, Target


def check_resumed(
    files: Workdir, architecture: str, config: Config, log: Callable[[str], None]
) -> None:
    """Logs each setting in which a config differs from that of the run found in a workdir, if there
    is one. Raises ``ConfigError`` if one may not change."""
    if files.config is None:
        return
    now = {"architecture": architecture, **dataclasses.asdict(config)}
    defaults, fixed = dataclasses.asdict(Config()), config.agent_config.fixed
    with upgrading.explained(files.wrote):
        changed = check_same_run(files.config, now, defaults, fixed)
    for line in changed:
        log(line)


class Session:
    """The workdir, checkpoints and display of a run; a context manager that releases all of them
    however the run ends.

    Attributes:
      processes: the processes that share the run.
      stop: whether a signal has asked the run to stop.
    """

    def __init__(
        self,
        architecture: str,
        config: Config,
        sizes: Sizes,
        options: Options,
        processes: Processes | None = None,
    ):
        """Claims the workdir. Of several processes, the first one claims it and is the only one
        that prints and writes there, except for checkpoints, which all save and restore.

        Args:
          architecture: "anakin" or "sebulba".
          config: the run's configuration.
          sizes: the run's sizes.
          options: the run's other options.
          processes: the processes that share the run; None if this one is alone.

        Raises:
          ConfigError: the workdir can't be written to, is in use, or holds another run.
          TransientError: the workdir can't be used at present.
        """
        self._config, self._sizes, self._options = config, sizes, options
        self._architecture = architecture
        self.processes = processes or Processes()
        self.processes.check_devices()
        check_alike(architecture, config, options, self.processes)
        first = self.processes.first
        quiet = options.quiet or not first
        level = "quiet" if quiet else "verbose" if options.verbose else "normal"
        self._display = RunDisplay(level=level)
        self._writer: writers.Writer | None = None
        self._files: Workdir | None = None
        self._checkpoints: Checkpoints | None = None
        self._rows: list[Row] = []
        self._saved_at = time.monotonic()
        self._finished = False
        # What ``restore`` writes into config.json. A run that was finished keeps its own.
        self._content: dict[str, Any] = {}
        self._profile = Profile(0, None)
        again = "the same command"
        self.stop = StopSignals(f"{again} without --restart" if options.restart else again)
        if options.workdir is None:
            return
        with ExitStack() as on_error:
            path = epath.Path(self.processes.broadcast(lambda: self._claim(on_error)))
            check_shared(path, self.processes)
            settings = config.checkpoint
            self._checkpoints = Checkpoints(
                path, settings.keep, self.warn, self.processes, replay=settings.replay
            )
            on_error.pop_all()

    def _claim(self, on_error: ExitStack) -> str:
        """Locks the workdir and returns its absolute path."""
        options = self._options
        assert options.workdir is not None
        self._files = files = Workdir(options.workdir, restart=options.restart, log=self.log)
        on_error.callback(files.close)
        check_resumed(files, self._architecture, self._config, self.log)
        files.hold()
        files.make_folder(CHECKPOINTS)
        self._profile = Profile(options.profile, files.local / "profile")
        return str(files.path)

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics, including those of earlier starts. Processes other than the first
        one know only the last of those."""
        return self._rows if self._files is None else self._files.rows

    def begin(self, devices: Sequence[Device], layout: Mapping[str, str]) -> None:
        """Prints the run's sizes and layout, and writes ``config.json``.

        Args:
          devices: the devices that the run uses.
          layout: what runs on which devices, as lines of text by name.
        """
        config, sizes = self._config, self._sizes
        lines = {
            **layout,
            "batch": f"{sizes.num_envs:,} x {sizes.unroll_length} = "
            f"{sizes.steps_per_update:,} steps, {config.gradient_steps.text}",
            "updates": f"{sizes.num_updates:,} = {sizes.num_calls:,} calls of "
            f"{sizes.updates_per_call:,}; {sizes.total_steps:,} steps",
            "workdir": str(self._options.workdir),
        }
        title = dashboard.title(dataclasses.asdict(config))
        text = "\n".join([title, *(f"  {name:<14} {line}" for name, line in lines.items())])
        self._display.log(text)
        if self._files is not None:
            content = {
                "architecture": self._architecture,
                "config": dataclasses.asdict(config),
                "sizes": dataclasses.asdict(sizes),
                "layout": dict(layout),
                "devices": [str(device) for device in devices],
                "device_kind": devices[0].device_kind,
                "processes": jax.process_count(),
                "versions": versions(),
                "command": list(self._options.command),
            }
            self._content = content
            # At once, so that a new run can be looked at while it compiles.
            if self._files.config is None:
                self._files.dump(workdir_lib.CONFIG, content)

    def log(self, text: str) -> None:
        """Prints lines of text, in the first process."""
        self._display.log(text)

    def warn(self, text: str) -> None:
        """Prints lines of text that may concern this process alone; thread-safe."""
        if self.processes.first:
            self._display.log(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def restore(self, state: Any, clock: Clock, target: Target | None) -> tuple[Any, Progress]:
        """The state to resume the run from: that of its newest checkpoint, or the initial one.

        Args:
          state: the initial state, whose ``train`` is a ``TrainState``. It is freed if there is a
            checkpoint.
          clock: the times of the run's earlier starts are added to it.
          target: of the run's agent.

        Raises:
          ConfigError: the weights to start from belong to another network.
          SaveError: there are checkpoints, but all are damaged.
          TransientError: a checkpoint can't be read at present.
        """
        self.processes.begin(None, "restoring")
        progress = Progress()
        if self._checkpoints is not None:
            state, progress = self._checkpoints.restore(state)
        clock.resume(progress.wall_time, progress.seconds)
        step = progress.update * self._sizes.steps_per_update
        progress = self._rewind(progress, step, clock)
        self._finished = progress.update >= self._sizes.num_updates and progress.pending is None
        if self._files is not None and self._saved_summary() is None:
            self._files.dump(workdir_lib.CONFIG, self._content)
        if self._finished:
            self.log(
                f"the run is finished, at step {step:,}, with the settings in its config.json; "
                "raise total_steps to train longer, choose another --workdir for other settings, "
                "or --restart starts over"
            )
        elif progress.update:
            self.log(f"resumed from update {progress.update:,}, step {step:,}")
            if not progress.replay:
                self.log(
                    "the replay was not saved and refills: learning continues after "
                    f"at least {self._config.replay.begin:,} more steps"
                )
        elif self._options.init_from is not None:
            check_num_agents(self._options.init_from, self._sizes.num_agents)
            weights, update = load_weights(
                self._options.init_from, "last", state.train.weights, self.processes
            )
            train = builder.with_weights(state.train, weights, target, self._sizes.num_agents)
            state = state.replace(train=train)
            self.log(f"starts from the weights of {self._options.init_from} at update {update:,}")
        settings = dataclasses.asdict(self._config)
        if self._files is not None:
            folder = pathlib.Path(self._files.local)
            last = self.rows[-1]["step"] if self.rows else 0
            self._writer = writers.make_writer(
                self._config.logging, folder, settings, int(last), self.log
            )
        title = dashboard.title(settings)
        self._display.begin(self._sizes.total_steps, step, title=title, earlier=self.rows)
        self._saved_at = time.monotonic()
        return state, progress

    def _rewind(self, progress: Progress, step: int, clock: Clock) -> Progress:
        """Drops the rows after this step, and also the row of this step if its evaluation is
        pending: they will be written again."""

        def rewind() -> tuple[Row | None, list[Row]]:
            files, pending = self._files, progress.pending
            if files is not None:
                files.keep(step)
                finished = progress.update >= self._sizes.num_updates
                last = files.rows[-1] if files.rows else {"step": step, "wall_time": clock.total()}
                if finished and pending is None and "eval/episode_return" not in last:
                    # The previous config had more updates, or the rows were lost.
                    pending = last
                if pending is not None:
                    files.keep(step - 1)
            return pending, self.rows[-1:]

        pending, self._rows = self.processes.broadcast(rewind)
        return progress._replace(pending=pending)

    def write(self, row: Row, clock: Clock) -> None:
        """Writes a row of metrics and shows it."""
        if self._files is None:
            self._rows.append(row)
        else:
            self._files.append(row)
        if self._writer is not None:
            self._writer.write(row)
        self._display.show(row, {**clock.seconds, "training": clock.training()})

    def profile(self, state: Any, update: int) -> None:
        """Starts or ends the trace that ``Options.profile`` asks for.

        Args:
          state: the state after ``update`` updates.
          update: the number of updates done.
        """
        if self._profile.advance(state, update):
            folder = epath.Path(self._options.workdir or "") / "profile"
            self.log(f"a trace of {self._options.profile} updates is in {folder}")

    def save_overdue(self) -> bool:
        """Whether a checkpoint is due by the clock of this process."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return 0 < self._config.checkpoint.minutes <= minutes

    def improves(self, score: float) -> bool:
        """Whether an evaluation's mean return is higher than those of all complete checkpoints, so
        that its weights have to be saved."""
        return self._checkpoints is not None and self._checkpoints.improves(score)

    def save(self, state: Any, progress: Progress, score: float | None) -> None:
        """Saves the run while training continues; all rows up to this state were written before.

        Args:
          state: the state to save; it may be donated as soon as this returns.
          progress: how far the run has come.
          score: the mean return of the evaluation of this state, if that is the best so far.

        Raises:
          DisplacedError: the workdir belongs to another run now.
          SaveError, TransientError: the rows can't be written, or one of several processes can't
            write its part.
        """
        self._saved_at = time.monotonic()
        if self._checkpoints is None:
            return
        if self._files is not None:
            try:
                rewritten = self._files.sync()
            except TransientError as error:
                # A checkpoint must not be newer than the rows.
                self._checkpoints.record_failure(error)
                return
            if rewritten:
                self.log(f"{self._files.path} had been deleted and was written again")
        self._checkpoints.save(state, progress, score)

    def finish_saving(self) -> None:
        """Waits for the last checkpoint. Raises ``SaveError`` or ``TransientError`` if it could not
        be written."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def agree(self, summarize: Callable[[Sequence[Row]], dict[str, Any]]) -> dict[str, Any]:
        """What the first process makes of all rows of metrics, in all processes; JSON can represent
        it. If the run was finished before this start, which adds nothing to it, its summary."""
        return self.processes.broadcast(lambda: self._saved_summary() or summarize(self.rows))

    def _saved_summary(self) -> dict[str, Any] | None:
        if self._files is None or not self._finished:
            return None
        path = bucket.locate(self._files.path) / workdir_lib.SUMMARY
        return json.loads(bucket.read(path)) if bucket.exists(path) else None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json`` and prints a summary."""
        if self._files is not None:
            self._files.dump(workdir_lib.SUMMARY, summary)
            self._draw(pathlib.Path(self._files.local))
        spread, whose = summary["eval_return_std"], ""
        if "eval_return_interval" in summary:
            spread = summary["eval_return_interval"]
            whose = f" of each agent; ± is the {INTERVAL} of the mean over agents"
        text = (
            f"evaluation {mean_and_error(summary['eval_return_mean'], spread)} "
            f"over {summary['eval_episodes']} episodes{whose}\n"
            f"{summary['env_steps']:,} steps in {summary['wall_seconds']:.1f} s, of which "
            f"{summary['compile_seconds']:.1f} s to compile; then "
            f"{summary['steps_per_second']:,.0f} steps/s"
        )
        self._display.finish("\n".join([text, *filter(None, [summary.get("report")])]))

    def _draw(self, folder: pathlib.Path) -> None:
        """Writes what shows a finished run, in its workdir; the run has succeeded without it."""
        files: dict[str, Callable[[], object]] = {
            workdir_lib.LEARNING_CURVE: lambda: draw_run(folder)
        }
        if self._config.logging.tensorboard:
            files[writers.TENSORBOARD] = lambda: hparams.write(
                folder / writers.TENSORBOARD, self._config, self.rows[-1]
            )
        for name, write in files.items():
            try:
                write()
            except OSError as error:
                self.log(f"{name} could not be written: {error.strerror}")

    def __enter__(self) -> "Session":
        self._display.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as last_first:
            for each in (self._files, self._checkpoints, self._writer, self._profile):
                if each is not None:
                    last_first.callback(each.close)
            last_first.callback(self._display.__exit__)
            self.processes.announce_end(error)
