"""AlphaZero, https://arxiv.org/abs/1712.01815: search in an environment that is its own model.

The environment says what follows an action (``Spec.model``), and a network predicts policy and
value of a state. Actions are found by a search, whose policy and outcome the network learns. In a
game of two players, the agent plays against itself. By default the search is that of Gumbel
AlphaZero (https://openreview.net/forum?id=bERaNdoegnO), which needs few simulations.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from podracer.agents import actor_critic, normalization, returns, unrolls
from podracer.agents.search import Found, Roots, SearchConfig, outcome, search
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.learning import rollout
from podracer.learning.scalars import substitute
from podracer.nets import actor_critic as nets
from podracer.nets import masks
from podracer.types import (
    MODEL_STATE,
    Act,
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
    "num_envs": 128,
    "unroll_length": 32,
    "discount": 1.0,
    "learning_rate": 1e-3,
    "max_grad_norm": 5.0,
    "value_cost": 1.0,
    "num_epochs": 1,
    "num_minibatches": 16,
    "network": {"hidden": (256, 256), "activation": "relu", "shared": True},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of AlphaZero, in addition to those of every agent.

    Attributes:
      search: see ``agents.search.SearchConfig``.
      evaluation_simulations: number of simulations of a search in evaluations with
        ``evaluation.greedy``; 0 takes the network's most probable action, without a search.
      random_moves: probability of a random action while learning, without which all games become
        alike.
      cut_random_moves: whether what follows a random action says nothing about the states before
        it. If not, values are those of games with random moves: they count on mistakes, which may
        win more games against weak players and fewer against strong ones.
      lambda_: weight of longer horizons in the targets of values; 1 learns the outcome of games.
    """

    search: SearchConfig = dataclasses.field(default_factory=lambda: SearchConfig(simulations=16))
    evaluation_simulations: int = 0
    random_moves: float = 0.25
    cut_random_moves: bool = True
    lambda_: float = 1.0

    off_policy: ClassVar[bool] = False
    in_environment: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        if self.evaluation_simulations < 0:
            raise ConfigError(
                "alphazero.evaluation_simulations must not be negative, got "
                f"{self.evaluation_simulations}"
            )
        if self.search.temperature_steps:
            raise ConfigError(
                "alphazero.search.temperature_steps is for agent='muzero'; alphazero keeps its "
                "temperature, so leave it at 0"
            )
        for key in ("random_moves", "lambda_"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"alphazero.{key} must be in [0, 1], got {getattr(self, key)}")

    def gradient_steps(self, settings: Settings) -> GradientSteps:
        """See ``agents``."""
        return unrolls.gradient_steps(settings, whole_unrolls=False)


class Sample(struct.PyTreeNode):
    """What the loss reads, ``[items, 1, ...]`` each.

    Attributes:
      observation: normalised observations.
      policy: what a search has found.
      value: the target of the value.
      valid: 1 where there is something to learn, else 0.
      depth: the depth of the search.
    """

    observation: ArrayTree
    policy: Array
    value: Array
    valid: Array
    depth: Array


def value_targets(
    config: Config, discount: float, timestep: TimeStep, values: Array, random: Array
) -> Array:
    """Targets of values ``[T, B]``: outcomes of games, or the values of searches where the unroll
    ends, or at states in which a random action was taken, if these are cut.

    Args:
      config: settings of AlphaZero.
      discount: gamma of the agent.
      timestep: ``[T+1, B]``.
      values: ``[T+1, B]``, what searches found.
      random: ``[T, B]`` bool, which actions were random.
    """
    random = random & config.cut_random_moves
    # Such a transition is cut: the one rule of ``agents/returns.py``.
    cut = timestep.replace(
        first=timestep.first.at[1:].set(timestep.first[1:] | random),
        discount=timestep.discount.at[1:].set(jnp.where(random, 1.0, timestep.discount[1:])),
    )
    return returns.gae(cut, values, discount=discount, lambda_=config.lambda_).value


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """AlphaZero for environments whose observations hold their state.

    Args:
      spec: observation and action spaces, and the model.
      settings: settings of every agent.
      config: settings of AlphaZero.
      devices: the devices that learn.

    Raises:
      ConfigError: there is no model, actions are continuous, or the network has a core.
    """
    _check(spec, settings)
    network = nets.make_network(spec, settings.network)
    init, carry, act_directly = actor_critic.make_functions(spec, network, settings)
    act = _make_act(config, make_search(spec, network, settings), act_directly)
    preprocess = unrolls.make_preprocess(settings, devices.mean)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        trajectory, stats = preprocess(train_state, trajectory)
        timestep, found = trajectory.timestep, trajectory.extras["found"]
        last = jax.tree.map(lambda x: x[-1:], timestep)
        _, _, value = network.apply(train_state.weights.params, (), last.observation, last.first)
        values = jnp.concatenate([found.value, value])
        random = trajectory.extras["random"]
        target = value_targets(config, settings.discount, timestep, values, random)
        observation = jax.tree.map(lambda x: x[:-1], timestep.observation)
        observation = {k: x for k, x in observation.items() if k != MODEL_STATE}
        valid = returns.valid(timestep).astype(jnp.float32)
        sample = Sample(observation, found.policy, target, valid, found.depth)
        return unrolls.items(sample, 1), stats

    def loss(
        params: Params, train_state: TrainState, batch: Sample, key: Array
    ) -> tuple[Array, LossAux]:
        del train_state, key
        batch = unrolls.time_major(batch)
        _, logits, value = network.apply(params, (), batch.observation, batch.valid > 0)
        entropy = jax.scipy.special.entr(batch.policy).sum(-1)
        # Illegal actions have a probability of 0 and a logit of -1e9, whose product is 0.
        errors = {
            "policy": optax.softmax_cross_entropy(logits, batch.policy) - entropy,
            "value": 0.5 * (value - batch.value) ** 2,
            "value_error": jnp.abs(value - batch.value),
            "policy_entropy": entropy,
            "search_depth": batch.depth,
        }
        means = {name: (batch.valid * x).mean() for name, x in errors.items()}
        total = means["policy"] + settings.value_cost * means["value"]
        return total, LossAux({"total": total, **jax.lax.stop_gradient(means)})

    source = rollout.make_source(prepare, settings.rollout, devices)
    return Agent(init, carry, act, source, loss)


def _make_act(config: Config, find: Any, act_directly: Act) -> Act:
    """Acting by a search, or in evaluations by the network alone if they have no simulations."""

    def act(
        weights: Weights, carry: Any, timestep: TimeStep, keys: Array, *, greedy: bool = False
    ) -> tuple[Any, Array, Any]:
        simulations = config.evaluation_simulations if greedy else config.search.simulations
        if simulations == 0:
            return act_directly(weights, carry, timestep, keys, greedy=True)
        both = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
        own = substitute(config.search, {"simulations": simulations})
        found = find(
            weights,
            own,
            both[:, 0],
            timestep.observation,
            noise=not greedy,
            temperature=own.temperature,
        )
        action, random = found.action, jnp.zeros(found.action.shape, bool)
        if not greedy:
            random = jax.vmap(jax.random.uniform)(both[:, 1]) < config.random_moves
            legal, actions = masks.legal(timestep.observation), found.policy.shape[-1]
            choose = jax.vmap(lambda key, legal: masks.random_action(key, legal, actions))
            action = jnp.where(random, choose(both[:, 2], legal), action)
        return carry, action, {"found": found.replace(action=()), "random": random}

    return act


def _check(spec: Spec, settings: Settings) -> None:
    """Raises ``ConfigError`` if there is nothing to search in."""
    if spec.model is None:
        raise ConfigError(
            "agent='alphazero' searches in the environment itself, which must be written in JAX, "
            "such as env='pgx:connect_four'; for others use agent='muzero', which learns a model"
        )
    if not isinstance(spec.action, Discrete):
        raise ConfigError("agent='alphazero' is for discrete actions, but these are continuous")
    if settings.normalize_rewards:
        raise ConfigError(
            "agent='alphazero' searches with the environment's own rewards, not normalised ones; "
            "set normalize_rewards=False"
        )
    if settings.network.recurrent:
        raise ConfigError(
            f"network.core={settings.network.core!r}: a search sees states without their past; use "
            "network.core='none'"
        )


def make_search(spec: Spec, network: nets.Network, settings: Settings) -> Callable[..., Found]:
    """The agent's search: ``(weights, settings, keys [B], observation [B, ...], **options) ->
    Found``, with the options of ``search.search``.

    Args:
      spec: observation and action spaces, and the model.
      network: the agent's network.
      settings: settings of every agent.
    """
    model: Any = spec.model

    def predict(weights: Weights, observation: ArrayTree) -> tuple[Array, Array]:
        observation = normalization.normalize_observation(weights.stats, observation)
        now = jax.tree.map(lambda x: x[None], observation)
        first = jnp.zeros(jax.tree.leaves(now)[0].shape[:2], bool)
        _, logits, value = network.apply(weights.params, (), now, first)
        return logits[0], value[0]

    def step(
        weights: Weights, key: Array, action: Array, state: ArrayTree
    ) -> tuple[Any, ArrayTree]:
        del key
        state, timestep = jax.vmap(model)(state, action)
        logits, value = predict(weights, timestep.observation)
        # A truncated episode is reset in the next step, which says nothing about this state.
        discount = jnp.where(timestep.first, 0.0, timestep.discount)
        discount = settings.discount * discount
        return outcome(timestep.reward, discount, logits, value * (discount != 0)), state

    def find(
        weights: Weights,
        config: SearchConfig,
        keys: Array,
        observation: ArrayTree,
        **options: Any,
    ) -> Found:
        logits, value = predict(weights, observation)
        roots = Roots(logits, value, observation[MODEL_STATE], masks.legal(observation))
        return search(config, step, weights, keys, roots, **options)

    return find
