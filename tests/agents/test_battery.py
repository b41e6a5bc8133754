"""One battery for every agent: probes with known values, for its action spaces and cores."""

import itertools
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from podracer.acting import unroll
from podracer.agents import AGENTS
from podracer.agents.search import Planner
from podracer.agents.value_scale import Support
from podracer.errors import ConfigError
from podracer.nets import actor_critic, masks, policy_critic
from podracer.nets.model import make_model
from podracer.types import ACTION_MASK
from tests.helpers import make_anakin, make_config, make_run

GAMMA = 0.9


def critic_values(config, program, state):
    """Values by the critic of an actor-critic."""
    network = actor_critic.make_network(program.env.spec, config.network)
    now = jax.tree.map(lambda x: x[None], state.rollout.timestep)
    _, _, value = network.apply(
        state.train.weights.params, state.rollout.carry.network, now.observation, now.first
    )
    return value[0]


def best_values(config, program, state):
    """The values of the best actions."""
    rollout = state.rollout
    keys = jax.random.split(jax.random.key(0), config.num_envs)
    act = jax.jit(program.agent.act)
    _, _, extras = act(state.train.weights, rollout.carry, rollout.timestep, keys)
    return extras["best"]


def expected_values(config, program, state):
    """Values of the policy's actions by the mean of the critic's distribution."""
    settings, params = config.d4pg, state.train.weights.params
    network = policy_critic.make_policy_critic(
        program.env.spec,
        config.network,
        policy_hidden=settings.policy_hidden,
        critic_hidden=settings.critic_hidden,
        critics=settings.critics,
        atoms=settings.atoms,
    )
    features = network.features(params, state.rollout.timestep.observation[None])
    logits = network.critic(params, features, network.policy(params, features))[0, 0]
    atoms = np.linspace(settings.v_min, settings.v_max, settings.atoms)
    return (jax.nn.softmax(logits) * atoms).sum(-1)


def model_values(config, program, state):
    """Values by the network of a model, without a search."""
    own, params = config.muzero, state.train.weights.params
    model = make_model(program.env.spec, config.network, own.model, own.atoms)
    planner = Planner(own.search, model, Support(own.largest_value, own.atoms), config.discount)
    return planner.predict(params, state.rollout.timestep.observation)[2]


class Row(NamedTuple):
    """What an agent is tested with.

    Attributes:
      continuous: whether it acts in continuous spaces, for each space.
      cores: cores of its network.
      settings: its settings.
      values: ``(config, program, state) ->`` the values of the current observations.
    """

    continuous: tuple[bool, ...]
    cores: tuple[str, ...]
    settings: dict[str, Any]
    values: Any


MINIBATCHES = {"num_minibatches": 2, "num_epochs": 2}
ACTOR_CRITIC = Row((False, True), ("none", "gru"), MINIBATCHES, critic_values)
REPLAY = {
    "replay__capacity": 64 * 100,
    "replay__begin": 64 * 16,
    "replay__batch": 64,
    "replay__gradient_steps": 4,
    "replay__priority_exponent": 0.6,
}
DQN = {**REPLAY, "dqn__target_period": 20, "dqn__n_step": 2, "dqn__dueling": True}
R2D2 = {
    **REPLAY,
    "r2d2__target_period": 20,
    "r2d2__n_step": 2,
    "r2d2__burn_in": 4,
    "r2d2__trace": 8,
    "r2d2__rescale": False,
}
D4PG = {
    **REPLAY,
    "d4pg__n_step": 2,
    "d4pg__v_min": -2.0,
    "d4pg__v_max": 2.0,
    "d4pg__target_period": 20,
    "d4pg__policy_hidden": (32,),
    "d4pg__critic_hidden": (32,),
}
MUZERO = {
    **REPLAY,
    "replay__gradient_steps": 8,
    "muzero__unroll": 2,
    "muzero__n_step": 2,
    "muzero__largest_value": 3.0,
    "muzero__atoms": 21,
    "muzero__search__simulations": 4,
    "muzero__search__least_range": 1.0,
    "muzero__search__prior_exponent": 0.5,
    "muzero__model__size": 16,
    "muzero__model__hidden": (32,),
}
ALPHAZERO = {
    **MINIBATCHES,
    "network__shared": False,
    "alphazero__search__simulations": 4,
}
ROWS = {
    "alphazero": Row((False,), ("none",), ALPHAZERO, critic_values),
    "d4pg": Row((True,), ("none",), D4PG, expected_values),
    "muzero": Row((False,), ("none",), MUZERO, model_values),
    "ppo": ACTOR_CRITIC,
    "vtrace": ACTOR_CRITIC,
    "dqn": Row((False,), ("none",), DQN, best_values),
    "q_lambda": Row((False,), ("none", "gru"), MINIBATCHES, best_values),
    "r2d2": Row((False,), ("none", "gru"), R2D2, best_values),
}
# Each takes seconds to compile: all of them run weekly, by default only those that differ.
WEEKLY = pytest.mark.weekly
VARIANTS = [
    (agent, *variant)
    for agent, row in ROWS.items()
    for variant in itertools.product(row.continuous, row.cores)
]
FIRST = [(agent, row.continuous[0], row.cores[0]) for agent, row in ROWS.items()]
# By default PPO learns values, and V-trace actions; .ci/run has another stage for actions.
VALUES_FIRST = ("ppo",)
ACTIONS_FIRST = ("vtrace",)


def few(variants: list[Any], agents: Collection[str]) -> list[Any]:
    """The variants, of which all but the first of these agents are weekly."""
    return [
        v if v in FIRST and v[0] in agents else pytest.param(*v, marks=WEEKLY) for v in variants
    ]


def test_every_agent_has_a_row():
    assert ROWS.keys() == AGENTS.keys()


def train(probe: str, agent: str, continuous: bool, core: str, calls: int):
    config = make_probe(probe, agent, env_kwargs={"continuous": continuous}, network__core=core)
    program, _, state, step = make_run(config)
    with jax.checking_leaks():
        state, _ = step(state)
    for _ in range(calls - 1):
        state, _ = step(state)
    # Traced once: a step returns exactly the type that it takes.
    assert step._cache_size() == 1
    return config, program, state


def make_probe(probe: str, agent: str, **changes: Any):
    """The config that an agent is tested with."""
    settings = {
        "network__hidden": (32,),
        "discount": GAMMA,
        "num_envs": 64,
        "unroll_length": 8,
        "stagger": 3,
        "updates_per_call": 100,
        "total_steps": 1_000_000,
        "learning_rate": 3e-3,
        "anneal": False,
        "entropy_cost": 0.001,
        "evaluation__episodes": 64,
        **ROWS[agent].settings,
    }
    return make_config(env=f"dummy:{probe}", agent=agent, **{**settings, **changes})


@pytest.mark.parametrize(("agent", "continuous", "core"), few(FIRST, VALUES_FIRST))
def test_values_are_learned(agent, continuous, core):
    """Of an episode of two steps whose reward comes at its end."""
    config, program, state = train("delayed", agent, continuous, core, calls=2)
    (observation,) = jax.tree.leaves(masks.split(state.rollout.timestep.observation)[0])
    expected = np.where(np.asarray(observation[:, 0]) == 1, GAMMA, 1.0)
    assert len(np.unique(expected)) == 2
    value = ROWS[agent].values(config, program, state)
    np.testing.assert_allclose(value, expected, atol=0.1)


@pytest.mark.parametrize(("agent", "continuous", "core"), few(VARIANTS, ACTIONS_FIRST))
def test_actions_are_learned(agent, continuous, core):
    _, program, state = train("choice", agent, continuous, core, calls=2)
    assert float(program.evaluate(state).ret.mean()) > 0.95


RECURRENT = [v for v in VARIANTS if v[2] != "none"]


@pytest.mark.parametrize(
    ("agent", "continuous", "core"),
    [
        pytest.param(*v, marks=pytest.mark.slow if v == ("ppo", False, "gru") else WEEKLY)
        # One without memory, for which the probe must be too hard.
        for v in [*RECURRENT, ("ppo", False, "none")]
    ],
)
def test_a_recurrent_agent_remembers(agent, continuous, core):
    _, program, state = train("memory", agent, continuous, core, calls=3)
    score = float(program.evaluate(state).ret.mean())
    assert score > 0.9 if core != "none" else score < 0.3


# One agent for each kind of network, except MuZero's, which tests/nets/test_model.py covers.
NETWORKS = ("ppo", "dqn", "d4pg")
DISCRETE = [agent for agent, row in ROWS.items() if False in row.continuous]


@pytest.mark.parametrize(
    ("probe", "torso", "agent"),
    [
        *(("masked", "mlp", agent) for agent in DISCRETE),
        *(("parts", "minatar", agent) for agent in NETWORKS),
    ],
)
@WEEKLY
def test_dictionaries_and_masks_are_understood(probe, torso, agent):
    kwargs = {} if agent in DISCRETE else {"continuous": True}
    config = make_probe(
        probe, agent, env_kwargs=kwargs, network__torso=torso, normalize_observations=True
    )
    program, _, state, step = make_run(config)
    for _ in range(2):
        state, metrics = step(state)
    # Four steps, with a reward of 1 for the right action.
    assert float(program.evaluate(state).ret.mean()) > 3.8
    # No loss or metric contains the value of an illegal action.
    assert all(np.abs(x).max() < 100 for x in metrics.learner.losses.values())


@pytest.mark.parametrize("agent", ["dqn", "r2d2", "q_lambda"])
def test_an_agent_that_learns_values_of_actions_rejects_continuous_ones(agent):
    config = make_probe("choice", agent, env_kwargs={"continuous": True})
    with pytest.raises(
        ConfigError, match=r"continuous actions of shape \(1,\), which have no value"
    ):
        make_anakin(config)


@pytest.mark.parametrize(
    "agent", [x if x in ("ppo", "dqn") else pytest.param(x, marks=WEEKLY) for x in DISCRETE]
)
def test_no_agent_takes_an_illegal_action(agent):
    """Not untrained, nor while environments are staggered, nor in any evaluation."""
    program, _, state, _ = make_run(make_probe("masked", agent, stagger=12))
    act = partial(unroll.unroll, program.env, program.agent, length=50)
    _, trajectory, _ = jax.jit(act)(state.train.weights, state.rollout, state.key)
    mask = np.asarray(trajectory.timestep.observation[ACTION_MASK][:-1])
    action = np.asarray(trajectory.action)
    assert np.take_along_axis(mask, action[..., None], -1).all()
    # All actions are tried, and an illegal one would cost 100.
    assert len(np.unique(action[mask.sum(-1) > 1])) == 4
    assert float(state.rollout.episode.ret.min()) >= 0
    assert len(np.unique(state.rollout.episode.length)) > 1
    for greedy in (True, False):
        config = make_probe("masked", agent, stagger=12, evaluation__greedy=greedy)
        assert float(make_anakin(config)[0].evaluate(state).ret.min()) >= 0
