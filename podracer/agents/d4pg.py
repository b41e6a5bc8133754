"""D4PG: distributed distributional deterministic policy gradients, https://arxiv.org/abs/1804.08617.

An off-policy actor-critic for continuous actions: a deterministic policy that climbs the gradient
of a critic, which learns the distribution of n-step returns. It learns from states and from pixels,
as in the paper of TF-Replicator (https://arxiv.org/abs/1902.00465).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import rlax

from podracer.agents import normalization, target_network, transitions
from podracer.agents.settings import Settings, make_replay, replay_gradient_steps
from podracer.errors import ConfigError
from podracer.learning import replay
from podracer.nets.policy_critic import PolicyCritic, make_policy_critic
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Devices,
    GradientSteps,
    LossAux,
    Params,
    Spec,
    TimeStep,
    TrainState,
    Weights,
)

DEFAULTS: dict[str, Any] = {
    "num_envs": 16,
    "unroll_length": 4,
    "learning_rate": 5e-4,
    "anneal": False,
    "max_grad_norm": 0.0,
    "network": {"activation": "elu"},
    "replay": {"begin": 5_000, "batch": 128, "gradient_steps": 16},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of D4PG, in addition to those of every agent.

    Attributes:
      n_step: transitions between a value and the one it bootstraps from.
      critics: number of critics, which share the torso. With more than one, all learn from the
        target distribution that has the smallest mean, as in TD3
        (https://arxiv.org/abs/1802.09477).
      atoms: number of values that a critic distributes probability over.
      v_min, v_max: the least and the largest of these values, in units of (normalised) discounted
        returns.
      noise: standard deviation of the Gaussian noise of actions, in units in which [-1, 1] spans
        the action space.
      target_period: gradient steps between two updates of the target networks.
      target_rate: how far an update moves the target networks towards the current ones; 1 copies
        them.
      policy_rate: ratio of the policy's learning rate to the critic's, which is
        ``learning_rate``.
      policy_hidden: sizes of the policy's layers.
      critic_hidden: sizes of the critic's layers.
    """

    n_step: int = 5
    critics: int = 1
    atoms: int = 51
    v_min: float = -150.0
    v_max: float = 150.0
    noise: float = 0.3
    target_period: int = 100
    target_rate: float = 1.0
    policy_rate: float = 1.0
    policy_hidden: tuple[int, ...] = (300, 200)
    critic_hidden: tuple[int, ...] = (400, 300)

    off_policy: ClassVar[bool] = True
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = (
        *replay.FIXED,
        "d4pg.n_step",
        "d4pg.critics",
        "d4pg.atoms",
        "d4pg.v_min",
        "d4pg.v_max",
        "d4pg.policy_hidden",
        "d4pg.critic_hidden",
    )

    def __post_init__(self):
        for key in ("n_step", "critics", "target_period", "policy_rate"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"d4pg.{key} must be positive, got {getattr(self, key)}")
        if self.atoms < 2 or self.v_min >= self.v_max:
            raise ConfigError(
                "d4pg.atoms must be at least 2 and d4pg.v_min less than d4pg.v_max, got "
                f"{self.atoms}, {self.v_min} and {self.v_max}"
            )
        if self.noise < 0:
            raise ConfigError(f"d4pg.noise must not be negative, got {self.noise}")
        if not 0 < self.target_rate <= 1:
            raise ConfigError(f"d4pg.target_rate must be in (0, 1], got {self.target_rate}")
        for key in ("policy_hidden", "critic_hidden"):
            sizes = getattr(self, key)
            if not sizes or min(sizes) <= 0:
                raise ConfigError(f"d4pg.{key} must be one or more positive sizes, got {sizes}")

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        return replay_gradient_steps(settings, 1)


def _make_functions(spec: Spec, settings: Settings, config: Config, network: PolicyCritic):
    """The functions ``init``, ``carry`` and ``act`` of an ``Agent`` that acts with noise."""

    def init(key: Array) -> Weights:
        return Weights(network.init(key), normalization.init_stats(spec, settings))

    def carry(env_ids: Array) -> normalization.ActorCarry:
        return normalization.ActorCarry(normalization.init_total(settings, env_ids.shape[0]))

    def act(
        weights: Weights,
        carry: normalization.ActorCarry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[normalization.ActorCarry, Array, tuple[()]]:
        # Networks take [T, B, ...]: here T = 1.
        now = jax.tree.map(lambda x: x[None], timestep.observation)
        observation = normalization.normalize_observation(weights.stats, now)
        features = network.features(weights.params, observation)
        action = network.policy(weights.params, features)[0]
        if not greedy:
            noise = jax.vmap(lambda key: jax.random.normal(key, action.shape[1:]))(keys)
            action = jnp.clip(action + config.noise * noise, -1, 1)
        total = normalization.add_reward(settings, carry.total, timestep)
        return normalization.ActorCarry(total), action, ()

    return init, carry, act


def _labels(params: Params) -> ArrayTree:
    """The optimizer of each parameter: the critic's loss trains the torso."""
    groups = {"torso": "critic", "policy": "policy", "critic": "critic"}
    return {name: jax.tree.map(lambda _, g=groups[name]: g, x) for name, x in params.items()}


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """D4PG for continuous actions in a bounded space, with feed-forward networks.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of D4PG.
      devices: the devices that learn.

    Raises:
      ConfigError: actions are discrete or unbounded, the network has a core, or the replay buffer
        is too small.
    """
    network = make_policy_critic(
        spec,
        settings.network,
        policy_hidden=config.policy_hidden,
        critic_hidden=config.critic_hidden,
        critics=config.critics,
        atoms=config.atoms,
    )
    atoms = jnp.linspace(config.v_min, config.v_max, config.atoms)
    project = jax.vmap(rlax.categorical_l2_project, in_axes=(0, 0, None))

    def target_probabilities(target: Params, batch: transitions.Batch) -> Array:
        """The distributions ``[items, atoms]`` that the critics learn."""
        later = jax.tree.map(lambda x: x[1:], batch.observation)
        features = network.features(target, later)
        logits = network.critic(target, features, network.policy(target, features))[:, 0]
        probabilities = jax.nn.softmax(logits)
        least = (probabilities * atoms).sum(-1).argmin(0)
        probabilities = jnp.take_along_axis(probabilities, least[None, :, None], 0)[0]
        value = batch.target.reward[:, None] + batch.target.discount[:, None] * atoms
        return jnp.asarray(project(value, probabilities, atoms))

    def loss(
        params: Params, train_state: TrainState, batch: transitions.Batch, key: Array
    ) -> tuple[Array, LossAux]:
        del key
        valid = batch.target.valid
        now = jax.tree.map(lambda x: x[:1], batch.observation)
        features = network.features(params, now)
        logits = network.critic(params, features, batch.action[None])[:, 0]
        expected = jax.lax.stop_gradient(target_probabilities(train_state.target, batch))
        at_an_end = expected[:, 0] + expected[:, -1]
        errors = -valid * (expected * jax.nn.log_softmax(logits)).sum((0, -1))
        # Each group of parameters learns from its own loss only.
        features, fixed = jax.lax.stop_gradient((features, params))
        best = network.critic(fixed, features, network.policy(params, features))[0, 0]
        q = (jax.nn.softmax(best) * atoms).sum(-1)
        critic, policy = (batch.importance * errors).mean(), -(valid * q).mean()
        metrics = {
            "total": critic + policy,
            "critic": critic,
            "policy": policy,
            # A large share shows that v_min and v_max are too narrow.
            "at_an_end": at_an_end.mean(),
        }
        priorities = jax.lax.stop_gradient(errors)
        return critic + policy, LossAux(metrics, priorities)

    init, carry, act = _make_functions(spec, settings, config, network)
    item = transitions.make_item(settings, devices, config.n_step)
    source = make_replay(item, spec, settings, devices)
    target = target_network.periodic(config.target_period, config.target_rate)
    rates = (("policy", config.policy_rate), ("critic", 1.0))
    return Agent(init, carry, act, source, loss, target, _labels, rates)
