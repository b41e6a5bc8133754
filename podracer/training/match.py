"""Matches between saved runs in a game of two players, and ratings of a run's checkpoints."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from podracer.acting import elo, matches
from podracer.acting.matches import Player
from podracer.config import Config
from podracer.errors import ConfigError
from podracer.storage import checkpoint
from podracer.training import builder, saved_run
from podracer.training.saved_run import SavedRun
from podracer.types import Agent, Environment
from podracer.xla_cpu import prng


def _with_simulations(config: Config, simulations: int | None) -> Config:
    """The config with another number of simulations in evaluations; None leaves it."""
    if simulations is None:
        return config
    own = config.agent_config
    if not hasattr(own, "evaluation_simulations"):
        raise ConfigError(
            f"the agent {config.agent!r} does not search in evaluations; leave out the number of "
            "simulations"
        )
    own = dataclasses.replace(own, evaluation_simulations=simulations)
    return dataclasses.replace(config, **{config.agent: own})


def _open(
    workdir: epath.PathLike, weights: str, simulations: int | None, allow_env: str | None
) -> tuple[SavedRun, Environment, Agent]:
    run = saved_run.read(workdir, 0, weights, allow_env)
    config = _with_simulations(run.config, simulations)
    env = builder.make_environment(config)
    return run._replace(config=config), env, builder.make_agent(config, env.spec)


def _load(
    workdir: epath.PathLike, weights: str, simulations: int | None, allow_env: str | None
) -> tuple[Config, Environment, Player]:
    run, env, agent = _open(workdir, weights, simulations, allow_env)
    return run.config, env, Player(agent, saved_run.load_weights(workdir, run, agent))


def _check(config: Config, env: Environment, games: int, opening: int) -> None:
    """Raises ``ConfigError`` if no such games can be played."""
    if env.spec.players != 2:
        raise ConfigError(f"{config.env!r} is not a game of two players")
    if games <= 0 or games % 2 or opening < 0:
        raise ConfigError(
            f"games must be positive and even, and opening not negative, got {games} and {opening}"
        )


def match(
    workdir: epath.PathLike,
    opponent: epath.PathLike,
    *,
    weights: str = "last",
    opponent_weights: str = "last",
    games: int = 200,
    opening: int = 2,
    simulations: int | None = None,
    opponent_simulations: int | None = None,
    seed: int = 0,
    allow_env: str | None = None,
) -> dict[str, Any]:
    """Plays games between the agents of two runs, each game of a pair from the other side.

    Args:
      workdir: workdir of a run in a game of two players.
      opponent: workdir of the other one, in the same game; it may be the same workdir.
      weights: "last", or "best" according to the run's evaluations.
      opponent_weights: the same of the opponent.
      games: number of games, even.
      opening: number of random moves at the beginning of a game.
      simulations: of a search of "alphazero"; 0 is the network alone; None is as in the run.
      opponent_simulations: the same of the opponent.
      seed: seed of the random moves.
      allow_env: see ``saved_run.evaluate``.

    Returns:
      The shares of games that were won, drawn and lost, as values that JSON can represent.

    Raises:
      ConfigError: a run's environment is not a game of two players, or not the same one, or a
        setting is impossible.
    """
    config, env, first = _load(workdir, weights, simulations, allow_env)
    other, other_env, second = _load(opponent, opponent_weights, opponent_simulations, allow_env)
    if (config.env, config.env_kwargs) != (other.env, other.env_kwargs):
        raise ConfigError(f"the runs play different games, {config.env!r} and {other.env!r}")
    _check(config, env, games, opening)
    # One of the agents may need the state of the game, which does not disturb the other.
    shown = other_env if other.agent_config.in_environment else env

    @jax.jit
    def play(first: Any, second: Any) -> Any:
        players = (Player(agents[0], first), Player(agents[1], second))
        return matches.play(
            shown,
            players,
            prng.key(seed),
            games,
            opening=opening,
            max_moves=config.evaluation.max_steps,
        )

    agents = (first.agent, second.agent)
    results, ended = jax.device_get(play(first.weights, second.weights))
    return {
        "env": config.env,
        "games": games,
        "won": float((results > 0).mean()),
        "drawn": float((results == 0).mean()),
        "lost": float((results < 0).mean()),
        "mean_result": float(jnp.mean(results)),
        "ended": float(ended.mean()),
    }


def describe(result: Mapping[str, Any]) -> str:
    """The result of ``match`` as text."""
    text = "{games:,} games of {env}: {won:.1%} won, {drawn:.1%} drawn, {lost:.1%} lost"
    return text.format(**result)


def rate(
    workdir: epath.PathLike,
    *,
    games: int = 200,
    opening: int = 2,
    simulations: int | None = None,
    seed: int = 0,
    allow_env: str | None = None,
) -> dict[str, Any]:
    """Elo ratings of all saved checkpoints of a run, and of random legal moves, whose rating is 0.

    All pairs of players play, from both sides. The ratings are those of ``acting.elo.fit``, with
    one draw added to the games of each pair.

    Args:
      workdir: workdir of a run in a game of two players.
      games: number of games of each pair, even.
      opening: number of random moves at the beginning of a game.
      simulations: of a search of "alphazero"; 0 is the network alone; None is as in the run.
      seed: seed of the random moves.
      allow_env: see ``saved_run.evaluate``.

    Returns:
      The number of games of a pair, the share of games that ended, and the players, as values that
      JSON can represent. The first player is the random one, whose update and env_steps are None;
      the others are in the order of training. A player's points are its share of the points of its
      games, with a draw as half a point.

    Raises:
      ConfigError: the environment is not a game of two players, there are no checkpoints, one is
        damaged, or a setting is impossible.
    """
    run, env, agent = _open(workdir, "last", simulations, allow_env)
    config = run.config
    _check(config, env, games, opening)
    updates = checkpoint.list_updates(workdir)
    loaded = [saved_run.load_weights(workdir, run._replace(update=x), agent) for x in updates]
    max_moves = config.evaluation.max_steps
    points, ended = matches.tournament(
        env, agent, loaded, prng.key(seed), games, opening=opening, max_moves=max_moves
    )
    steps = [update * config.steps_per_update for update in updates]
    shares = points.sum(1) / (games * len(updates))
    columns = {
        "update": [None, *updates],
        "env_steps": [None, *steps],
        "elo": elo.fit(points).tolist(),
        "points": shares.tolist(),
    }
    players = [dict(zip(columns, x, strict=True)) for x in zip(*columns.values(), strict=True)]
    return {"env": config.env, "games": games, "ended": ended, "players": players}


def describe_ratings(result: Mapping[str, Any]) -> str:
    """The result of ``rate`` as a table."""
    number = len(result["players"])
    lines = [
        f"{number} players of {result['env']}, {result['games']:,} games of each pair",
        f"{'step':>15}  {'Elo':>6}  {'points':>7}",
    ]
    for player in result["players"]:
        step = player["env_steps"]
        name = "random moves" if step is None else f"{step:,}"
        lines.append(f"{name:>15}  {player['elo']:>6.0f}  {player['points']:>7.1%}")
    return "\n".join(lines)
