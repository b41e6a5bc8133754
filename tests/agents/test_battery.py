"""One battery for every agent: probes with known values, for all action spaces and cores."""

import itertools

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.agents import AGENTS
from podracer.nets import actor_critic
from tests.helpers import make_config, make_run

GAMMA = 0.9
# The value V(x) of observation x, and the best return of an episode.
VALUES = {
    "one": lambda x: np.ones_like(x),
    "sign": lambda x: x,
    "delayed": lambda x: np.where(x == 1, GAMMA, 1.0),
}
# Each takes seconds to compile: .ci/run runs all of them, the default run only those that differ.
SLOW = pytest.mark.slow
VARIANTS = list(itertools.product(AGENTS, (False, True), ("none", "gru")))
FEW = [pytest.param(*v, marks=SLOW) if v[1] or v[2] == "gru" else v for v in VARIANTS]


def train(probe: str, agent: str, continuous: bool, core: str, calls: int):
    config = make_config(
        env=f"dummy:{probe}",
        env_kwargs={"continuous": continuous},
        agent=agent,
        network__core=core,
        network__hidden=(32,),
        discount=GAMMA,
        num_envs=64,
        unroll_length=8,
        stagger=3,
        num_minibatches=2,
        updates_per_call=100,
        total_steps=1_000_000,
        num_epochs=2,
        learning_rate=3e-3,
        anneal=False,
        entropy_cost=0.001,
        evaluation__episodes=64,
    )
    program, _, state, step = make_run(config)
    with jax.checking_leaks():
        state, _ = step(state)
    for _ in range(calls - 1):
        state, _ = step(state)
    # Traced once: a step returns exactly the type that it takes.
    assert step._cache_size() == 1
    return config, program, state


@pytest.mark.parametrize(("agent", "continuous", "core"), FEW)
@pytest.mark.parametrize(
    "probe", [*(pytest.param(p, marks=SLOW) for p in ("one", "sign")), "delayed"]
)
def test_values_are_learned(probe, agent, continuous, core):
    config, _, state = train(probe, agent, continuous, core, calls=2)
    network = actor_critic.make_network(
        envs.make_environment(config.env, config.env_kwargs, {}).spec, config.network
    )
    now = jax.tree.map(lambda x: x[None], state.rollout.timestep)
    _, _, value = network.apply(
        state.train.weights.params, state.rollout.carry.network, now.observation, now.first
    )
    expected = VALUES[probe](np.asarray(now.observation[0, :, 0]))
    np.testing.assert_allclose(value[0], expected, atol=0.1)
    if probe != "one":
        assert len(np.unique(expected)) == 2


@pytest.mark.parametrize(("agent", "continuous", "core"), FEW)
def test_actions_are_learned(agent, continuous, core):
    _, program, state = train("choice", agent, continuous, core, calls=2)
    assert float(program.evaluate(state).ret.mean()) > 0.95


@pytest.mark.parametrize(
    ("agent", "continuous", "core"),
    [v if v == ("ppo", False, "gru") else pytest.param(*v, marks=SLOW) for v in VARIANTS],
)
def test_a_recurrent_agent_remembers(agent, continuous, core):
    _, program, state = train("memory", agent, continuous, core, calls=3)
    score = float(program.evaluate(state).ret.mean())
    without = 0.75 if continuous else 0.0
    if core == "none":
        assert score < without + 0.3
    else:
        assert score > 0.9
