"""Running normalisation of observations and rewards, the same on every device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import returns
from podracer.agents.settings import Settings
from podracer.types import Array, Reduce, Spec, TimeStep, TrainState, Trajectory

# BatchPPO (https://arxiv.org/abs/1709.02878) clips normalised observations at 5, rewards at 10.
OBSERVATION_CLIP = 5.0
REWARD_CLIP = 10.0


class Moments(struct.PyTreeNode):
    """Mean and variance over all batches so far.

    Attributes:
      count: ``[]`` float32, the number of *batches*. All batches of a run have the same size and
        therefore the same weight, so that samples need not be counted or merged over devices.
      mean: ``[*shape]``.
      variance: ``[*shape]``.
    """

    count: Array
    mean: Array
    variance: Array


def init(shape: tuple[int, ...]) -> Moments:
    """Moments before the first batch: mean 0 and variance 1."""
    return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


def update(moments: Moments, batch: Array, all_mean: Reduce) -> Moments:
    """Merges the batches of all devices into the moments.

    The pairwise update of Chan, Golub and LeVeque (1979). The batch's own mean is computed first,
    then the deviations from it, which avoids cancellation where the mean is much larger than the
    deviation.

    Args:
      moments: moments of the previous batches.
      batch: ``[..., *shape]``, this device's batch, of the same size on every device.
      all_mean: the mean of a tree over devices.
    """
    axes = tuple(range(batch.ndim - moments.mean.ndim))
    batch = batch.astype(jnp.float32)
    mean = all_mean(batch.mean(axes))
    variance = all_mean(((batch - mean) ** 2).mean(axes))
    weight, shift = 1 / (moments.count + 1), mean - moments.mean
    return Moments(
        moments.count + 1,
        moments.mean + weight * shift,
        (1 - weight) * (moments.variance + weight * shift**2) + weight * variance,
    )


def standardize(moments: Moments, x: Array, clip: float) -> Array:
    """(x - mean) / standard deviation, clipped to [-clip, clip]."""
    scale = jnp.sqrt(moments.variance + 1e-8)
    return jnp.clip((x.astype(jnp.float32) - moments.mean) / scale, -clip, clip)


def rescale(moments: Moments, x: Array, clip: float) -> Array:
    """x / standard deviation, clipped to [-clip, clip]: rewards keep their sign."""
    return jnp.clip(x / jnp.sqrt(moments.variance + 1e-8), -clip, clip)


def init_stats(spec: Spec, settings: Settings) -> dict[str, Any]:
    """The statistics of an agent: the moments of what is normalised, else ``()``."""
    return {
        "observation": init(spec.observation.shape) if settings.normalize_observations else (),
        "reward": init(()) if settings.normalize_rewards else (),
    }


def init_total(settings: Settings, batch: int) -> Array | tuple[()]:
    """The discounted sum of past rewards that an actor carries, ``()`` if it is not needed."""
    return jnp.zeros(batch) if settings.normalize_rewards else ()


def add_reward(
    settings: Settings, total: Array | tuple[()], timestep: TimeStep
) -> Array | tuple[()]:
    """The discounted sum of past rewards after an arrival ``[B, ...]``."""
    if isinstance(total, tuple):
        return ()
    total, _ = returns.discounted(
        total, jax.tree.map(lambda x: x[None], timestep), settings.discount
    )
    return total


def normalize_observation(stats: dict[str, Any], observation: Array) -> Array:
    """Observations as networks receive them."""
    moments = stats["observation"]
    return standardize(moments, observation, OBSERVATION_CLIP) if moments else observation


def normalize_reward(stats: dict[str, Any], reward: Array) -> Array:
    """Rewards as losses receive them."""
    moments = stats["reward"]
    return rescale(moments, reward, REWARD_CLIP) if moments else reward


def make_update_stats(
    settings: Settings, all_mean: Reduce
) -> Callable[[TrainState, Trajectory], dict[str, Any]]:
    """``(train_state, trajectory) ->`` the statistics after one more trajectory.

    The carry of the trajectory has the field ``total``.

    Args:
      settings: the settings of every agent.
      all_mean: the mean of a tree over devices.
    """

    def update_stats(train_state: TrainState, trajectory: Trajectory) -> dict[str, Any]:
        stats, timestep = dict(train_state.weights.stats), trajectory.timestep
        if stats["observation"]:
            stats["observation"] = update(stats["observation"], timestep.observation[:-1], all_mean)
        if stats["reward"]:
            # The arrival at t = 0 is the last one of the previous unroll, which did not count it.
            past = jax.tree.map(lambda x: x[:-1], timestep)
            _, totals = returns.discounted(trajectory.carry.total, past, settings.discount)
            stats["reward"] = update(stats["reward"], totals, all_mean)
        return stats

    return update_stats
