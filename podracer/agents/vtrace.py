"""IMPALA's actor-critic with V-trace targets, https://arxiv.org/abs/1802.01561."""

import dataclasses

import jax
import jax.numpy as jnp

from podracer import returns
from podracer.agents import actor_critic
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
    """Settings of V-trace beside those of every actor-critic.

    Attributes:
      lambda_: multiplies the traces, in [0, 1]; 1 in the paper.
      clip_rho: rho-bar, caps the ratios in the temporal-difference errors.
      clip_pg_rho: caps the ratio in the policy gradient.
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
    """IMPALA's actor-critic for any action space, with or without memory.

    An item of the batch is an environment's whole unroll, and targets are computed inside the loss
    with the current values, so that several epochs over one rollout, or a policy that lags behind,
    are corrected for. Losses are *means* over batch and time, where the paper sums them: a paper's
    learning rate and gradient clip belong to a batch size, these don't.
    """
    init, carry, act = actor_critic.make_functions(spec, network, common)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        trajectory, stats = actor_critic.preprocess(
            train_state.weights, trajectory, common.discount, all_mean
        )
        steps = (trajectory.timestep, trajectory.action, trajectory.extras["log_prob"])
        return (trajectory.carry.memory, actor_critic.time_major(steps)), stats

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del train_state, key
        memory, steps = batch
        timestep, action, behaviour_log_prob = actor_critic.time_major(steps)
        _, policy, values = network.apply(params, memory, timestep.observation, timestep.first)
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

    return Agent(init, carry, act, prepare, loss)
