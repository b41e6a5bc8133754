"""What a run shows: on a terminal a bar, else plain lines."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from podracer.metrics import Row

# Without a terminal, a line at most this often, in seconds.
PLAIN_INTERVAL = 2.0


class Screen:
    """Shows a run's progress; a context manager, so that the bar is taken down however it ends."""

    def __init__(self, stream: TextIO | None = None, *, level: str = "normal"):
        """``level`` "quiet" shows nothing."""
        self._console = Console(file=stream or sys.stdout, quiet=level == "quiet", highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = -PLAIN_INTERVAL

    def say(self, text: str) -> None:
        """Lines above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)

    def begin(self, total_steps: int, first_step: int = 0) -> None:
        """The run goes from ``first_step`` to ``total_steps``."""
        if self._console.is_terminal and not self._console.quiet:
            self._progress = Progress(
                BarColumn(),
                TextColumn("{task.percentage:3.0f}% {task.fields[text]},"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._console,
            )
            self._progress.start()
            self._task = self._progress.add_task(
                "train", total=total_steps, completed=first_step, text="starts"
            )

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, row: Row, seconds: Mapping[str, float]) -> None:
        """Shows a row of metrics; ``seconds`` are the clock's."""
        del seconds
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

    def finish(self, text: str) -> None:
        """The last words."""
        self.say(text)
