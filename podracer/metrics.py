"""What a run leaves behind and shows: clock, progress, and the files of its workdir."""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from podracer.config import Config, Sizes
from podracer.errors import ConfigError
from podracer.types import Device
from podracer.workdir import CONFIG, METRICS, SUMMARY

Row = dict[str, int | float]

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "rlax", "distrax", "chex", "gymnax", "envpool", "gymnasium",
    "numpy",
)  # fmt: skip
# Without a terminal, a line at most this often, in seconds.
PLAIN_INTERVAL = 2.0


class Clock:
    """Keeps what time went to, in seconds; what is not measured as something else is training."""

    def __init__(self):
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Adds the time spent inside to ``what``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """What was measured since this was last called."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def total(self) -> float:
        """Since the clock was made."""
        return time.monotonic() - self._start

    def training(self) -> float:
        """The total without all that was measured."""
        return self.total() - sum(self.seconds.values())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("podracer", *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _lock(file: TextIO, workdir: pathlib.Path) -> TextIO:
    """Holds a run's file until it is closed; raises ``ConfigError`` if another process does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"workdir {str(workdir)!r} belongs to a run that is going on; give another by --workdir"
        ) from error
    return file


def _claim(workdir: pathlib.Path) -> tuple[TextIO, str | None]:
    """Makes ``workdir`` a writable folder without a run in it; a run that is there moves aside.

    Returns:
      The file for metrics, which is locked, and where the earlier run went, if there was one.

    Raises:
      ConfigError: the folder can't be made or written to, or its run is still going on.
    """
    moved = None
    metrics = workdir / METRICS
    try:
        if metrics.exists():
            _lock(metrics.open("a", encoding="utf-8"), workdir).close()
            if workdir == pathlib.Path.cwd():
                raise ConfigError(
                    f"workdir {str(workdir)!r} holds a run already and, as the current directory, "
                    "can't be moved aside; give another by --workdir"
                )
            number = 1
            while (aside := workdir.with_name(f"{workdir.name}.{number}")).exists():
                number += 1
            workdir.rename(aside)
            moved = str(aside)
        workdir.mkdir(parents=True, exist_ok=True)
        return _lock(metrics.open("a", encoding="utf-8"), workdir), moved
    except OSError as error:
        raise ConfigError(
            f"workdir {str(workdir)!r} is not writable: {error.strerror}; give another by --workdir"
        ) from error


class Writer:
    """Writes a run's files and shows its progress, on a terminal as a bar, else in plain lines.

    Use as a context manager around the run, so that the bar is taken down however it ends.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
    ):
        """Claims the workdir; ``None`` writes no files. Raises ``ConfigError`` if it can't."""
        self._console = Console(file=stream or sys.stdout, quiet=quiet, highlight=False)
        self._workdir = None if workdir is None else pathlib.Path(workdir).resolve()
        self._shown = workdir
        self._file: TextIO | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total_steps = 0
        self._last_line = -PLAIN_INTERVAL
        if self._workdir is not None:
            self._file, moved = _claim(self._workdir)
            if moved:
                self._console.print(f"the earlier run in {self._workdir} is now {moved}")

    def begin(
        self, config: Config, sizes: Sizes, devices: Sequence[Device], layout: Mapping[str, str]
    ) -> None:
        """Says and writes down what was resolved.

        Args:
          config: of the run.
          sizes: of the run.
          devices: that it uses.
          layout: what runs where, by architecture.
        """
        self._total_steps = sizes.total_steps
        lines = {
            **layout,
            "batch": f"{sizes.num_envs:,} x {sizes.unroll_length} = "
            f"{sizes.steps_per_update:,} steps, {config.num_epochs} epochs of "
            f"{config.num_minibatches} minibatches",
            "updates": f"{sizes.num_updates:,} = {sizes.num_calls:,} calls of "
            f"{sizes.updates_per_call:,}; {sizes.total_steps:,} steps",
            "workdir": str(self._shown),
        }
        self._console.print(
            "\n".join(
                [
                    f"{config.agent} on {config.env}, seed {config.seed}",
                    *(f"  {name:<14} {line}" for name, line in lines.items()),
                ]
            ),
            soft_wrap=True,
            markup=False,
        )
        self._dump(
            CONFIG,
            {
                "config": dataclasses.asdict(config),
                "sizes": dataclasses.asdict(sizes),
                "layout": dict(layout),
                "devices": [str(device) for device in devices],
                "device_kind": devices[0].device_kind,
                "processes": jax.process_count(),
                "versions": _versions(),
            },
        )

    def __enter__(self) -> "Writer":
        if self._console.is_terminal and not self._console.quiet:
            self._progress = Progress(
                BarColumn(),
                TextColumn("{task.percentage:3.0f}% {task.fields[text]},"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
            )
            self._progress.start()
            self._task = self._progress.add_task("train", total=self._total_steps, text="starts")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def write(self, row: Row) -> None:
        """Appends one row and shows it; JSON has no word for NaN or infinity: they are null."""
        if self._file is not None:
            finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        text = f"{row['step']:,} steps, {row['time/steps_per_second']:,.0f} a second"
        if "train/episode_return" in row:
            text += f", return {row['train/episode_return']:,.1f}"
        evaluated = "eval/episode_return" in row
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=row["step"], text=text)
        if evaluated:
            text += f", evaluation {row['eval/episode_return']:,.1f}"
        now = time.monotonic()
        due = self._progress is None and now - self._last_line >= PLAIN_INTERVAL
        # On a terminal, evaluations stay above the bar.
        if evaluated or due:
            self._last_line = now
            self._console.print(text)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and says how it went."""
        self._dump(SUMMARY, summary)
        self._console.print(
            f"evaluation {summary['eval_return_mean']:,.2f} +- {summary['eval_return_std']:,.2f} "
            f"over {summary['eval_episodes']} episodes\n"
            f"{summary['env_steps']:,} steps in {summary['wall_seconds']:.1f} s, of which "
            f"{summary['compile_seconds']:.1f} s to compile; then "
            f"{summary['steps_per_second']:,.0f} steps a second",
            soft_wrap=True,
        )
        if "report" in summary:
            self._console.print(summary["report"], soft_wrap=True, markup=False)

    def _dump(self, name: str, content: dict[str, Any]) -> None:
        if self._workdir is not None:
            text = json.dumps(content, indent=2, default=str, allow_nan=False)
            (self._workdir / name).write_text(text + "\n", encoding="utf-8")
