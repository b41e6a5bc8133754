"""A running mean of how far apart the values of a state's actions are: what a difference between
two of them is compared with, whatever the unit of rewards."""

import jax.numpy as jnp
from flax import struct

from podracer.types import Array, Reduce

# Share of the newest trajectory in the mean.
RATE = 0.01
# Before a network has learned, all values are 0 up to the rounding of their scale.
ROUNDING = 1e-5


class ValueRange(struct.PyTreeNode):
    """Sums over trajectories, in which older ones count less.

    Attributes:
      total: ``[]`` float32, of their mean ranges.
      weight: ``[]`` float32, the same sum of ones, for trajectories whose range is not 0.
    """

    total: Array
    weight: Array

    @property
    def mean(self) -> Array:
        """``[]``, 0 before the first range."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)


def init() -> ValueRange:
    """The mean of nothing."""
    return ValueRange(jnp.float32(0), jnp.float32(0))


def update(old: ValueRange, ranges: Array, all_mean: Reduce) -> ValueRange:
    """The mean after one more trajectory.

    Args:
      old: the mean before.
      ranges: ``[...]``, the highest values of states' actions less their lowest ones.
      all_mean: the mean over devices.
    """
    new = all_mean(ranges.mean())
    learned = new > ROUNDING
    return ValueRange(
        old.total + RATE * (jnp.where(learned, new, 0) - old.total),
        old.weight + RATE * (learned - old.weight),
    )
