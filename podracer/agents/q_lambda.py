"""On-policy Q(lambda) with a deep network: no replay buffer and no target network.

Values of actions are learned from the lambda-returns of Peng's Q(lambda)
(https://doi.org/10.1007/BF00114731) of each unroll, as in the example of the Podracer report
(https://arxiv.org/abs/2104.06272), and, with several minibatches and epochs, in PQN
(https://arxiv.org/abs/2407.04811).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import q_learning, returns, unrolls
from podracer.agents.q_learning import ActionValueConfig
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.learning import rollout
from podracer.nets.q_network import make_q_network
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Devices,
    GradientSteps,
    LossAux,
    Params,
    Spec,
    TrainState,
    Trajectory,
)

DEFAULTS: dict[str, Any] = {
    "unroll_length": 16,
    "learning_rate": 1e-3,
    "max_grad_norm": 10.0,
    "network": {"hidden": (128, 128), "activation": "relu"},
}


@dataclasses.dataclass(frozen=True)
class Config(ActionValueConfig):
    """Settings of Q(lambda), in addition to those of every agent.

    Attributes:
      dueling, epsilon, epsilon_alpha, evaluation_epsilon: see
        ``agents.q_learning.ActionValueConfig``.
      lambda_: lambda of the returns, in [0, 1]; 0 bootstraps from the next state alone.
    """

    dueling: bool = False
    epsilon: float = 0.4
    epsilon_alpha: float = 2.0
    evaluation_epsilon: float = 0.0
    lambda_: float = 0.9

    name: ClassVar[str] = "q_lambda"
    off_policy: ClassVar[bool] = False
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ("q_lambda.dueling",)

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.lambda_ <= 1:
            raise ConfigError(f"q_lambda.lambda_ must be in [0, 1], got {self.lambda_}")

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        return unrolls.gradient_steps(settings, whole_unrolls=settings.network.recurrent)


class Sample(struct.PyTreeNode):
    """What the loss reads, ``[items, T, ...]`` each.

    Attributes:
      observation: normalised observations.
      first: whether an observation opens an episode.
      action: the actions taken.
      target: the lambda-return of each, from values before the update.
      valid: 1 where the transition is valid, else 0.
    """

    observation: ArrayTree
    first: Array
    action: Array
    target: Array
    valid: Array


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """Q(lambda) for discrete actions, with a feed-forward or a recurrent network.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of Q(lambda).
      devices: the devices that learn.

    Raises:
      ConfigError: actions are continuous.
    """
    network = make_q_network(spec, settings.network, dueling=config.dueling)
    init, carry, act = q_learning.make_functions(spec, settings, config, network)
    preprocess = unrolls.make_preprocess(settings, devices.mean)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        memory = trajectory.carry.memory
        trajectory, stats = preprocess(train_state, trajectory)
        timestep = trajectory.timestep
        params = train_state.weights.params
        _, q = network.apply(params, memory, timestep.observation, timestep.first, None)
        # The lambda-return of a state whose value is that of its best action.
        target = returns.gae(
            timestep, q.max(-1), discount=settings.discount, lambda_=config.lambda_
        )
        past = jax.tree.map(lambda x: x[:-1], timestep)
        sample = Sample(past.observation, past.first, trajectory.action, target.value, target.valid)
        length = trajectory.action.shape[0] if settings.network.recurrent else 1
        return (memory, unrolls.items(sample, length)), stats

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del train_state, key
        memory, sample = batch
        sample = unrolls.time_major(sample)
        _, q = network.apply(params, memory, sample.observation, sample.first, None)
        chosen = q_learning.select(q, sample.action)
        # Invalid entries count as zeros, see ppo.py.
        error = sample.valid * (sample.target - chosen)
        total = 0.5 * (error**2).mean()
        return total, LossAux(
            {"total": total, "q": chosen.mean(), "td_error": jnp.abs(error).mean()}
        )

    return Agent(init, carry, act, rollout.make_source(prepare, settings.rollout, devices), loss)
