"""Measures how a run spends its time."""

import contextlib
import time
from collections.abc import Iterator, Mapping


class Clock:
    """Measures seconds by activity. Time that is not measured as anything else is training."""

    def __init__(self):
        """Starts the clock."""
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    def resume(self, wall_time: float, seconds: Mapping[str, float]) -> None:
        """Adds the time of the processes that this one resumes.

        Args:
          wall_time: total seconds.
          seconds: seconds by activity, training excluded.
        """
        self._start -= wall_time
        for activity, x in seconds.items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + x

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Adds the time spent inside the context to ``activity``."""
        start = time.monotonic()
        try:
            yield
        finally:
            elapsed = time.monotonic() - start
            self.seconds[activity] = self.seconds.get(activity, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Returns the seconds by activity since the last call, and resets them."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def total(self) -> float:
        """Seconds since the clock was started, including those of the processes it resumes."""
        return time.monotonic() - self._start

    def training(self) -> float:
        """Seconds of training: the total without all measured activities."""
        return self.total() - sum(self.seconds.values())
