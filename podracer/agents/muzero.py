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
from flax import struct

from podracer.agents import normalization, returns, target_network
from podracer.agents.branches import make_branches
from podracer.agents.model_targets import targets
from podracer.agents.search import Found, Planner, SearchConfig
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
BOOTSTRAPS = ("search", "target")
# Items of a batch are reanalysed in groups of this size, the same number of each group.
GROUP = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of MuZero, in addition to those of every agent.

    Attributes:
      search: see ``agents.search.SearchConfig``.
      model: see ``nets.model.ModelConfig``.
      unroll: steps that the model is unrolled for to learn (K).
      n_step: transitions between a value and the one it bootstraps from.
      largest_value: rewards and values are distributions over numbers between minus this and this.
      atoms: how many numbers these are, which are closer to each other near 0.
      bootstrap: what returns bootstrap from: the values that the "search" of the actor found, or
        those of the "target" network.
      reanalyze: share of each batch, in eighths, whose policies are searched again by the target
        network, and whose returns bootstrap from it (https://arxiv.org/abs/2104.06294).
      target_period: gradient steps between two updates of the target network, which copy the
        parameters.
      sampled_actions: how many actions a search considers in each state, drawn from the policy,
        where actions are continuous (Sampled MuZero, https://arxiv.org/abs/2104.06303).
    """

    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
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
        return self.reanalyze > 0 or self.bootstrap == "target"

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


class Batch(struct.PyTreeNode):
    """Items of L = unroll + n_step transitions, as the loss reads them.

    Attributes:
      observation: ``[k, items, ...]``: all L+1 if any of them is needed again, else the first.
      timestep: ``[L+1, items]`` without its observation, which is ``()``.
      action: ``[L+1, items]``.
      found: ``[L+1, items, ...]``, what the actors' searches found.
      importance: ``[items]``, the factors of the losses.
    """

    observation: ArrayTree
    timestep: TimeStep
    action: Array
    found: Found
    importance: Array


def _refresher(planner: Planner, config: Config, devices: Devices):
    """``(target, batch, key) -> (batch, again [items])``: what the target network finds in the
    place of older values and policies, and 1 for the items that were searched again."""

    def chosen(items: int, key: Array) -> Array:
        """The items to search again: of each group the same number, the same on any devices."""
        group = GROUP if config.reanalyze < 1 else 1
        places = jnp.arange(round(config.reanalyze * group)) + jax.random.randint(key, (), 0, group)
        return (jnp.arange(0, items, group)[:, None] + places % group).ravel()

    def values(target: Params, batch: Batch) -> Array:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.observation)
        return planner.predict(target, flat)[2].reshape(batch.found.value.shape)

    def policies(target: Params, batch: Batch, numbers: Array, key: Array) -> tuple[Any, ...]:
        count = config.unroll + 1
        keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), count))(numbers)
        flat = jax.tree.map(lambda x: x[:count].reshape(-1, *x.shape[2:]), batch.observation)
        found = planner.search(target, keys.T.ravel(), flat)
        return jax.tree.map(
            lambda x: x.reshape(count, numbers.size, *x.shape[1:]), (found.policy, found.actions)
        )

    def refresh(target: Params, batch: Batch, key: Array) -> tuple[Batch, Array]:
        found, items = batch.found, batch.importance.size
        if config.bootstrap == "target":
            found = found.replace(value=values(target, batch))
        again = jnp.zeros(items)
        if config.reanalyze:
            place_key, key = jax.random.split(key)
            place = chosen(items, place_key)
            part = jax.tree.map(
                lambda x: x[:, place], batch.replace(importance=batch.importance[None])
            )
            fresh = policies(target, part, devices.number() * items + place, key)
            policy, actions = jax.tree.map(
                lambda old, new: old.at[: config.unroll + 1, place].set(new),
                (found.policy, found.actions),
                fresh,
            )
            found = found.replace(policy=policy, actions=actions)
            if config.bootstrap == "search":
                found = found.replace(value=found.value.at[:, place].set(values(target, part)))
            again = again.at[place].set(1.0)
        return jax.lax.stop_gradient((batch.replace(found=found), again))

    return refresh


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
        return {**stats, "steps": stats["steps"] + steps_per_update}

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


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """MuZero; where actions are continuous, Sampled MuZero.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of MuZero.
      devices: the devices that learn.

    Raises:
      ConfigError: there are two players, the network has a core, or the replay buffer is too small.
    """
    if spec.players > 1:
        raise ConfigError(
            "agent='muzero' is for environments of one player, but this one has "
            f"{spec.players}; use agent='alphazero', which searches in the game itself"
        )
    model = make_model(spec, settings.network, config.model, config.atoms)
    support = Support(config.largest_value, config.atoms)
    branches = make_branches(spec.action, config.sampled_actions)
    planner = Planner(config.search, model, support, settings.discount, branches)
    refresh = _refresher(planner, config, devices)

    def loss(
        params: Params, train_state: TrainState, batch: Batch, key: Array
    ) -> tuple[Array, LossAux]:
        again = jnp.zeros(())
        if config.refreshes:
            batch, again = refresh(train_state.target, batch, key)
        found = batch.found
        target = targets(
            config.unroll, config.n_step, settings.discount, batch.timestep, found.value
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
        }
        return total, LossAux(metrics, priorities=value_error)

    init, carry, act = _make_functions(spec, settings, planner)
    source = make_replay(_make_item(settings, config, devices), spec, settings, devices)
    target = target_network.periodic(config.target_period)
    return Agent(init, carry, act, source, loss, target)


def _make_functions(spec: Spec, settings: Settings, planner: Planner):
    """The functions ``init``, ``carry`` and ``act`` of an ``Agent`` that searches."""

    def init(key: Array) -> Weights:
        stats = {**normalization.init_stats(spec, settings), "steps": jnp.float32(0)}
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
            weights.params, keys, observation, noise=not greedy, temperature=temperature
        )
        total = normalization.add_reward(settings, carry.total, timestep)
        return normalization.ActorCarry(total), found.action, found

    return init, carry, act
