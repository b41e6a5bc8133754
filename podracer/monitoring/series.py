"""Series of any length in few numbers, and as a line of block characters."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# The most cells of a sparkline.
SPARK_CELLS = 60
BLOCKS = "▁▂▃▄▅▆▇█"


class Series(NamedTuple):
    """A series of any length, summarized by at most ``2 * SPARK_CELLS`` means of neighbours.

    Attributes:
      means: means of ``span`` consecutive values each; the last one may be of fewer.
      span: number of values to a mean; doubles whenever there would be too many means.
      num_values: number of finite values so far.
      low: lowest finite value.
      high: highest finite value.
      last: newest value, finite or not.
    """

    means: tuple[float, ...] = ()
    span: int = 1
    num_values: int = 0
    low: float = math.inf
    high: float = -math.inf
    last: float = math.nan


def append(series: Series, value: float) -> Series:
    """The series with one more value. NaN and infinity only change ``last``."""
    if not math.isfinite(value):
        return series._replace(last=value)
    means, span, filled = series.means, series.span, series.num_values % series.span
    if filled:
        means = (*means[:-1], means[-1] + (value - means[-1]) / (filled + 1))
    else:
        if len(means) == 2 * SPARK_CELLS:
            means = tuple(map(statistics.fmean, zip(means[::2], means[1::2], strict=True)))
            span *= 2
        means = (*means, value)
    low, high = min(series.low, value), max(series.high, value)
    return Series(means, span, series.num_values + 1, low, high, value)


def sparkline(values: Sequence[float], width: int) -> str:
    """A series as at most ``width`` block characters, each the mean of neighbouring values."""
    count = min(width, len(values))
    if count <= 0:
        return ""
    edges = [i * len(values) // count for i in range(count + 1)]
    cells = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(cells), max(cells)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((cell - low) * scale)] for cell in cells)
