"""Deep Q-learning, https://www.nature.com/articles/nature14236, with some of Rainbow's extensions.

n-step returns, double Q-learning (https://arxiv.org/abs/1509.06461), dueling networks, prioritised
replay, and a different probability of random actions in each environment
(https://arxiv.org/abs/1803.00933).
"""

import dataclasses
from operator import itemgetter
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from podracer.agents import q_learning, target_network, transitions
from podracer.agents.q_learning import QLearningConfig
from podracer.agents.settings import Settings, make_replay, replay_gradient_steps
from podracer.errors import ConfigError
from podracer.learning import replay
from podracer.learning.scalars import OFF_AT_ZERO, is_on
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
)

DEFAULTS: dict[str, Any] = {
    "num_envs": 32,
    "unroll_length": 4,
    "learning_rate": 5e-4,
    "max_grad_norm": 10.0,
    "network": {"hidden": (128, 128), "activation": "relu"},
    "replay": {"begin": 5_000, "batch": 128, "gradient_steps": 4},
}


@dataclasses.dataclass(frozen=True)
class Config(QLearningConfig):
    """Settings of DQN, in addition to those of every agent.

    Attributes:
      n_step, dueling, epsilon, epsilon_alpha, evaluation_epsilon, target_period: see
        ``agents.q_learning.QLearningConfig``.
      double: whether the current network chooses the action that the target network evaluates.
      huber: threshold of the Huber loss (delta); 0 uses the squared error.
    """

    n_step: int = 3
    dueling: bool = False
    epsilon: float = 0.4
    epsilon_alpha: float = 7.0
    evaluation_epsilon: float = 0.0
    target_period: int = 500
    double: bool = True
    huber: float = dataclasses.field(default=1.0, metadata=OFF_AT_ZERO)

    name: ClassVar[str] = "dqn"
    off_policy: ClassVar[bool] = True
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = (*replay.FIXED, "dqn.n_step", "dqn.dueling")

    def __post_init__(self):
        super().__post_init__()
        if self.huber < 0:
            raise ConfigError(f"dqn.huber must be 0 (off) or positive, got {self.huber}")

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        return replay_gradient_steps(settings, 1)


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """DQN for discrete actions, with a feed-forward network.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of DQN.
      devices: the devices that learn.

    Raises:
      ConfigError: actions are continuous, the network has a core, or the replay buffer is too
        small.
    """
    network = make_q_network(spec, settings.network, dueling=config.dueling)
    init, carry, act = q_learning.make_functions(spec, settings, config, network)

    def values(params: Params, observation: ArrayTree) -> Array:
        """Values ``[B, actions]`` of observations ``[B, ...]``."""
        now = jax.tree.map(lambda x: x[None], observation)
        return network.apply(params, (), now, None, None)[1][0]

    def loss(
        params: Params, train_state: TrainState, batch: transitions.Batch, key: Array
    ) -> tuple[Array, LossAux]:
        del key
        target = batch.target
        now, later = (jax.tree.map(itemgetter(i), batch.observation) for i in (0, 1))
        q_target = values(train_state.target, later)
        # Separate from the values that are learned, so that it has no backward pass.
        chosen = (values(params, later) if config.double else q_target).argmax(-1)
        value = target.reward + target.discount * q_learning.select(q_target, chosen)
        q = q_learning.select(values(params, now), batch.action)
        error = target.valid * (jax.lax.stop_gradient(value) - q)
        huber = is_on(config.huber)
        losses = optax.huber_loss(error, delta=config.huber) if huber else 0.5 * error**2
        total = (batch.importance * losses).mean()
        metrics = {"total": total, "q": q.mean(), "td_error": jnp.abs(error).mean()}
        return total, LossAux(metrics, priorities=jnp.abs(error))

    item = transitions.make_item(settings, devices, config.n_step)
    source = make_replay(item, spec, settings, devices)
    target = target_network.periodic(config.target_period)
    return Agent(init, carry, act, source, loss, target)
