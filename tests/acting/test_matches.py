"""Games between two players, in a game whose best moves are known."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import anakin
from podracer import match as command
from podracer.acting import matches
from podracer.acting.matches import Player
from podracer.envs.autoreset import Arrival, Episodes, autoreset
from podracer.errors import ConfigError, ExitCode
from podracer.storage import checkpoint
from podracer.training.match import describe, match
from podracer.types import Agent, Discrete, Spec
from podracer.xla_cpu import prng
from tests.helpers import make_config

GAMES = 400
# Scripted agents have no weights.
NOTHING: Any = ()


def nim():
    """Players take one or two of 7 to 12 sticks in turn; who takes the last one wins. A player who
    leaves a multiple of three wins."""

    def reset(key):
        sticks = jax.random.randint(key, (1,), 7, 13)
        return sticks, sticks

    def step(key, sticks, action):
        del key
        sticks = jnp.maximum(sticks - 1 - action, 0)
        ended = sticks[0] == 0
        return Arrival(sticks, jnp.where(ended, 1.0, 0.0), ended, jnp.bool_(False)), sticks

    spec = Spec(jax.ShapeDtypeStruct((1,), jnp.int32), Discrete(2), players=2)
    env = autoreset(Episodes(reset, step), spec)

    def alternate(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep.replace(discount=-timestep.discount)

    return env._replace(step=alternate)


class Scripted:
    """An agent that takes what leaves a multiple of three, or always one stick."""

    def __init__(self, *, perfect: bool):
        self.perfect = perfect

    def carry(self, ids):
        return jnp.zeros(ids.shape)

    def act(self, weights, carry, timestep, keys, *, greedy):
        assert greedy
        sticks = timestep.observation[:, 0]
        best = jnp.where(sticks % 3 == 2, 1, 0)
        return carry + 1, best if self.perfect else jnp.zeros_like(best), ()


def results(first: Any, second: Any, **options):
    players = (Player(first, NOTHING), Player(second, NOTHING))
    options = {"opening": 0, "max_moves": 100, **options}
    play = jax.jit(lambda key: matches.play(nim(), players, key, GAMES, **options))
    return jax.device_get(play(prng.key(0)))


def test_the_better_player_wins_from_either_side():
    good, bad = Scripted(perfect=True), Scripted(perfect=False)
    won, ended = results(good, bad)
    assert ended.all()
    assert set(np.unique(won)) <= {-1.0, 1.0}
    # From a multiple of three, the second player to move wins; the bad one does not know how to.
    assert won.mean() > 0.9
    lost, _ = results(bad, good)
    assert lost.mean() < -0.9


def test_equal_players_win_each_game_of_a_pair_once():
    for opening in (0, 3):
        good = Scripted(perfect=True)
        won, _ = results(good, good, opening=opening)
        np.testing.assert_array_equal(won[::2], -won[1::2])
        assert len(np.unique(won[::2])) == 2


def test_games_that_are_too_long_are_counted_as_unfinished():
    good = Scripted(perfect=True)
    won, ended = results(good, good, max_moves=4)
    assert not ended.all()
    np.testing.assert_array_equal(won[~ended], 0)


def test_a_tournament_plays_all_pairs_and_compiles_their_games_once():
    """Agents that know what to do while there are no more sticks than their weights say."""
    traces = []

    def act(weights, carry, timestep, keys, *, greedy):
        assert greedy
        traces.append(1)
        sticks = timestep.observation[:, 0]
        return carry, jnp.where((sticks % 3 == 2) & (sticks <= weights), 1, 0), ()

    agent: Any = Agent(NOTHING, lambda ids: jnp.zeros(ids.shape), act, NOTHING, NOTHING)
    knowledge: Any = [jnp.int32(x) for x in (3, 6, 12, 12)]
    points, ended = matches.tournament(
        nim(), agent, knowledge, prng.key(0), GAMES, opening=0, max_moves=100
    )
    assert len(traces) == 2, "one program, in which the agent plays either side"
    assert ended == 1
    np.testing.assert_array_equal(points + points.T, GAMES * (1 - np.eye(5)))
    assert (points[1:, 0] > 0.6 * GAMES).all(), "all win against random moves"
    assert points[2, 1] > points[1, 2]
    assert points[3, 2] > points[2, 3]
    # All pairs begin with the same games, so equal players have the same results.
    assert points[3, 4] == points[4, 3]
    np.testing.assert_array_equal(points[3, :3], points[4, :3])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in a game of two players, with three checkpoints, and one in another environment."""
    pytest.importorskip("pgx", reason="the suite is not installed: pip install -e '.[pgx]'")
    folder = tmp_path_factory.mktemp("runs")
    game = make_config(
        env="pgx:tic_tac_toe",
        agent="alphazero",
        total_steps=192,
        alphazero__search__simulations=2,
        checkpoint__every=1,
        checkpoint__keep=3,
    )
    anakin.train(game, folder / "a", quiet=True)
    anakin.train(make_config(total_steps=128), folder / "b", quiet=True)
    return folder


@pytest.mark.slow
def test_the_checkpoints_of_a_run_are_rated(runs, capsys):
    assert checkpoint.list_updates(runs / "a") == [1, 2, 3]
    arguments = ["match", f"--workdir={runs / 'a'}", "--games=50", "--opening=1"]
    # With a search, what was learned matters little, and all win against random moves.
    searching = [*arguments, "--simulations=16"]
    assert command.main([*searching, "--json"]) == ExitCode.OK
    result = json.loads(capsys.readouterr().out)
    players = result.pop("players")
    assert result == {"env": "pgx:tic_tac_toe", "games": 50, "ended": 1}
    assert [x["env_steps"] for x in players] == [None, 64, 128, 192]
    assert [x["update"] for x in players] == [None, 1, 2, 3]
    assert players[0]["elo"] == 0
    assert min(x["elo"] for x in players[1:]) > 100
    assert sum(x["points"] for x in players) == pytest.approx(2)
    # The same number of games each: more points, more Elo.
    points = [x["points"] for x in sorted(players, key=lambda x: x["elo"])]
    assert points == sorted(points)

    # The same program, which is not compiled again.
    assert command.main(searching) == ExitCode.OK
    title, names, *lines = capsys.readouterr().out.splitlines()
    assert title == "4 players of pgx:tic_tac_toe, 50 games of each pair"
    assert names.split() == ["step", "Elo", "points"]
    rows = [line.rsplit(maxsplit=2) for line in lines]
    assert [name.strip() for name, *_ in rows] == ["random moves", "64", "128", "192"]
    assert [int(rating) for _, rating, _ in rows] == [round(x["elo"]) for x in players]

    for wrong, message in (
        (["--opponent_weights=best"], "--opponent_weights needs --opponent"),
        (["--games=3"], "must be positive and even"),
        ([f"--workdir={runs / 'b'}"], "is not a game of two players"),
        (["--workdir="], "is not a run"),
    ):
        assert command.main([*arguments, *wrong]) == ExitCode.CONFIG
        assert message in capsys.readouterr().err
    assert command.main(["match"]) == ExitCode.CONFIG
    assert "--workdir is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_draws_against_itself_and_runs_of_other_games_are_rejected(runs):
    result = match(runs / "a", runs / "a", games=50, opening=1)
    assert result["won"] == result["lost"]
    assert result["won"] + result["drawn"] + result["lost"] == pytest.approx(1)
    assert describe(result).startswith("50 games of pgx:tic_tac_toe: ")
    # With a search it is another player.
    better = match(runs / "a", runs / "a", games=50, opening=1, simulations=16)
    assert better["won"] > better["lost"]
    for other, options, message in (
        ("b", {}, "the runs play different games"),
        ("a", {"games": 3}, "must be positive and even"),
    ):
        with pytest.raises(ConfigError, match=message):
            match(runs / "a", runs / other, **options)
    with pytest.raises(ConfigError, match="is not a game of two players"):
        match(runs / "b", runs / "b")
    with pytest.raises(ConfigError, match="does not search in evaluations"):
        match(runs / "b", runs / "b", simulations=8)
