"""What actor-critics share: acting with a policy network, and the sum of their losses."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization
from podracer.agents.settings import Settings
from podracer.nets import heads
from podracer.nets.actor_critic import Network
from podracer.types import Array, Carry, Spec, TimeStep, Weights


class ActorCriticCarry(struct.PyTreeNode):
    """What an actor carries from step to step, ``[B, ...]``.

    Attributes:
      network: the network's carry, ``()`` for a feed-forward network.
      total: discounted sum of past rewards, ``()`` unless rewards are normalised.
    """

    network: Carry
    total: Any


def make_functions(spec: Spec, network: Network, settings: Settings):
    """The functions ``init``, ``carry`` and ``act`` of an actor-critic's ``Agent`` record."""

    def init(key: Array) -> Weights:
        return Weights(network.init(key), normalization.init_stats(spec, settings))

    def carry(env_ids: Array) -> ActorCriticCarry:
        batch = env_ids.shape[0]
        total = normalization.init_total(settings, batch)
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
        observation = normalization.normalize_observation(weights.stats, now.observation)
        network_carry, policy, _ = network.apply(
            weights.params, carry.network, observation, now.first
        )
        policy = jax.tree.map(lambda x: x[0], policy)
        distribution = network.distribution(policy)
        action = distribution.mode() if greedy else heads.sample(network.distribution, policy, keys)
        total = normalization.add_reward(settings, carry.total, timestep)
        return (
            ActorCriticCarry(network_carry, total),
            action,
            {"log_prob": jnp.asarray(distribution.log_prob(action))},
        )

    return init, carry, act


def total_loss(settings: Settings, means: Mapping[str, Array]) -> Array:
    """The loss of an actor-critic from the means of "policy", "value" and "entropy"."""
    return (
        means["policy"]
        + settings.value_cost * means["value"]
        - settings.entropy_cost * means["entropy"]
    )
