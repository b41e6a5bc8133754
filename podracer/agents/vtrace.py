"""IMPALA's actor-critic with V-trace targets, https://arxiv.org/abs/1802.01561, also with PPO's
clipped objective.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from podracer.agents import actor_critic, returns, surrogate, unrolls
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.learning import rollout
from podracer.learning.scalars import OFF_AT_ZERO, is_on
from podracer.nets import actor_critic as nets
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

DEFAULTS: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of V-trace, in addition to those of every agent.

    Attributes:
      lambda_: factor of the traces, in [0, 1]; 1 in the paper.
      clip_rho: rho-bar, the cap of the importance ratios in the temporal-difference errors.
      clip_pg_rho: the cap of the importance ratio in the policy gradient; has no effect with a
        clipped objective.
      clip: epsilon of PPO's clipped objective: how far the ratio of the probability of an action to
        that under the policy that acted may move from 1, which allows several passes over an
        unroll; 0 learns by the paper's policy gradient.
      normalize_advantages: whether to standardise advantages over the minibatch of all devices (two
        small all-reduces per gradient step).
    """

    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0
    clip: float = dataclasses.field(default=0.2, metadata=OFF_AT_ZERO)
    normalize_advantages: bool = False

    off_policy: ClassVar[bool] = True
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        return unrolls.gradient_steps(settings, whole_unrolls=True)

    def __post_init__(self):
        if not 0 <= self.lambda_ <= 1:
            raise ConfigError(f"vtrace.lambda_ must be in [0, 1], got {self.lambda_}")
        if min(self.clip_rho, self.clip_pg_rho) <= 0:
            raise ConfigError(
                "vtrace.clip_rho and vtrace.clip_pg_rho must be positive, got "
                f"{self.clip_rho} and {self.clip_pg_rho}"
            )
        if self.clip < 0:
            raise ConfigError(f"vtrace.clip must be 0 (off) or positive, got {self.clip}")


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """IMPALA's actor-critic for any action space, with a feed-forward or a recurrent network.

    An item of the batch is the whole unroll of an environment, and targets are computed inside the
    loss with the current values: this corrects for several epochs over one rollout as well as for
    actors that lag behind. Losses are *means* over batch and time, where the paper sums them, so
    that the learning rate and the gradient clip do not depend on the batch size.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of V-trace.
      devices: the devices that learn.
    """
    network = nets.make_network(spec, settings.network)
    init, initial_carry, act = actor_critic.make_functions(spec, network, settings)
    preprocess = unrolls.make_preprocess(settings, devices.mean)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        trajectory, stats = preprocess(train_state, trajectory)
        steps = (trajectory.timestep, trajectory.action, trajectory.extras["log_prob"])
        return (trajectory.carry.network, unrolls.time_major(steps)), stats

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del train_state, key
        carry, steps = batch
        timestep, action, behaviour_log_prob = unrolls.time_major(steps)
        _, policy, values = network.apply(params, carry, timestep.observation, timestep.first)
        distribution = network.distribution(jax.tree.map(lambda x: x[:-1], policy))
        log_prob = distribution.log_prob(action)
        log_ratio = log_prob - behaviour_log_prob
        target = returns.vtrace(
            timestep,
            values,
            jax.lax.stop_gradient(log_ratio),
            discount=settings.discount,
            lambda_=config.lambda_,
            clip_rho=config.clip_rho,
        )
        advantage = target.advantage
        if config.normalize_advantages:
            advantage = surrogate.normalize(advantage, target.valid, devices.mean)
        # Invalid entries count as zeros, see ppo.py.
        means = {
            name: (target.valid * x).mean()
            for name, x in {
                "value": 0.5 * (values[:-1] - target.value) ** 2,
                "entropy": distribution.entropy(),
                "rho": jnp.exp(log_ratio),
            }.items()
        }
        advantage = target.valid * advantage
        if is_on(config.clip):
            means["policy"] = surrogate.clipped(log_ratio, advantage, config.clip)
        else:
            rho = jnp.minimum(config.clip_pg_rho, jnp.exp(jax.lax.stop_gradient(log_ratio)))
            means["policy"] = -(rho * advantage * log_prob).mean()
        total = actor_critic.total_loss(settings, means)
        return total, LossAux({"total": total, **means})

    source = rollout.make_source(prepare, settings.rollout, devices)
    return Agent(init, initial_carry, act, source, loss)
