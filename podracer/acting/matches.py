"""Games of two players between two agents."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer.acting.unroll import env_keys, random_actions
from podracer.types import Agent, Array, ArrayTree, Carry, Environment, Spec, TimeStep, Weights


class Player(NamedTuple):
    """One side: an agent and its weights."""

    agent: Agent
    weights: ArrayTree


class MatchState(struct.PyTreeNode):
    """B games, ``[B, ...]`` each but the count.

    Attributes:
      count: ``[]`` int32, moves made.
      env_state: the games.
      timestep: the last arrivals.
      carries: of both players.
      turn: int32, the player to move, 0 or 1.
      result: float32, the sum of rewards from the side of player 0.
      ended: bool.
    """

    count: Array
    env_state: ArrayTree
    timestep: TimeStep
    carries: tuple[Carry, Carry]
    turn: Array
    result: Array
    ended: Array


def play(
    env: Environment,
    players: tuple[Player, Player],
    key: Array,
    num_games: int,
    *,
    opening: int,
    max_moves: int,
) -> tuple[Array, Array]:
    """Plays games in pairs, which begin with the same random moves and in which the players
    exchange sides.

    Args:
      env: a game of two players, in which the agent makes all moves.
      players: the players, who act without exploration.
      key: random key.
      num_games: number of games.
      opening: number of random moves at the beginning, without which all games would be alike.
      max_moves: the longest game; a longer one counts with what it has brought so far.

    Returns:
      Results ``[num_games]`` from the side of player 0, and whether each game has ended.
    """
    ids = jnp.arange(num_games)

    def begin() -> MatchState:
        env_state, timestep = jax.vmap(env.reset)(env_keys(key, ids // 2, 1)[0])
        carries = (players[0].agent.carry(ids), players[1].agent.carry(ids))
        zeros = jnp.zeros(num_games)
        return MatchState(
            jnp.int32(0), env_state, timestep, carries, ids % 2, zeros, jnp.zeros(num_games, bool)
        )

    def move(state: MatchState) -> MatchState:
        keys = env_keys(jax.random.fold_in(key, state.count + 1), ids // 2, 3)
        chosen = [
            player.agent.act(player.weights, carry, state.timestep, keys[0], greedy=True)
            for player, carry in zip(players, state.carries, strict=True)
        ]
        action = jnp.where(state.turn == 0, chosen[0][1], chosen[1][1])
        random = random_actions(env.spec, state.timestep.observation, keys[1])
        action = jnp.where(state.count < opening, random, action)
        env_state, timestep = jax.vmap(env.step)(keys[2], state.env_state, action)
        reward = jnp.where(state.turn == 0, timestep.reward, -timestep.reward)
        return MatchState(
            state.count + 1,
            env_state,
            timestep,
            (chosen[0][0], chosen[1][0]),
            jnp.where(timestep.discount < 0, 1 - state.turn, state.turn),
            state.result + jnp.where(state.ended, 0, reward),
            state.ended | timestep.first | (timestep.discount == 0),
        )

    def running(state: MatchState) -> Array:
        return (state.count < max_moves) & ~state.ended.all()

    state = jax.lax.while_loop(running, move, begin())
    return state.result, state.ended


def _or_random(agent: Agent, spec: Spec) -> Agent:
    """An agent whose weights are those of another one, and whether to take random legal actions
    instead of its own."""

    def act(
        weights: Any, carry: Carry, timestep: TimeStep, keys: Array, *, greedy: bool = False
    ) -> tuple[Carry, Array, ArrayTree]:
        own, at_random = weights
        carry, action, _ = agent.act(own, carry, timestep, keys, greedy=greedy)
        random = random_actions(spec, timestep.observation, keys)
        return carry, jnp.where(at_random, random, action), ()

    return agent._replace(act=act)


def tournament(
    env: Environment,
    agent: Agent,
    weights: Sequence[Weights],
    key: Array,
    num_games: int,
    *,
    opening: int,
    max_moves: int,
) -> tuple[np.ndarray, float]:
    """Plays games between all pairs of these players: one whose moves are random, and an agent with
    different weights.

    All pairs begin with the same random moves, and their games are compiled once.

    Args:
      env: a game of two players, in which the agent makes all moves.
      agent: the agent, who acts without exploration.
      weights: the weights of each player but the random one.
      key: random key.
      num_games: number of games of a pair.
      opening: see ``play``.
      max_moves: see ``play``.

    Returns:
      Points ``[players, players]`` that each player (row) has won against each other (column): 1
      for a win and 0.5 for a draw. Player 0 is the random one. And the share of games that ended.
    """
    either = _or_random(agent, env.spec)

    @jax.jit
    def play_pair(first: Any, second: Any) -> tuple[Array, Array]:
        players = (Player(either, first), Player(either, second))
        results, ended = play(env, players, key, num_games, opening=opening, max_moves=max_moves)
        return jnp.sum((jnp.sign(results) + 1) / 2), ended.mean()

    players = [(weights[0], True), *((each, False) for each in weights)]
    points, ended = np.zeros((len(players), len(players))), []
    for i, j in itertools.combinations(range(len(players)), 2):
        won, share = jax.device_get(play_pair(players[i], players[j]))
        points[i, j], points[j, i] = won, num_games - won
        ended.append(share)
    return points, float(np.mean(ended))
