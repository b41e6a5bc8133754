"""Population-based training, https://arxiv.org/abs/1711.09846: agents that do badly copy those that
do well, and change their settings a little.

Selection is by truncation: the worst share of the agents copies the best share, the worst agent the
best one, and so on. The paper draws at random which of the best is copied.

An evolution strategy copies weights in the same way, but draws the settings of all agents around
one mean, which it moves to those of the best.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.types import Array, Leaf

# What the settings of agents change from, see ``config.SelectionConfig``.
RULES = ("copy", "evolution")


class Distribution(NamedTuple):
    """Numbers between two others, uniformly on a linear or a logarithmic scale."""

    logarithmic: bool
    low: float
    high: float

    def at(self, position: Leaf) -> Leaf:
        """The numbers at positions in [0, 1] of the scale."""
        if self.logarithmic:
            return self.low * (self.high / self.low) ** position
        return self.low + (self.high - self.low) * position

    def position(self, number: Array) -> Array:
        """The positions of numbers on the scale."""
        if self.logarithmic:
            return jnp.log(number / self.low) / jnp.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)


class Scores(struct.PyTreeNode):
    """How an agent has done since the last selection.

    Attributes:
      episodes: ``[]``, number of episodes that have ended.
      total: ``[]``, the sum of their returns.
      begin: ``[]`` int32, number of updates at that selection.
    """

    episodes: Array
    total: Array
    begin: Array

    @property
    def mean(self) -> Array:
        """The mean return."""
        return self.total / jnp.maximum(self.episodes, 1)

    def add(self, episodes: Array, total: Array) -> "Scores":
        """With these episodes and returns, of which there may be any number."""
        return self.replace(episodes=self.episodes + episodes.sum(), total=self.total + total.sum())


def no_scores(updates: Array) -> Scores:
    """The scores at a selection."""
    zero = jnp.zeros(updates.shape)
    return Scores(zero, zero, updates)


def is_due(scores: Scores, alive: Array, updates: Array, every: int) -> Array:
    """Whether agents are selected now, ``[]`` bool: after ``every`` updates, and not before each
    agent that has not diverged has ended an episode.

    Args:
      scores: of all agents, ``[agents]`` each.
      alive: ``[agents]``, whether an agent has not diverged.
      updates: ``[]``, number of updates done.
      every: updates between two selections.
    """
    return (updates - scores.begin[0] >= every) & ((scores.episodes > 0) | ~alive).all()


def parents(scores: Array, share: float) -> Array:
    """Whom each agent copies, ``[agents]`` int32: itself, unless it is among the worst.

    Args:
      scores: ``[agents]``; of agents with equal scores, the one with the lower number is better.
        One with a score of -infinity has diverged, and is not copied.
      share: the share of the agents that copies, at most a half.
    """
    count = scores.shape[0]
    copies = int(count * share)
    order = jnp.argsort(-scores, stable=True)
    worst = order[::-1][:copies]
    best = order[:copies]
    return jnp.arange(count).at[worst].set(jnp.where(jnp.isneginf(scores[best]), worst, best))


def recombine(scores: Array, share: float) -> Array:
    """How much each agent counts in the mean of the best, ``[agents]``, with a sum of 1.

    The weights fall with the logarithm of the rank, as in CMA-ES, https://arxiv.org/abs/1604.00772,
    equation 49, whose share is a half.

    Args:
      scores: as in ``parents``; one that has diverged does not count.
      share: the share of the agents that counts.
    """
    count = scores.shape[0]
    best = jnp.argsort(-scores, stable=True)[: int(count * share)]
    by_rank = jnp.log(best.size + 0.5) - jnp.log(jnp.arange(1, best.size + 1))
    by_rank = jnp.where(jnp.isneginf(scores[best]), 0.0, by_rank)
    # If all have diverged, the run ends.
    total = jnp.maximum(by_rank.sum(), jnp.finfo(jnp.float32).tiny)
    return jnp.zeros(count).at[best].set(by_rank / total)


def explore(
    distribution: Distribution, number: Array, key: Array, step: float, resample: float
) -> Array:
    """A new setting of an agent.

    Args:
      distribution: what the setting was drawn from first.
      number: ``[]``, the setting that it changes from: of the agent that was copied, or the mean of
        the best.
      key: the random key of this setting.
      step: how far it moves up or down, as a share of the scale, at whose ends it stays.
      resample: the probability that it is drawn again instead.
    """
    direction_key, resample_key, number_key = jax.random.split(key, 3)
    direction = jnp.where(jax.random.bernoulli(direction_key), step, -step)
    moved = jnp.clip(distribution.position(number) + direction, 0, 1)
    drawn = jax.random.uniform(number_key)
    again = jax.random.bernoulli(resample_key, resample)
    found = distribution.at(jnp.where(again, drawn, moved)).astype(number.dtype)
    return jnp.clip(found, distribution.low, distribution.high)
