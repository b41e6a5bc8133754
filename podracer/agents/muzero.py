"""MuZero, https://arxiv.org/abs/1911.08265: search in a model that is learned.

A network represents an observation as a state, predicts policy and value of a state, and the reward
and the next state that follow an action. Actions are found by a search in this model, which also
finds better policies and values, and the model is unrolled over the actions taken to learn these.
By default the search is that of Gumbel MuZero (https://openreview.net/forum?id=bERaNdoegnO), which
needs few simulations. A share of each batch is reanalysed: searched again, with newer weights.
"""

import dataclasses
from math import gcd
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from podracer.agents import normalization, returns, search_entropy, target_network
from podracer.agents.branches import make_branches
from podracer.agents.model_targets import targets
from podracer.agents.reanalysis import GROUP, Batch, make_refresh
from podracer.agents.search import Found, Planner, SearchConfig
from podracer.agents.search_entropy import EntropyConfig
from podracer.agents.settings import Settings, make_replay, replay_gradient_steps
from podracer.agents.value_scale import Support
from podracer.errors import ConfigError, unknown
from podracer.learning import replay
from podracer.learning.ring import Item, Kept, Window
from podracer.learning.scalars import SAME_FOR_ALL
from podracer.nets.model import Model, ModelConfig, make_model
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Devices,
    Discrete,
    GradientSteps,
    LossAux,
    Params,
    Spec,
    TimeStep,
    TrainState,
    Trajectory,
    Weights,
)

DEFAULTS: dict[str, Any] = {
    "num_envs": 32,
    "unroll_length": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 10.0,
    "value_cost": 0.25,
    "network": {"hidden": (128,), "activation": "relu", "layer_norm": True},
    "replay": {
        "begin": 2_000,
        "batch": 128,
        "gradient_steps": 4,
        "priority_exponent": 0.6,
        "importance_exponent": 0.4,
    },
}
BOOTSTRAPS = ("search", "target", "corrected")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of MuZero, in addition to those of every agent.

    Attributes:
      search: see ``agents.search.SearchConfig``.
      entropy: see ``agents.search_entropy.EntropyConfig``.
      model: see ``nets.model.ModelConfig``.
      unroll: steps that the model is unrolled for to learn (K).
      n_step: number of transitions between a value and the one that its return bootstraps from;
        if ``bootstrap`` is "corrected", the smallest number.
      largest_value: rewards and values are distributions over numbers between minus this and this.
      atoms: how many numbers these are, which are closer to each other near 0.
      bootstrap: what returns bootstrap from: the values that the "search" of the actor found, or
        those of the "target" network. "corrected" also takes the latter, in returns of V-trace
        (https://arxiv.org/abs/1802.01561), which give less weight to actions that the target
        network's policy takes less often than the actor did. It needs discrete actions.
      reanalyze: share of each batch, in eighths, whose policies are searched again by the target
        network, and whose returns bootstrap from it (https://arxiv.org/abs/2104.06294).
      target_period: gradient steps between two updates of the target network, which copy the
        parameters.
      sampled_actions: how many actions a search considers in each state, drawn from the policy,
        where actions are continuous (Sampled MuZero, https://arxiv.org/abs/2104.06303).
    """

    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    entropy: EntropyConfig = dataclasses.field(default_factory=EntropyConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    unroll: int = 5
    n_step: int = 10
    largest_value: float = dataclasses.field(default=500.0, metadata=SAME_FOR_ALL)
    atoms: int = 51
    bootstrap: str = "search"
    reanalyze: float = dataclasses.field(default=0.0, metadata=SAME_FOR_ALL)
    target_period: int = 200
    sampled_actions: int = 20

    off_policy: ClassVar[bool] = True
    in_environment: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = (
        *replay.FIXED,
        "muzero.model.state",
        "muzero.model.size",
        "muzero.model.hidden",
        "muzero.model.channels",
        "muzero.model.blocks",
        "muzero.model.halvings",
        "muzero.unroll",
        "muzero.n_step",
        "muzero.largest_value",
        "muzero.atoms",
        "muzero.sampled_actions",
    )

    def __post_init__(self):
        for key in ("unroll", "n_step", "largest_value", "target_period", "sampled_actions"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"muzero.{key} must be positive, got {getattr(self, key)}")
        if self.bootstrap not in BOOTSTRAPS:
            raise unknown("muzero.bootstrap", self.bootstrap, BOOTSTRAPS)
        if self.atoms < 3 or self.atoms % 2 == 0:
            raise ConfigError(f"muzero.atoms must be odd and at least 3, got {self.atoms}")
        if not 0 <= self.reanalyze <= 1 or self.reanalyze * GROUP % 1:
            raise ConfigError(
                f"muzero.reanalyze must be a number of eighths in [0, 1], got {self.reanalyze}"
            )

    @property
    def refreshes(self) -> bool:
        """Whether losses read what the target network finds."""
        return self.reanalyze > 0 or self.bootstrap != "search"

    @property
    def length(self) -> int:
        """Transitions of an item."""
        return self.unroll + self.n_step

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        steps = replay_gradient_steps(settings, self.unroll)
        if self.reanalyze % 1 == 0:
            return steps
        batch = settings.replay.batch
        if batch % GROUP:
            raise ConfigError(
                f"replay.batch={batch} must be a multiple of {GROUP}, of which "
                f"muzero.reanalyze={self.reanalyze} takes a share"
            )
        return steps._replace(parts=gcd(steps.parts, batch // GROUP))


def _make_item(settings: Settings, config: Config, devices: Devices) -> Item:
    """Items of ``config.length`` transitions, which begin at every step."""
    update_moments = normalization.make_update_stats(settings, devices.mean)
    steps_per_update = settings.num_unrolls * settings.unroll_length

    def normalized(train_state: TrainState, window: Window) -> TimeStep:
        stats, timestep = train_state.weights.stats, window.timestep
        return timestep.replace(reward=normalization.normalize_reward(stats, timestep.reward))

    def read(train_state: TrainState, window: Window) -> Batch:
        count = config.length + 1 if config.refreshes else 1
        observation = normalization.normalize_observation(
            train_state.weights.stats, window.observe(jnp.arange(count))
        )
        timestep = normalized(train_state, window)
        return Batch(observation, timestep, window.action, window.extras, window.importance)

    def initial_priority(train_state: TrainState, window: Window) -> Array:
        timestep, value = normalized(train_state, window), window.extras.value
        target = targets(config.unroll, config.n_step, settings.discount, timestep, value)
        return jnp.abs(target.value[0] - value[0])

    def update_stats(train_state: TrainState, trajectory: Trajectory) -> dict[str, Any]:
        stats = update_moments(train_state, trajectory)
        steps, policy = stats["steps"] + steps_per_update, trajectory.extras.policy
        least_range = search_entropy.update(
            config.entropy,
            config.search.least_range,
            stats["least_range"],
            steps,
            policy,
            devices.mean,
        )
        return {**stats, "steps": steps, "least_range": least_range}

    return Item(
        length=config.length,
        stride=1,
        read=read,
        update_stats=update_stats,
        keep=lambda trajectory: Kept(trajectory.extras.replace(action=())),
        initial_priority=initial_priority,
        valid=lambda window: returns.valid(window.timestep)[0],
    )


def _half_gradient(x: Array) -> Array:
    """x, with half of its gradient: what is before it is not learned the faster the longer the
    unroll (appendix G)."""
    return 0.5 * x + 0.5 * jax.lax.stop_gradient(x)


def _unroll(
    model: Model, params: Params, batch: Batch, length: int
) -> tuple[ArrayTree, Array, Array]:
    """What the model predicts along the actions taken: policies and value logits of all states
    ``[K+1, items, ...]``, and reward logits of all steps ``[K, items, atoms]``. The
    program does not grow with K: its steps are a loop, and all states are predicted at once."""

    def advance(state: Array, action: Array) -> tuple[Array, tuple[Array, Array]]:
        state, reward = model.step(params, _half_gradient(state), action)
        return state, (state, reward)

    first = model.represent(params, jax.tree.map(lambda x: x[0], batch.observation))
    _, (later, reward) = jax.lax.scan(advance, first, batch.action[:length])
    states = jnp.concatenate([first[None], later])
    predicted = model.predict(params, states.reshape(-1, *first.shape[1:]))
    policy, value = jax.tree.map(lambda x: x.reshape(*states.shape[:2], *x.shape[1:]), predicted)
    return policy, value, reward


def _check(spec: Spec, config: Config) -> None:
    """Raises ``ConfigError`` for an environment that MuZero or these settings are not for."""
    if spec.players > 1:
        raise ConfigError(
            "agent='muzero' is for environments of one player, but this one has "
            f"{spec.players}; use agent='alphazero', which searches in the game itself"
        )
    if config.bootstrap == "corrected" and not isinstance(spec.action, Discrete):
        raise ConfigError(
            "muzero.bootstrap='corrected' needs discrete actions, but those of this environment "
            f"are {spec.action}; use 'target' or 'search'"
        )


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """MuZero; where actions are continuous, Sampled MuZero.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of MuZero.
      devices: the devices that learn.

    Raises:
      ConfigError: there are two players, the network has a core, V-trace has continuous actions, or
        the replay buffer is too small.
    """
    _check(spec, config)
    model = make_model(spec, settings.network, config.model, config.atoms)
    support = Support(config.largest_value, config.atoms)
    branches = make_branches(spec.action, config.sampled_actions)
    planner = Planner(config.search, model, support, settings.discount, branches)
    refresh = make_refresh(planner, config.unroll, config.bootstrap, config.reanalyze, devices)

    def loss(
        params: Params, train_state: TrainState, batch: Batch, key: Array
    ) -> tuple[Array, LossAux]:
        again = jnp.zeros(())
        if config.refreshes:
            batch, again = refresh(train_state, batch, key)
        found = batch.found
        target = targets(
            config.unroll,
            config.n_step,
            settings.discount,
            batch.timestep,
            found.value,
            batch.log_rho,
        )
        policy, value, reward = _unroll(model, params, batch, config.unroll)
        # The first step weighs as much as all others together (appendix G).
        share = jnp.array([1.0] + config.unroll * [1 / config.unroll])[:, None]
        error = optax.softmax_cross_entropy
        searched = jax.tree.map(lambda x: x[: config.unroll + 1], (found.policy, found.actions))
        values, rewards = support.encode(target.value), support.encode(target.reward)
        losses = {
            "policy": share * target.policy_weight * branches.error(policy, *searched),
            "value": share * target.value_weight * error(value, values),
            "reward": share[1:] * target.reward_weight * error(reward, rewards),
        }
        means = {name: (batch.importance * x.sum(0)).mean() for name, x in losses.items()}
        total = means["policy"] + settings.value_cost * means["value"] + means["reward"]
        value_error = jax.lax.stop_gradient(jnp.abs(target.value[0] - support.decode(value[0])))
        metrics = {
            "total": total,
            **means,
            "value_error": value_error.mean(),
            "policy_entropy": jax.scipy.special.entr(found.policy[0]).sum(-1).mean(),
            "search_depth": found.depth[0].mean(),
            "reanalyzed": again.mean(),
            "least_range": train_state.weights.stats["least_range"],
        }
        return total, LossAux(metrics, priorities=value_error)

    init, carry, act = _make_functions(spec, settings, planner)
    source = make_replay(_make_item(settings, config, devices), spec, settings, devices)
    target = target_network.periodic(config.target_period)
    return Agent(init, carry, act, source, loss, target)


def _make_functions(spec: Spec, settings: Settings, planner: Planner):
    """The functions ``init``, ``carry`` and ``act`` of an ``Agent`` that searches."""

    def init(key: Array) -> Weights:
        least_range = jnp.asarray(planner.config.least_range, jnp.float32)
        own = {"steps": jnp.float32(0), "least_range": least_range}
        stats = {**normalization.init_stats(spec, settings), **own}
        return Weights(planner.model.init(key), stats)

    def carry(env_ids: Array) -> normalization.ActorCarry:
        return normalization.ActorCarry(normalization.init_total(settings, env_ids.shape[0]))

    def act(
        weights: Weights,
        carry: normalization.ActorCarry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[normalization.ActorCarry, Array, Found]:
        observation = normalization.normalize_observation(weights.stats, timestep.observation)
        temperature = planner.config.temperature_at(weights.stats["steps"])
        found = planner.search(
            weights.params,
            keys,
            observation,
            noise=not greedy,
            temperature=temperature,
            least_range=weights.stats["least_range"],
        )
        total = normalization.add_reward(settings, carry.total, timestep)
        return normalization.ActorCarry(total), found.action, found

    return init, carry, act
