"""What PPO and V-trace share: acting with a policy network, normalisation, and batch items."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization, returns
from podracer.errors import ConfigError
from podracer.nets import heads
from podracer.nets.actor_critic import Network
from podracer.types import Array, ArrayTree, Carry, Mean, Spec, TimeStep, Trajectory, Weights

# BatchPPO (https://arxiv.org/abs/1709.02878) clips normalised observations at 5, rewards at 10.
OBSERVATION_CLIP = 5.0
REWARD_CLIP = 10.0


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig:
    """Settings of every actor-critic.

    Attributes:
      discount: gamma, in [0, 1].
      entropy_cost: weight of the entropy bonus.
      value_cost: weight of the value loss.
      normalize_observations: whether to standardise observations by their running mean and
        variance, clipped to [-5, 5].
      normalize_rewards: whether to divide rewards by the running standard deviation of discounted
        returns, clipped to [-10, 10].
    """

    discount: float
    entropy_cost: float
    value_cost: float
    normalize_observations: bool
    normalize_rewards: bool

    def __post_init__(self):
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount must be in [0, 1], got {self.discount}")


class ActorCriticCarry(struct.PyTreeNode):
    """What an actor carries from step to step, ``[B, ...]``.

    Attributes:
      network: the network's carry, ``()`` for a feed-forward network.
      total: discounted sum of past rewards, ``()`` unless rewards are normalised.
    """

    network: Carry
    total: Any


def make_functions(spec: Spec, network: Network, config: ActorCriticConfig):
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
    weights: Weights, trajectory: Trajectory, discount: float, all_mean: Mean
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
