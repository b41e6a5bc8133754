"""What PPO and V-trace share: acting with a policy network, normalisation, and batch items."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization, returns
from podracer.agents.settings import Settings
from podracer.nets import heads
from podracer.nets.actor_critic import Network
from podracer.types import (
    Array,
    ArrayTree,
    Carry,
    GradientSteps,
    Reduce,
    Spec,
    TimeStep,
    Trajectory,
    Weights,
)

# BatchPPO (https://arxiv.org/abs/1709.02878) clips normalised observations at 5, rewards at 10.
OBSERVATION_CLIP = 5.0
REWARD_CLIP = 10.0


class ActorCriticCarry(struct.PyTreeNode):
    """What an actor carries from step to step, ``[B, ...]``.

    Attributes:
      network: the network's carry, ``()`` for a feed-forward network.
      total: discounted sum of past rewards, ``()`` unless rewards are normalised.
    """

    network: Carry
    total: Any


def make_functions(spec: Spec, network: Network, config: Settings):
    """The functions ``init``, ``carry`` and ``act`` of an actor-critic's ``Agent`` record."""

    def init(key: Array) -> Weights:
        observation = reward = ()
        if config.normalize_observations:
            observation = normalization.init(spec.observation.shape)
        if config.normalize_rewards:
            reward = normalization.init(())
        return Weights(network.init(key), {"observation": observation, "reward": reward})

    def carry(env_ids: Array) -> ActorCriticCarry:
        batch = env_ids.shape[0]
        total = jnp.zeros(batch) if config.normalize_rewards else ()
        return ActorCriticCarry(network.initial_carry(batch), total)

    def act(
        weights: Weights,
        carry: ActorCriticCarry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[ActorCriticCarry, Array, dict[str, Array]]:
        # Networks take [T, B, ...]: here T = 1.
        now = jax.tree.map(lambda x: x[None], timestep)
        observation = normalize(weights, now.observation)
        network_carry, policy, _ = network.apply(
            weights.params, carry.network, observation, now.first
        )
        policy = jax.tree.map(lambda x: x[0], policy)
        distribution = network.distribution(policy)
        action = distribution.mode() if greedy else heads.sample(network.distribution, policy, keys)
        total = carry.total
        if config.normalize_rewards:
            total, _ = returns.discounted(total, now, config.discount)
        return (
            ActorCriticCarry(network_carry, total),
            action,
            {"log_prob": jnp.asarray(distribution.log_prob(action))},
        )

    return init, carry, act


def normalize(weights: Weights, observation: Array) -> Array:
    """Observations as the network receives them."""
    moments = weights.stats["observation"]
    if not moments:
        return observation
    return normalization.standardize(moments, observation, OBSERVATION_CLIP)


def preprocess(
    weights: Weights, trajectory: Trajectory, discount: float, all_mean: Reduce
) -> tuple[Trajectory, dict[str, Any]]:
    """Normalises a trajectory, and updates the statistics.

    Observations are normalised by the statistics of the weights: without lag, these are the
    statistics that the actor used, so that importance ratios are 1 at the first gradient step.
    Rewards are normalised by statistics that include this batch.

    Args:
      weights: the weights whose statistics normalise the observations.
      trajectory: the trajectory as it was collected.
      discount: discount factor (gamma).
      all_mean: the mean of a tree over devices.

    Returns:
      The normalised trajectory, and the statistics to act with next.
    """
    timestep, stats = trajectory.timestep, dict(weights.stats)
    if stats["observation"]:
        stats["observation"] = normalization.update(
            stats["observation"], timestep.observation[:-1], all_mean
        )
        timestep = timestep.replace(observation=normalize(weights, timestep.observation))
    if stats["reward"]:
        # The arrival at t = 0 is the last one of the previous unroll, which did not count it.
        past = jax.tree.map(lambda x: x[:-1], timestep)
        _, totals = returns.discounted(trajectory.carry.total, past, discount)
        stats["reward"] = normalization.update(stats["reward"], totals, all_mean)
        reward = normalization.rescale(stats["reward"], timestep.reward, REWARD_CLIP)
        timestep = timestep.replace(reward=reward)
    return trajectory.replace(timestep=timestep), stats


def time_major(tree: ArrayTree) -> ArrayTree:
    """Swaps the first two axes of every array: ``[T, B]`` <-> ``[B, T]``."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


def items(tree: ArrayTree, length: int) -> ArrayTree:
    """``[T, B, ...]`` -> ``[B * T / length, length, ...]``, environments outermost.

    An item is what the learner shuffles: the whole unroll of an environment (``length`` = T) for
    recurrent networks, else one transition (``length`` = 1). In both cases ``time_major`` turns a
    batch of items back into ``[T, B, ...]``, as losses read it.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, length, *x.shape[2:]), tree)


def gradient_steps(settings: Settings, *, whole_unrolls: bool) -> GradientSteps:
    """How an unroll is divided into gradient steps.

    Args:
      settings: the settings of every agent.
      whole_unrolls: whether an item is the unroll of an environment; otherwise it is a transition.
    """
    epochs, minibatches = settings.rollout.num_epochs, settings.rollout.num_minibatches
    transitions = settings.num_envs * settings.unroll_length
    items = settings.num_envs if whole_unrolls else transitions
    return GradientSteps(
        epochs * minibatches,
        transitions // minibatches,
        # Whole minibatches on every device.
        items // minibatches if items % minibatches == 0 else 1,
        f"{epochs} epochs of {minibatches} minibatches",
    )


def total_loss(settings: Settings, means: Mapping[str, Array]) -> Array:
    """The loss of an actor-critic from the means of "policy", "value" and "entropy"."""
    return (
        means["policy"]
        + settings.value_cost * means["value"]
        - settings.entropy_cost * means["entropy"]
    )
