"""Proximal policy optimisation, https://arxiv.org/abs/1707.06347: with clipping, or with a penalty
on the KL divergence that adapts as in BatchPPO, https://arxiv.org/abs/1709.02878.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import actor_critic, kl_penalty, returns, surrogate, unrolls
from podracer.agents.settings import Settings
from podracer.errors import ConfigError, unknown
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

OBJECTIVES = ("clip", "kl_penalty")
ADVANTAGE_NORMALIZATIONS = ("batch", "minibatch", "none")

DEFAULTS: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of PPO, in addition to those of every agent.

    Attributes:
      gae_lambda: lambda of generalised advantage estimation, in [0, 1].
      objective: "clip" (equation 7) or "kl_penalty" (equation 8): the KL divergence from the policy
        before the update is a penalty, whose coefficient adapts so that an update changes the
        policy by ``target_kl``.
      clip: epsilon of equation 7, the range in which the ratio of probabilities may move.
      value_clip: the range in which a value may move from the value before the update; 0 turns
        this clipping off.
      advantage_normalization: advantages are standardised over the "batch" of all devices (two
        small all-reduces per rollout), over each "minibatch" of all devices (two per gradient
        step), or not at all ("none").
      target_kl: with "kl_penalty", the KL divergence to reach in an update. With "clip", when the
        approximate KL divergence of a gradient step exceeds this value, this step and the remaining
        ones of the update are skipped; 0 turns this off.
    """

    gae_lambda: float = 0.95
    objective: str = "clip"
    clip: float = 0.2
    value_clip: float = dataclasses.field(default=0.2, metadata=OFF_AT_ZERO)
    advantage_normalization: str = "batch"
    target_kl: float = dataclasses.field(default=0.0, metadata=OFF_AT_ZERO)

    off_policy: ClassVar[bool] = False
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ("ppo.objective",)

    @property
    def penalised(self) -> bool:
        """Whether the objective has a penalty on the KL divergence."""
        return self.objective == "kl_penalty"

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        if self.penalised and settings.rollout.num_epochs < 2:
            # In the only pass, the policy has hardly changed yet.
            raise ConfigError(
                "ppo.objective='kl_penalty' measures the divergence in the last pass over an "
                f"unroll, and needs a num_epochs of at least 2, got {settings.rollout.num_epochs}"
            )
        return unrolls.gradient_steps(settings, whole_unrolls=settings.network.recurrent)

    def __post_init__(self):
        if not 0 <= self.gae_lambda <= 1:
            raise ConfigError(f"ppo.gae_lambda must be in [0, 1], got {self.gae_lambda}")
        if self.clip <= 0:
            raise ConfigError(f"ppo.clip must be positive, got {self.clip}")
        if self.value_clip < 0 or self.target_kl < 0:
            raise ConfigError(
                "ppo.value_clip and ppo.target_kl must be 0 (off) or positive, got "
                f"{self.value_clip} and {self.target_kl}"
            )
        if self.objective not in OBJECTIVES:
            raise unknown("ppo.objective", self.objective, OBJECTIVES)
        if self.penalised and self.target_kl == 0:
            raise ConfigError(
                "ppo.objective='kl_penalty' needs a positive ppo.target_kl, such as 0.01"
            )
        if self.advantage_normalization not in ADVANTAGE_NORMALIZATIONS:
            raise unknown(
                "ppo.advantage_normalization",
                self.advantage_normalization,
                ADVANTAGE_NORMALIZATIONS,
            )


class Sample(struct.PyTreeNode):
    """What the loss reads, ``[items, T, ...]`` each.

    Attributes:
      observation: normalised observations.
      first: whether an observation opens an episode.
      action: the actions taken.
      log_prob: their log-probabilities.
      old_value: values before the update.
      target: see ``returns.Targets``.
      old_policy: the policy's output before the update; ``()`` without a penalty on its change.
    """

    observation: ArrayTree
    first: Array
    action: Array
    log_prob: Array
    old_value: Array
    target: returns.Targets
    old_policy: ArrayTree = ()


def _value_error(value: Array, sample: Sample, clip: float) -> Array:
    """Squared errors: the larger of the plain one and the one of the clipped value."""
    error = (value - sample.target.value) ** 2
    if not is_on(clip):
        return error
    moved = sample.old_value + jnp.clip(value - sample.old_value, -clip, clip)
    return jnp.maximum(error, (moved - sample.target.value) ** 2)


def _make_prepare(
    network: nets.Network, settings: Settings, config: Config, devices: Devices
) -> rollout.Prepare:
    """What turns an unroll into items. It computes values in one large batch, so that acting does
    not need them."""
    preprocess = unrolls.make_preprocess(settings, devices.mean)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        weights, carry = train_state.weights, trajectory.carry.network
        trajectory, stats = preprocess(train_state, trajectory)
        timestep = trajectory.timestep
        past = jax.tree.map(lambda x: x[:-1], timestep)
        _, policy, values = network.apply(
            weights.params, carry, timestep.observation, timestep.first
        )
        target = returns.gae(
            timestep, values, discount=settings.discount, lambda_=config.gae_lambda
        )
        if config.advantage_normalization == "batch":
            advantage = surrogate.normalize(target.advantage, target.valid, devices.mean)
            target = target._replace(advantage=advantage)
        sample = Sample(
            past.observation,
            past.first,
            trajectory.action,
            trajectory.extras["log_prob"],
            values[:-1],
            target,
            jax.tree.map(lambda x: x[:-1], policy) if config.penalised else (),
        )
        length = trajectory.action.shape[0] if network.recurrent else 1
        return (carry, unrolls.items(sample, length)), stats

    return prepare


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """PPO for any action space, with a feed-forward or a recurrent network.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of PPO.
      devices: the devices that learn.
    """
    network = nets.make_network(spec, settings.network)
    init, initial_carry, act = actor_critic.make_functions(spec, network, settings)

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del key
        carry, sample = batch
        sample = unrolls.time_major(sample)
        target = sample.target
        _, policy, value = network.apply(params, carry, sample.observation, sample.first)
        distribution = network.distribution(policy)
        log_prob = jnp.asarray(distribution.log_prob(sample.action))

        advantage = target.advantage
        if config.advantage_normalization == "minibatch":
            advantage = surrogate.normalize(advantage, target.valid, devices.mean)
        log_ratio = log_prob - sample.log_prob
        # Means over all entries with the invalid ones at zero, not over the valid ones: the
        # mean of devices' means is then the mean over all, whatever their shares of valid entries.
        means = {
            name: (target.valid * x).mean()
            for name, x in {
                **surrogate.change(log_ratio, config.clip),
                "value": 0.5 * _value_error(value, sample, config.value_clip),
                "entropy": distribution.entropy(),
            }.items()
        }
        advantage, stop = target.valid * advantage, ()
        if config.penalised:
            penalty: kl_penalty.Penalty = train_state.target
            kl = network.distribution(sample.old_policy).kl_divergence(distribution)
            means["kl"] = (target.valid * kl).mean()
            means["kl_coefficient"] = penalty.coefficient
            means["policy"] = kl_penalty.loss(
                log_ratio, advantage, means["kl"], penalty, config.target_kl, devices.mean
            )
        else:
            means["policy"] = surrogate.clipped(log_ratio, advantage, config.clip)
            if is_on(config.target_kl):
                stop = means["approx_kl"] - config.target_kl
        total = actor_critic.total_loss(settings, means)
        return total, LossAux({"total": total, **means}, stop=stop)

    prepare = _make_prepare(network, settings, config, devices)
    source = rollout.make_source(prepare, settings.rollout, devices)
    target = None
    if config.penalised:
        target = kl_penalty.make_target(
            config.target_kl, source.steps, settings.rollout.num_minibatches
        )
    return Agent(init, initial_carry, act, source, loss, target)
