"""Games of pgx, against pgx's own functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.acting.policy import Policy
from podracer.errors import ConfigError
from podracer.training import builder
from podracer.types import ACTION_MASK, MODEL_STATE
from podracer.xla_cpu import prng
from tests.helpers import make_config

pgx = pytest.importorskip("pgx", reason="the suite is not installed: pip install -e '.[pgx]'")


def make(name="tic_tac_toe", **kwargs):
    return envs.make_environment(f"pgx:{name}", {}, {}, **kwargs)


def test_a_game_is_played_by_both_sides():
    """Random games: each move is seen, and rewarded, by the player who makes it."""
    env, game = make(model=True), pgx.make("tic_tac_toe")
    step, their_step = jax.jit(env.step), jax.jit(game.step)
    model = jax.jit(env.spec.model)
    rng, results = np.random.default_rng(0), set()
    state, timestep = jax.jit(env.reset)(prng.key(0))
    for _ in range(12):
        theirs = timestep.observation[MODEL_STATE]
        assert bool(timestep.first)
        while not (theirs.terminated | theirs.truncated):
            observation = timestep.observation
            np.testing.assert_array_equal(observation["board"], theirs.observation)
            np.testing.assert_array_equal(observation[ACTION_MASK], theirs.legal_action_mask)
            action = jnp.int32(rng.choice(np.flatnonzero(observation[ACTION_MASK])))
            simulated, expected = model(observation[MODEL_STATE], action)
            mover = int(theirs.current_player)
            theirs = their_step(theirs, action)
            state, timestep = step(prng.key(1), state, action)
            ended = bool(theirs.terminated)
            for arrival in (timestep, expected):
                assert float(arrival.reward) == float(theirs.rewards[mover])
                assert float(arrival.discount) == (0 if ended else -1)
            jax.tree.map(np.testing.assert_array_equal, simulated, theirs)
            assert bool(timestep.first) == ended
        results.add(float(theirs.rewards[0]))
    assert results == {-1.0, 0.0, 1.0}


def test_evaluations_are_games_against_random_moves_from_either_side():
    """Both play at random: the player who begins wins 58.5 % and loses 28.8 % of games."""
    env = make().evaluation
    assert env is not None
    keys = jax.random.split(prng.key(0), 4000)
    state, timestep = jax.jit(jax.vmap(env.reset))(keys)
    begins = np.asarray(timestep.observation["board"]).sum((1, 2, 3)) == 0
    assert 0.47 < begins.mean() < 0.53
    # The opponent has made one move, which is in the second plane.
    board = np.asarray(timestep.observation["board"])[~begins]
    assert (board[..., 0].sum((1, 2)) == 0).all()
    assert (board[..., 1].sum((1, 2)) == 1).all()
    step = jax.jit(jax.vmap(env.step))
    total, running = np.zeros(4000), np.ones(4000, bool)
    for i in range(5):
        legal = timestep.observation[ACTION_MASK]
        action = jax.vmap(jax.random.categorical)(
            jax.vmap(jax.random.fold_in, (0, None))(keys, 2 * i), jnp.log(legal)
        )
        moved = jax.vmap(jax.random.fold_in, (0, None))(keys, 2 * i + 1)
        state, timestep = step(moved, state, action)
        assert set(np.unique(timestep.discount)) <= {0.0, 1.0}
        total += running * np.asarray(timestep.reward)
        running &= ~np.asarray(timestep.first)
    assert not running.any()
    for side, results in ((begins, [0.585, 0.288]), (~begins, [0.288, 0.585])):
        shares = [(total[side] == 1).mean(), (total[side] == -1).mean()]
        np.testing.assert_allclose(shares, results, atol=0.04)


def test_a_game_of_one_player_is_evaluated_as_it_is():
    env = make("2048")
    assert env.evaluation is None
    assert env.spec.players == 1
    _, timestep = jax.eval_shape(env.step, prng.key(0), *_start(env), jnp.int32(0))
    assert timestep.observation.keys() == {"board", ACTION_MASK}


def _start(env):
    return (jax.eval_shape(env.reset, prng.key(0))[0],)


def test_a_policy_takes_the_game_s_own_state():
    """That of an agent that searches in it, and that of one that does not."""
    state = pgx.make("tic_tac_toe").init(prng.key(0))
    for agent in ("alphazero", "ppo"):
        own = {"alphazero__evaluation_simulations": 2} if agent == "alphazero" else {}
        config = make_config(env="pgx:tic_tac_toe", agent=agent, **own)
        env = builder.make_environment(config)
        made = builder.make_agent(config, env.spec)
        action = Policy(made, made.init(prng.key(0)), env)(state)
        assert bool(state.legal_action_mask[action])


def test_a_drawing_shows_each_player_in_a_colour():
    env = make()
    state, _ = env.reset(prng.key(0))
    state, _ = env.step(prng.key(0), state, jnp.int32(4))
    image = env.render(jax.device_get(state))
    assert image.shape == (48, 48, 3)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) == 3


def test_settings_that_no_game_has_are_rejected():
    with pytest.raises(ConfigError, match="tic_tac_toe"):
        envs.make_environment("pgx:tictactoe", {}, {})
    with pytest.raises(ConfigError, match="has 3 players"):
        envs.make_environment("pgx:sparrow_mahjong", {}, {})
    with pytest.raises(ConfigError):
        envs.make_environment("pgx:tic_tac_toe", {"size": 4}, {})
