"""IMPALA's actor-critic with V-trace targets, https://arxiv.org/abs/1802.01561."""

import dataclasses

import jax
import jax.numpy as jnp

from podracer.agents import actor_critic, returns
from podracer.agents.actor_critic import ActorCriticConfig
from podracer.errors import ConfigError
from podracer.nets.actor_critic import Network
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    LossAux,
    Mean,
    Params,
    Spec,
    TrainState,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class VTraceConfig:
    """Settings of V-trace, in addition to those of every actor-critic.

    Attributes:
      lambda_: factor of the traces, in [0, 1]; 1 in the paper.
      clip_rho: rho-bar, the cap of the importance ratios in the temporal-difference errors.
      clip_pg_rho: the cap of the importance ratio in the policy gradient.
    """

    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0

    def __post_init__(self):
        if not 0 <= self.lambda_ <= 1:
            raise ConfigError(f"vtrace.lambda_ must be in [0, 1], got {self.lambda_}")
        if min(self.clip_rho, self.clip_pg_rho) <= 0:
            raise ConfigError(
                "vtrace.clip_rho and vtrace.clip_pg_rho must be positive, got "
                f"{self.clip_rho} and {self.clip_pg_rho}"
            )


def make(
    spec: Spec, network: Network, common: ActorCriticConfig, config: VTraceConfig, all_mean: Mean
) -> Agent:
    """IMPALA's actor-critic for any action space, with a feed-forward or a recurrent network.

    An item of the batch is the whole unroll of an environment, and targets are computed inside the
    loss with the current values: this corrects for several epochs over one rollout as well as for
    actors that lag behind. Losses are *means* over batch and time, where the paper sums them, so
    that the learning rate and the gradient clip do not depend on the batch size.

    Args:
      spec: observation and action spaces.
      network: policy and value.
      common: settings of every actor-critic.
      config: settings of V-trace.
      all_mean: the mean of a tree over devices.
    """
    init, initial_carry, act = actor_critic.make_functions(spec, network, common)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        trajectory, stats = actor_critic.preprocess(
            train_state.weights, trajectory, common.discount, all_mean
        )
        steps = (trajectory.timestep, trajectory.action, trajectory.extras["log_prob"])
        return (trajectory.carry.network, actor_critic.time_major(steps)), stats

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del train_state, key
        carry, steps = batch
        timestep, action, behaviour_log_prob = actor_critic.time_major(steps)
        _, policy, values = network.apply(params, carry, timestep.observation, timestep.first)
        distribution = network.distribution(jax.tree.map(lambda x: x[:-1], policy))
        log_prob = distribution.log_prob(action)
        target = returns.vtrace(
            timestep,
            values,
            jax.lax.stop_gradient(log_prob - behaviour_log_prob),
            discount=common.discount,
            lambda_=config.lambda_,
            clip_rho=config.clip_rho,
            clip_pg_rho=config.clip_pg_rho,
        )
        # Invalid entries count as zeros, see ppo.py.
        means = {
            name: (target.valid * x).mean()
            for name, x in {
                "policy": -target.advantage * log_prob,
                "value": 0.5 * (values[:-1] - target.value) ** 2,
                "entropy": distribution.entropy(),
                "rho": jnp.exp(log_prob - behaviour_log_prob),
            }.items()
        }
        total = (
            means["policy"]
            + common.value_cost * means["value"]
            - common.entropy_cost * means["entropy"]
        )
        return total, LossAux({"total": total, **means})

    return Agent(init, initial_carry, act, prepare, loss)
