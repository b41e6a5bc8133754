"""What PPO and V-trace share: acting by a policy network, normalisation, items to learn from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer import returns
from podracer.agents import normalization
from podracer.errors import ConfigError
from podracer.nets import heads
from podracer.nets.actor_critic import Network
from podracer.types import (
    Array,
    ArrayTree,
    Carry,
    Mean,
    Spec,
    TimeStep,
    Trajectory,
    Weights,
)

# BatchPPO (https://arxiv.org/abs/1709.02878) clips normalised observations at 5, rewards at 10.
OBSERVATION_CLIP = 5.0
REWARD_CLIP = 10.0


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig:
    """Settings of every actor-critic.

    Attributes:
      discount: gamma.
      entropy_cost: weight of the entropy bonus.
      value_cost: weight of the value loss.
      normalize_observations: standardise by running mean and variance, clipped at 5.
      normalize_rewards: divide by the running deviation of discounted returns, clipped at 10.
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
    """Memory of an actor, ``[B, ...]``.

    Attributes:
      memory: of the recurrent core, ``()`` without one.
      total: discounted sum of rewards, for their normalisation; ``()`` without it.
    """

    memory: Carry
    total: Any


def make_functions(spec: Spec, network: Network, config: ActorCriticConfig):
    """``init``, ``carry`` and ``act`` of an actor-critic's ``Agent`` record."""

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
        return ActorCriticCarry(network.memory(batch), total)

    def act(
        weights: Weights,
        carry: ActorCriticCarry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[ActorCriticCarry, Array, dict[str, Array]]:
        # The networks take [T, B]: here T = 1.
        now = jax.tree.map(lambda x: x[None], timestep)
        observation = normalize(weights, now.observation)
        memory, policy, _ = network.apply(weights.params, carry.memory, observation, now.first)
        policy = jax.tree.map(lambda x: x[0], policy)
        distribution = network.distribution(policy)
        action = distribution.mode() if greedy else heads.sample(network.distribution, policy, keys)
        total = carry.total
        if config.normalize_rewards:
            total, _ = returns.discounted(total, now, config.discount)
        return (
            ActorCriticCarry(memory, total),
            action,
            {"log_prob": jnp.asarray(distribution.log_prob(action))},
        )

    return init, carry, act


def normalize(weights: Weights, observation: Array) -> Array:
    """Observations as the network takes them."""
    moments = weights.stats["observation"]
    if not moments:
        return observation
    return normalization.standardize(moments, observation, OBSERVATION_CLIP)


def preprocess(
    weights: Weights, trajectory: Trajectory, discount: float, all_mean: Mean
) -> tuple[Trajectory, dict[str, Any]]:
    """The trajectory as acted on (normalised by the weights' statistics), and the next statistics.

    Observations are normalised by the weights' statistics: without lag those they were acted on
    with, or importance ratios would not be 1 at the first gradient step. Rewards are by statistics
    that include this batch.
    """
    timestep, stats = trajectory.timestep, dict(weights.stats)
    if stats["observation"]:
        stats["observation"] = normalization.update(
            stats["observation"], timestep.observation[:-1], all_mean
        )
        timestep = timestep.replace(observation=normalize(weights, timestep.observation))
    if stats["reward"]:
        # The arrival at t = 0 is the last one of the unroll before, which did not learn from it.
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

    An item is what the learner shuffles: an environment's whole unroll (``length`` = T) or, where
    no memory couples steps, one transition (``length`` = 1). Either way a loss reads it by
    ``time_major``.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, length, *x.shape[2:]), tree)
