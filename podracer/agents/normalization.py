"""Running normalisation of observations and rewards, the same on every device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import returns
from podracer.agents.settings import Settings
from podracer.nets import masks
from podracer.types import (
    Array,
    ArrayTree,
    Reduce,
    Spec,
    TimeStep,
    TrainState,
    Trajectory,
)

# BatchPPO (https://arxiv.org/abs/1709.02878) clips normalised observations at 5, rewards at 10.
OBSERVATION_CLIP = 5.0
REWARD_CLIP = 10.0


class Moments(struct.PyTreeNode):
    """Mean and variance over all batches so far.

    Attributes:
      count: ``[]`` float32, the number of *batches*. All batches of a run have the same size and
        therefore the same weight, so that samples need not be counted or merged over devices.
      mean: ``[*shape]``, or a tree of arrays for observations that are one.
      variance: as ``mean``.
    """

    count: Array
    mean: ArrayTree
    variance: ArrayTree


class ActorCarry(struct.PyTreeNode):
    """What an actor without memory carries from step to step.

    Attributes:
      total: ``[B]``, discounted sum of past rewards, ``()`` unless rewards are normalised.
    """

    total: Any


def init(shapes: ArrayTree) -> Moments:
    """Moments of arrays of these shapes before the first batch: mean 0 and variance 1."""
    mean, variance = (
        jax.tree.map(lambda x, value=value: jnp.full(x.shape, value), shapes)
        for value in (0.0, 1.0)
    )
    return Moments(jnp.zeros(()), mean, variance)


def update(moments: Moments, batch: ArrayTree, all_mean: Reduce) -> Moments:
    """Merges the batches of all devices into the moments.

    The pairwise update of Chan, Golub and LeVeque (1979). The batch's own mean is computed first,
    then the deviations from it, which avoids cancellation where the mean is much larger than the
    deviation.

    Args:
      moments: moments of the previous batches.
      batch: ``[..., *shape]``, this device's batch, of the same size on every device.
      all_mean: the mean of a tree over devices.
    """

    def average(x: Array, past: Array) -> Array:
        return x.mean(tuple(range(x.ndim - past.ndim)))

    batch = jax.tree.map(lambda x: x.astype(jnp.float32), batch)
    mean = all_mean(jax.tree.map(average, batch, moments.mean))
    squares = jax.tree.map(lambda x, mean: (x - mean) ** 2, batch, mean)
    variance = all_mean(jax.tree.map(average, squares, moments.mean))
    weight = 1 / (moments.count + 1)
    shift = jax.tree.map(lambda mean, past: mean - past, mean, moments.mean)
    return Moments(
        moments.count + 1,
        jax.tree.map(lambda past, shift: past + weight * shift, moments.mean, shift),
        jax.tree.map(
            lambda past, shift, new: (1 - weight) * (past + weight * shift**2) + weight * new,
            moments.variance,
            shift,
            variance,
        ),
    )


def standardize(moments: Moments, x: ArrayTree, clip: float) -> ArrayTree:
    """(x - mean) / standard deviation, clipped to [-clip, clip]."""

    def one(x: Array, mean: Array, variance: Array) -> Array:
        scale = jnp.sqrt(variance + 1e-8)
        return jnp.clip((x.astype(jnp.float32) - mean) / scale, -clip, clip)

    return jax.tree.map(one, x, moments.mean, moments.variance)


def rescale(moments: Moments, x: Array, clip: float) -> Array:
    """x / standard deviation, clipped to [-clip, clip]: rewards keep their sign."""
    return jnp.clip(x / jnp.sqrt(moments.variance + 1e-8), -clip, clip)


def _numbers(observation: ArrayTree) -> ArrayTree:
    """What is normalised of an observation: everything but its action mask."""
    return masks.split(observation)[0]


def init_stats(spec: Spec, settings: Settings) -> dict[str, Any]:
    """The statistics of an agent: the moments of what is normalised, else ``()``."""
    return {
        "observation": init(_numbers(spec.observation)) if settings.normalize_observations else (),
        "reward": init(jax.ShapeDtypeStruct((), jnp.float32)) if settings.normalize_rewards else (),
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


def normalize_observation(stats: dict[str, Any], observation: ArrayTree) -> ArrayTree:
    """Observations as networks receive them."""
    moments = stats["observation"]
    if not moments:
        return observation
    normal = standardize(moments, _numbers(observation), OBSERVATION_CLIP)
    # An action mask remains as it is.
    return {**observation, **normal} if isinstance(observation, dict) else normal


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
            observation = jax.tree.map(lambda x: x[:-1], _numbers(timestep.observation))
            stats["observation"] = update(stats["observation"], observation, all_mean)
        if stats["reward"]:
            # The arrival at t = 0 is the last one of the previous unroll, which did not count it.
            past = jax.tree.map(lambda x: x[:-1], timestep)
            _, totals = returns.discounted(trajectory.carry.total, past, settings.discount)
            stats["reward"] = update(stats["reward"], totals, all_mean)
        return stats

    return update_stats
