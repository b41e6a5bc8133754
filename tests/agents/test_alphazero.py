"""AlphaZero: targets of values in games of two players, and what its search knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.agents import alphazero
from podracer.agents.alphazero import value_targets
from podracer.errors import ConfigError
from podracer.nets import actor_critic
from podracer.training import builder
from podracer.types import MODEL_STATE, Devices, TimeStep
from tests.helpers import make_config

T, GAMMA = 30, 0.9


def random_games(rng, batch):
    """Games of up to 8 moves by two players, whose last move is rewarded, and random moves."""
    reward = np.zeros((T + 1, batch), np.float32)
    discount, first = -np.ones((T + 1, batch), np.float32), np.zeros((T + 1, batch), bool)
    for b in range(batch):
        t = int(rng.integers(1, 9))
        while t <= T:
            reward[t, b], discount[t, b], first[t, b] = rng.integers(-1, 2), 0, True
            t += int(rng.integers(1, 9))
    return TimeStep((), reward, discount, first), rng.random((T, batch)) < 0.2


def outcome(timestep, values, random, t, b, lambda_):
    """The target of one value, by following the game from there on, from the mover's side."""
    if random[t, b]:
        return values[t, b]
    reward, discount = timestep.reward[t + 1, b], GAMMA * timestep.discount[t + 1, b]
    if discount == 0:
        return reward
    if t + 1 == T:
        return reward + discount * values[T, b]
    later = outcome(timestep, values, random, t + 1, b, lambda_)
    return reward + discount * ((1 - lambda_) * values[t + 1, b] + lambda_ * later)


@pytest.mark.parametrize(("lambda_", "cut"), [(1.0, True), (0.7, True), (0.7, False)])
def test_values_are_outcomes_from_the_side_of_the_player_to_move(lambda_, cut):
    """If random moves are cut, up to one, behind which the search's value stands."""
    rng = np.random.default_rng(0)
    timestep, random = random_games(rng, 20)
    values = rng.normal(size=(T + 1, 20)).astype(np.float32)
    config = alphazero.Config(lambda_=lambda_, cut_random_moves=cut)
    ours = value_targets(
        config, GAMMA, jax.tree.map(jnp.asarray, timestep), jnp.asarray(values), jnp.asarray(random)
    )
    random = random & cut
    expected = [
        [outcome(timestep, values, random, t, b, lambda_) for b in range(20)] for t in range(T)
    ]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def make_probe(name, **changes):
    config = make_config(env=f"dummy:{name}", agent="alphazero", discount=GAMMA, **changes)
    env = builder.make_environment(config)
    return env, builder.make_agent(config, env.spec)


def test_a_search_finds_what_the_network_does_not_know():
    """Untrained, with 16 simulations: the right action in nearly every state, and its value."""
    env, agent = make_probe("choice", alphazero__evaluation_simulations=16)
    weights = jax.jit(agent.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 64)
    _, timestep = jax.jit(jax.vmap(env.reset))(keys)
    assert MODEL_STATE in timestep.observation
    act = jax.jit(agent.act, static_argnames="greedy")
    _, action, extras = act(weights, agent.carry(jnp.arange(64)), timestep, keys, greedy=True)
    cue = timestep.observation["observation"][:, 0]
    np.testing.assert_array_equal(action, cue > 0)
    assert (extras["found"].policy[np.arange(64), action] > 0.9).all()
    # While learning, a quarter of all actions is random, and half of these are wrong.
    keys = jax.random.split(jax.random.key(2), 4000)
    _, timestep = jax.jit(jax.vmap(env.reset))(keys)
    _, action, extras = act(weights, agent.carry(jnp.arange(4000)), timestep, keys)
    wrong = np.asarray(action != (timestep.observation["observation"][:, 0] > 0))
    random = np.asarray(extras["random"])
    assert 0.22 < random.mean() < 0.28
    assert 0.4 < wrong[random].mean() < 0.6


def test_a_search_returns_its_tree_if_it_is_kept():
    """With the visits of all its simulations, and nothing else that it finds changed."""
    config = make_config(env="dummy:choice", agent="alphazero")
    env = builder.make_environment(config)
    network = actor_critic.make_network(env.spec, config.network)
    find = jax.jit(
        alphazero.make_search(env.spec, network, config.settings),
        static_argnums=1,
        static_argnames="keep_tree",
    )
    weights = jax.jit(builder.make_agent(config, env.spec).init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    _, timestep = jax.jit(jax.vmap(env.reset))(keys)
    inputs = (weights, config.alphazero.search, keys, timestep.observation)
    without, kept = find(*inputs), find(*inputs, keep_tree=True)
    assert without.tree == ()
    jax.tree.map(np.testing.assert_array_equal, without, kept.replace(tree=()))
    visits = kept.tree.children_visits[:, kept.tree.ROOT_INDEX]
    np.testing.assert_array_equal(visits.sum(-1), [config.alphazero.search.simulations] * 3)


def test_the_search_sees_observations_as_the_network_learns_them():
    """Normalised: other statistics, other values."""
    env, agent = make_probe(
        "choice", normalize_observations=True, alphazero__evaluation_simulations=2
    )
    weights = jax.jit(agent.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 8)
    _, timestep = jax.jit(jax.vmap(env.reset))(keys)
    act = jax.jit(agent.act, static_argnames="greedy")
    moments = weights.stats["observation"]
    values = []
    for deviation in (1.0, 3.0):
        other = moments.replace(
            variance=jax.tree.map(lambda x, d=deviation: x * d**2, moments.variance)
        )
        changed = weights.replace(stats={**weights.stats, "observation": other})
        _, _, extras = act(changed, agent.carry(jnp.arange(8)), timestep, keys, greedy=True)
        values.append(extras["found"].value)
    # By the search's small weight on the network's own value.
    assert (values[0] != values[1]).all()


def test_an_environment_whose_state_holds_masks_can_be_searched_in():
    """Jumanji's keeps the start of the next episode."""
    pytest.importorskip("jumanji", reason="the suite is not installed: pip install -e '.[jumanji]'")
    config = make_config(env="jumanji:Snake-v1", agent="alphazero")
    env = builder.make_environment(config)
    agent = builder.make_agent(config, env.spec)
    _, timestep = jax.eval_shape(jax.vmap(env.reset), jax.random.split(jax.random.key(0), 2))
    weights = jax.eval_shape(agent.init, jax.random.key(0))
    keys = jax.random.split(jax.random.key(0), 2)
    _, action, _ = jax.eval_shape(agent.act, weights, agent.carry(jnp.arange(2)), timestep, keys)
    assert action.shape == (2,)


def test_what_it_can_not_search_in_is_rejected():
    env = envs.make_environment("dummy:choice", {}, {})
    config = make_config(agent="alphazero")
    with pytest.raises(ConfigError, match="written in JAX"):
        alphazero.make(env.spec, config.settings, config.alphazero, Devices())
    with pytest.raises(ConfigError, match="discrete"):
        make_probe("choice", env_kwargs={"continuous": True})
    with pytest.raises(ConfigError, match="without their past"):
        make_probe("choice", network__core="gru")
    with pytest.raises(ConfigError, match="the environment's own rewards"):
        make_probe("choice", normalize_rewards=True)
    for changes in (
        {"alphazero__search__temperature_steps": 5},
        {"alphazero__random_moves": 1.5},
        {"alphazero__evaluation_simulations": -1},
    ):
        with pytest.raises(ConfigError, match="alphazero"):
            make_config(agent="alphazero", **changes)
