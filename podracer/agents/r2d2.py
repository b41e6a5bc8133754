"""Recurrent replay distributed DQN, https://openreview.net/forum?id=r1lyTjAqYX.

An item is a sequence, stored with the actor's recurrent state at its beginning. The first part of
the sequence, the *burn-in*, only refreshes that state with the current parameters; the rest, the
*trace*, is learned from with n-step double Q-learning of rescaled values. Sequences begin at every
unroll, so that with a trace longer than an unroll neighbours overlap.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization, q_learning, returns, target_network
from podracer.agents.q_learning import QLearningConfig
from podracer.agents.settings import Settings, make_replay, replay_gradient_steps
from podracer.agents.value_scale import rescale, unscale
from podracer.errors import ConfigError
from podracer.learning import replay
from podracer.learning.ring import Item, Kept, Window
from podracer.learning.scalars import is_on
from podracer.nets.q_network import QNetwork, make_q_network
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Carry,
    Devices,
    Discrete,
    GradientSteps,
    LossAux,
    Params,
    Spec,
    TimeStep,
    TrainState,
    Trajectory,
)

DEFAULTS: dict[str, Any] = {
    "num_envs": 32,
    "unroll_length": 16,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "network": {"hidden": (64,), "activation": "relu", "core": "gru", "core_size": 64},
    "replay": {"begin": 5_000, "batch": 32, "gradient_steps": 4},
}


@dataclasses.dataclass(frozen=True)
class Config(QLearningConfig):
    """Settings of R2D2, in addition to those of every agent.

    Attributes:
      n_step, dueling, epsilon, epsilon_alpha, evaluation_epsilon, target_period: see
        ``agents.q_learning.QLearningConfig``.
      burn_in: steps at the beginning of a sequence that only refresh the memory.
      trace: the following steps of a sequence, which are learned from.
      rescale: whether values are learned on the scale of h(x) = sign(x) (sqrt(|x| + 1) - 1) + x /
        1000, on which large returns are less far apart (https://arxiv.org/abs/1805.11593).
      max_priority: eta; a sequence's priority is eta times its largest error plus (1 - eta) times
        its mean error.
    """

    n_step: int = 5
    dueling: bool = True
    epsilon: float = 0.4
    epsilon_alpha: float = 7.0
    evaluation_epsilon: float = 1e-3
    target_period: int = 2500
    burn_in: int = 40
    trace: int = 80
    rescale: bool = True
    max_priority: float = 0.9

    name: ClassVar[str] = "r2d2"
    off_policy: ClassVar[bool] = True
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = (
        *replay.FIXED,
        "r2d2.dueling",
        "r2d2.rescale",
        "r2d2.burn_in",
        "r2d2.trace",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.burn_in < 0 or self.trace <= 0:
            raise ConfigError(
                "r2d2.burn_in must not be negative and r2d2.trace must be positive, got "
                f"{self.burn_in} and {self.trace}"
            )
        if not 0 <= self.max_priority <= 1:
            raise ConfigError(f"r2d2.max_priority must be in [0, 1], got {self.max_priority}")

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        if self.trace < settings.unroll_length:
            raise ConfigError(
                f"r2d2.trace={self.trace} is shorter than unroll_length={settings.unroll_length}, "
                "so that some steps would never be learned from, as sequences begin at unrolls; "
                f"set unroll_length to at most {self.trace}"
            )
        if self.n_step > self.trace:
            raise ConfigError(
                f"r2d2.n_step={self.n_step} is more than r2d2.trace={self.trace}, and returns end "
                "with the trace"
            )
        return replay_gradient_steps(settings, self.trace)


class Batch(struct.PyTreeNode):
    """Sequences of L = burn-in + trace steps, as the loss reads them.

    Attributes:
      observation: ``[L+1, items, ...]``.
      timestep: ``[L+1, items]`` without its observation, which is ``()``.
      action: ``[L+1, items]``.
      inputs: ``[L+1, items, E]``, what the network observes besides observations.
      memory: ``[items, ...]``, the actor's memory before the first step.
      importance: ``[items]``, the factors of the losses.
    """

    observation: ArrayTree
    timestep: TimeStep
    action: Array
    inputs: Array
    memory: Carry
    importance: Array


def targets(
    config: Config, settings: Settings, timestep: TimeStep, bootstrap: Array
) -> tuple[Array, Array]:
    """n-step targets, on the scale of the network.

    Args:
      config: settings of R2D2.
      settings: settings of every agent.
      timestep: ``[T+1, B]``.
      bootstrap: ``[T+1, B]``, the value of each observation, on the scale of the network.

    Returns:
      The targets ``[T, B]`` and whether they are valid, ``[T, B]`` float32.
    """
    steps = returns.n_step(timestep, config.n_step, settings.discount)
    time = jnp.arange(steps.steps.shape[0])[:, None] + steps.steps
    value = jnp.take_along_axis(unscale(bootstrap) if config.rescale else bootstrap, time, 0)
    target = steps.reward + steps.discount * value
    return (rescale(target) if config.rescale else target), steps.valid


def sequence_priority(config: Config, error: Array, valid: Array) -> Array:
    """The priorities of sequences, from errors ``[T, B]`` that are 0 where they are invalid."""
    size = jnp.abs(error)
    mean = size.sum(0) / jnp.maximum(valid.sum(0), 1)
    return config.max_priority * size.max(0) + (1 - config.max_priority) * mean


def burn_in_and_trace(network: QNetwork, params: Params, batch: Batch, burn_in: int) -> Array:
    """Values ``[trace + 1, items, actions]``; no gradient flows into the burn-in."""
    sequence = (batch.observation, batch.timestep.first, batch.inputs)
    before = jax.tree.map(lambda x: x[:burn_in], sequence)
    after = jax.tree.map(lambda x: x[burn_in:], sequence)
    memory = batch.memory
    if burn_in:
        memory, _ = jax.lax.stop_gradient(network.apply(params, memory, *before))
    return network.apply(params, memory, *after)[1]


def keep(settings: Settings, trajectory: Trajectory) -> Kept:
    """What a replay buffer keeps: the actor's values only if priorities are computed from them."""
    carry = trajectory.carry
    extras = trajectory.extras if is_on(settings.replay.priority_exponent) else ()
    return Kept(extras, {"memory": carry.memory, "action": carry.action})


def previous(actions: int, stats: ArrayTree, action: Array, timestep: TimeStep) -> Array:
    """The last action, one-hot, and the last reward; zeros where an episode begins.

    Args:
      actions: number of actions.
      stats: statistics that normalise rewards.
      action: ``[..., B]``, the actions before these time steps.
      timestep: ``[..., B]``.
    """
    reward = normalization.normalize_reward(stats, timestep.reward)
    last = jnp.concatenate([jax.nn.one_hot(action, actions), reward[..., None]], -1)
    return jnp.where(timestep.first[..., None], 0.0, last)


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """R2D2 for discrete actions, with or without a recurrent core.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of R2D2.
      devices: the devices that learn.

    Raises:
      ConfigError: actions are continuous, or the replay buffer is too small for a sequence.
    """
    actions = spec.action.num_actions if isinstance(spec.action, Discrete) else 0
    network = make_q_network(spec, settings.network, dueling=config.dueling, extra=actions + 1)
    inputs = partial(previous, actions)

    def read(train_state: TrainState, window: Window) -> Batch:
        stats = train_state.weights.stats
        observation = normalization.normalize_observation(
            stats, window.observe(jnp.arange(config.burn_in + config.trace + 1))
        )
        timestep, action = window.timestep, window.action
        last = jnp.concatenate([window.carry["action"][None], action[:-1]])
        extra = inputs(stats, last, timestep)
        timestep = timestep.replace(reward=normalization.normalize_reward(stats, timestep.reward))
        memory = window.carry["memory"]
        return Batch(observation, timestep, action, extra, memory, window.importance)

    def initial_priority(train_state: TrainState, window: Window) -> Array:
        """From the values that the actor had."""
        stats = train_state.weights.stats
        timestep, extras = jax.tree.map(
            lambda x: x[config.burn_in :], (window.timestep, window.extras)
        )
        timestep = timestep.replace(reward=normalization.normalize_reward(stats, timestep.reward))
        target, valid = targets(config, settings, timestep, extras["best"])
        return sequence_priority(config, valid * (target - extras["chosen"][:-1]), valid)

    def loss(
        params: Params, train_state: TrainState, batch: Batch, key: Array
    ) -> tuple[Array, LossAux]:
        del key
        timestep, action = jax.tree.map(
            lambda x: x[config.burn_in :], (batch.timestep, batch.action)
        )
        q = burn_in_and_trace(network, params, batch, config.burn_in)
        q_target = burn_in_and_trace(network, train_state.target, batch, config.burn_in)
        bootstrap = q_learning.select(q_target, q.argmax(-1))
        target, valid = targets(config, settings, timestep, bootstrap)
        chosen = q_learning.select(q, action)[:-1]
        error = valid * (jax.lax.stop_gradient(target) - chosen)
        total = (batch.importance * 0.5 * error**2).mean()
        metrics = {"total": total, "q": chosen.mean(), "td_error": jnp.abs(error).mean()}
        return total, LossAux(metrics, priorities=sequence_priority(config, error, valid))

    init, carry, act = q_learning.make_functions(spec, settings, config, network, inputs)
    item = Item(
        length=config.burn_in + config.trace,
        stride=settings.unroll_length,
        read=read,
        update_stats=normalization.make_update_stats(settings, devices.mean),
        keep=partial(keep, settings),
        initial_priority=initial_priority,
    )
    source = make_replay(item, spec, settings, devices)
    target = target_network.periodic(config.target_period)
    return Agent(init, carry, act, source, loss, target)
