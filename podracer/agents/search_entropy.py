"""How certain the policies of searches are, steered by their entropy.

A search weighs differences between the values of actions, and the same difference may decide over
an episode in one environment and be an error of the network in another. Where ``least_range`` of a
search is too small, errors add up until policies take one action for no reason; where it is too
large, policies remain random. As soft actor-critic does for its temperature
(https://arxiv.org/abs/1812.05905, section 5), the entropy that policies should have is set instead,
and ``least_range`` moves until they have it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.errors import ConfigError
from podracer.learning.scalars import OFF_AT_ZERO, is_on
from podracer.types import Array, Leaf, Reduce

# How far the logarithm of the range moves in an update, times the error of the entropy.
RATE = 0.02
# The range stays within these factors of where it began, also if no range has the wanted entropy.
FACTORS = (1e-3, 1e3)


@dataclasses.dataclass(frozen=True)
class EntropyConfig:
    """The mean entropy that the policies found by the actors' searches should have.

    Attributes:
      start: the mean entropy that policies should have at the start of training, as a share of that
        of the uniform policy. ``search.least_range`` is then only the first value of the range that
        is used. With 0, entropies have no effect, and the range does not change.
      end: this share after ``steps``.
      steps: number of environment steps in which the share changes from ``start`` to ``end``; with
        0 it remains ``start``.
    """

    start: float = dataclasses.field(default=0.0, metadata=OFF_AT_ZERO)
    end: float = 0.3
    steps: int = 0

    def __post_init__(self):
        if not 0 <= self.start < 1 or not 0 < self.end < 1:
            raise ConfigError(
                "muzero.entropy.start must be in [0, 1) and muzero.entropy.end in (0, 1), got "
                f"{self.start} and {self.end}"
            )
        if self.steps < 0:
            raise ConfigError(f"muzero.entropy.steps must not be negative, got {self.steps}")

    def at(self, step: Array) -> Any:
        """The wanted share after a number of environment steps, ``[]``."""
        return optax.linear_schedule(self.start, self.end, self.steps)(step)


def update(
    config: EntropyConfig, first: Leaf, old: Array, step: Array, policy: Array, all_mean: Reduce
) -> Array:
    """``least_range`` after one more update, ``[]``.

    Args:
      config: the wanted entropy.
      first: ``least_range`` of the config.
      old: ``least_range`` before, ``[]``.
      step: number of environment steps so far, ``[]``.
      policy: ``[..., branches]``, what the actors' searches found.
      all_mean: the mean over devices.
    """
    start = jnp.asarray(first, jnp.float32)
    if not is_on(config.start):
        return start
    largest = jnp.log(max(policy.shape[-1], 2))
    share = all_mean(jax.scipy.special.entr(policy).sum(-1).mean()) / largest
    low, high = (factor * start for factor in FACTORS)
    return jnp.clip(old * jnp.exp(RATE * (config.at(step) - share)), low, high)
