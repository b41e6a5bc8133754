"""Numbers as people read them, in one place for the live view, summaries, tables and plans."""

import datetime
import math
import os

import humanize
from rich.console import Console

# The longest duration that is shown; ``timedelta`` raises OverflowError beyond its own limit.
MAX_SECONDS = 1e9


def number(x: float, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, or all digits before its decimal point.

    Integers are never rounded. Trailing zeros are kept, so that a number that changes in a live
    view keeps its width: 1.500, 12.25, 1,235 and 1,234,567, but 1.235e+09 and 1.500e-05.
    """
    if isinstance(x, int):
        return f"{x:,}"
    if not math.isfinite(x):
        return str(x)
    scientific = f"{x:.{digits - 1}e}"
    exponent = int(scientific.partition("e")[2])
    return f"{x:,.{max(0, digits - 1 - exponent)}f}" if -5 < exponent < 9 else scientific


def console() -> Console:
    """Prints tables; in a file or a pipe, which have no width, they are not cut to that of a
    terminal."""
    found = Console(highlight=False)
    has_width = found.is_terminal or found.is_jupyter or "COLUMNS" in os.environ
    return found if has_width else Console(width=160, highlight=False)


def mean_and_error(mean: float, error: float | None) -> str:
    """A mean ± its error with the same decimals, those of ``number`` for the larger of the two.

    Args:
      mean: the mean.
      error: half the width of its confidence interval, or a standard deviation; None shows the
        mean alone.
    """
    if error is None:
        return number(mean)
    decimals = number(max(abs(mean), abs(error))).partition(".")[2]
    if "e" in decimals:
        return f"{number(mean)} ± {number(error)}"
    return f"{mean:,.{len(decimals)}f} ± {error:,.{len(decimals)}f}"


def metric(x: float, unit: str = "") -> str:
    """Three significant digits and a metric prefix, such as 12.3 M or 4.50 GB."""
    return humanize.metric(x, unit)


def size(num_bytes: float) -> str:
    """Bytes of memory with a binary prefix, such as 1.5 GiB."""
    return humanize.naturalsize(num_bytes, binary=True)


def seconds(x: float) -> str:
    """A measured or estimated time, such as 23.9 s, 7.57 ms or 56.9 μs."""
    return f"{number(x, 3)} s" if x >= 1 else humanize.metric(x, "s")


def duration(x: float) -> str:
    """Seconds as hours, minutes and seconds: 1:02:05, or 1 day, 1:02:05."""
    if math.isnan(x):
        return "unknown"
    return str(datetime.timedelta(seconds=round(min(x, MAX_SECONDS))))
