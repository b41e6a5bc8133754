"""What a run measures: rows of numbers, and what its time went to."""

import contextlib
import time
from collections.abc import Iterator, Mapping

Row = dict[str, int | float]


class Clock:
    """Keeps what time went to, in seconds; what is not measured as something else is training."""

    def __init__(self):
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    def resume(self, wall_time: float, seconds: Mapping[str, float]) -> None:
        """Adds what earlier starts of the run took."""
        self._start -= wall_time
        for what, x in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + x

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
