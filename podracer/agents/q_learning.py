"""What agents share that learn the values of actions: settings, and epsilon-greedy acting."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.nets import masks
from podracer.nets.q_network import QNetwork
from podracer.types import Array, ArrayTree, Carry, Spec, TimeStep, Weights


@dataclasses.dataclass(frozen=True)
class ActionValueConfig:
    """Settings of agents that act by the values of actions.

    Attributes:
      dueling: whether the network estimates the value of the state and the actions' advantages
        (https://arxiv.org/abs/1511.06581).
      epsilon, epsilon_alpha: environment i of N takes a random action with probability
        epsilon^(1 + epsilon_alpha * i / (N - 1)) (Ape-X, https://arxiv.org/abs/1803.00933); a
        single environment with probability epsilon.
      evaluation_epsilon: probability of a random action in evaluations with
        ``evaluation.greedy``.
      name: the agent's name, for errors.
    """

    dueling: bool
    epsilon: float
    epsilon_alpha: float
    evaluation_epsilon: float

    name: ClassVar[str]

    def __post_init__(self):
        for key in ("epsilon", "evaluation_epsilon"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"{self.name}.{key} must be in [0, 1], got {getattr(self, key)}")
        if self.epsilon_alpha < 0:
            raise ConfigError(
                f"{self.name}.epsilon_alpha must not be negative, got {self.epsilon_alpha}"
            )


@dataclasses.dataclass(frozen=True)
class QLearningConfig(ActionValueConfig):
    """Settings of agents that learn the values of actions with a target network.

    Attributes:
      dueling, epsilon, epsilon_alpha, evaluation_epsilon: see ``ActionValueConfig``.
      n_step: transitions between a value and the one it bootstraps from.
      target_period: gradient steps between two updates of the target network, which copy the
        parameters.
    """

    n_step: int
    target_period: int

    def __post_init__(self):
        super().__post_init__()
        for key in ("n_step", "target_period"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{self.name}.{key} must be positive, got {getattr(self, key)}")


class QCarry(struct.PyTreeNode):
    """What an actor carries from step to step, ``[B, ...]``.

    Attributes:
      memory: what the network carries; ``()`` without a core.
      action: the last action, for networks that observe it; else ``()``.
      place: float32, from 0 for the first environment to 1 for the last one.
      total: discounted sum of past rewards, ``()`` unless rewards are normalised.
    """

    memory: Carry
    action: Array | tuple[()]
    place: Array
    total: Any


# ``(stats, last action [..., B], time step [..., B]) -> [..., B, E]``, what a network observes
# besides observations; None for nothing.
Inputs = Callable[[ArrayTree, Any, TimeStep], Array] | None


def make_functions(
    spec: Spec,
    settings: Settings,
    config: ActionValueConfig,
    network: QNetwork,
    inputs: Inputs = None,
):
    """The functions ``init``, ``carry`` and ``act`` of an ``Agent`` that is epsilon-greedy.

    The extras of ``act`` are the values of the chosen action, "chosen", and of the best one,
    "best".
    """

    def init(key: Array) -> Weights:
        return Weights(network.init(key), normalization.init_stats(spec, settings))

    def carry(env_ids: Array) -> QCarry:
        batch = env_ids.shape[0]
        return QCarry(
            network.initial_carry(batch),
            () if inputs is None else jnp.zeros(batch, jnp.int32),
            places(settings.num_envs, env_ids),
            normalization.init_total(settings, batch),
        )

    def act(
        weights: Weights, carry: QCarry, timestep: TimeStep, keys: Array, *, greedy: bool = False
    ) -> tuple[QCarry, Array, dict[str, Array]]:
        # Networks take [T, B, ...]: here T = 1.
        extra = None if inputs is None else inputs(weights.stats, carry.action, timestep)[None]
        now = jax.tree.map(lambda x: x[None], timestep)
        observation = normalization.normalize_observation(weights.stats, now.observation)
        memory, q = network.apply(weights.params, carry.memory, observation, now.first, extra)
        epsilon = config.evaluation_epsilon if greedy else epsilons(config, carry.place)
        action = choose(q[0], epsilon, keys, masks.legal(timestep.observation))
        new = QCarry(
            memory,
            () if inputs is None else action,
            carry.place,
            normalization.add_reward(settings, carry.total, timestep),
        )
        return new, action, {"chosen": select(q[0], action), "best": q[0].max(-1)}

    return init, carry, act


def places(num_envs: int, env_ids: Array) -> Array:
    """The places of the environments ``env_ids [B]`` among all, from 0 to 1. Evaluations may have
    more environments, which begin again at 0."""
    return env_ids % num_envs / max(1, num_envs - 1)


def epsilons(config: ActionValueConfig, place: Array) -> Array:
    """The probabilities of random actions at these places, ``[B]``."""
    return config.epsilon ** (1 + config.epsilon_alpha * place)


def choose(q: Array, epsilon: Array | float, keys: Array, legal: Array | None = None) -> Array:
    """Epsilon-greedy actions ``[B]`` int32.

    Args:
      q: ``[B, actions]``, values, the lowest ones for illegal actions.
      epsilon: ``[B]`` or ``[]``, the probability of a random legal action.
      keys: ``[B]``, random keys.
      legal: ``[B, actions]`` bool, see ``masks.legal``.
    """

    def one(q: Array, epsilon: Array, key: Array, legal: Array | None) -> Array:
        explore_key, action_key = jax.random.split(key)
        random = masks.random_action(action_key, legal, q.shape[-1])
        return jnp.where(jax.random.uniform(explore_key) < epsilon, random, q.argmax(-1))

    return jax.vmap(one)(q, jnp.broadcast_to(epsilon, q.shape[:1]), keys, legal)


def select(q: Array, action: Array) -> Array:
    """The values of actions: ``[..., actions]`` and ``[...]`` -> ``[...]``."""
    return jnp.take_along_axis(q, action[..., None], -1)[..., 0]
