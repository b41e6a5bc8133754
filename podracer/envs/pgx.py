"""Games of pgx: of one player, and of two players whose rewards sum to zero.

A game of two players is trained by *self-play*: the agent makes the moves of both. An observation
is what the player to move sees, a reward is that of the player who moved, and a discount of -1
instead of 1 says that the other player moves next, so that one player's value is minus the other's.
Evaluations are played against an opponent whose moves are random, from either side.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.arguments import check_names, import_suite
from podracer.envs.autoreset import Arrival, AutoresetState, Episodes, autoreset
from podracer.errors import ConfigError, unknown
from podracer.types import (
    ACTION_MASK,
    Array,
    ArrayTree,
    Discrete,
    Environment,
    Simulator,
    Spec,
    TimeStep,
)

# Pixels of a square of a drawn board, and the colours of planes, in their order.
SQUARE = 16
COLOURS = np.array([[31, 119, 180], [214, 39, 40], [44, 160, 44], [148, 103, 189]], np.uint8)


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """A game of pgx.

    Args:
      name: pgx's id, such as "connect_four".
      kwargs: must be empty.
      params: must be empty.

    Raises:
      ConfigError: pgx is not installed, no such game or parameter, or a game of more players.
    """
    pgx = import_suite("pgx", "pgx")
    games = pgx.available_envs()
    if name not in games:
        raise unknown("pgx game", name, games)
    env_id = f"pgx:{name}"
    check_names(env_id, kwargs, (), "env_kwargs")
    check_names(env_id, params, ())
    return adapt(pgx.make(name), env_id)


def adapt(game: Any, name: str) -> Environment:
    """Converts a game of pgx to an ``Environment``.

    Args:
      game: an instance of the game.
      name: its id, for errors.

    Raises:
      ConfigError: a game of more than two players.
    """
    if game.num_players > 2:
        raise ConfigError(f"{name} has {game.num_players} players; agents play games of 1 or 2")

    def observe(state: Any) -> ArrayTree:
        return {"board": state.observation, ACTION_MASK: state.legal_action_mask}

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        state = game.init(key)
        return observe(state), state

    def arrive(state: Any, reward: Array) -> Arrival:
        return Arrival(observe(state), reward, state.terminated, state.truncated)

    def step(key: Array, state: Any, action: Array) -> tuple[Arrival, ArrayTree]:
        new = game.step(state, action, key)
        return arrive(new, new.rewards[state.current_player]), new

    observation, _ = jax.eval_shape(reset, jax.random.key(0))
    players = game.num_players
    spec = Spec(observation, Discrete(game.num_actions), players=players)

    def make(episodes: Episodes, game_state: Callable[[AutoresetState], Any]) -> Environment:
        return autoreset(episodes, spec)._replace(
            render=_make_render(lambda state: game_state(state).observation),
            observe=observe,
            simulator=Simulator(game_state, _make_model(step)),
        )

    made = make(Episodes(reset, step), lambda state: state.env)
    if players == 1:
        return made
    against = make(_against_random(game, reset, arrive), lambda state: state.env[0])
    return made._replace(step=_alternate(made.step), evaluation=against)


def _turns(before: Any, after: Any) -> Array:
    """-1 if the other player moves next, else 1."""
    return jnp.where(before.current_player == after.current_player, 1.0, -1.0)


def _alternate(step: Callable) -> Callable:
    """A step whose discount says who moves next."""

    def alternate(key: Array, state: AutoresetState, action: Array) -> tuple[Any, TimeStep]:
        new, timestep = step(key, state, action)
        turns = jnp.where(timestep.first, 1.0, _turns(state.env, new.env))
        return new, timestep.replace(discount=timestep.discount * turns)

    return alternate


def _make_model(step: Callable) -> Callable[[Any, Array], tuple[Any, TimeStep]]:
    """The game as a function of its state. It draws no random numbers, so that games with chance
    repeat the same ones."""

    def model(state: Any, action: Array) -> tuple[Any, TimeStep]:
        arrival, new = step(jax.random.key(0), state, action)
        ended = arrival.terminated | arrival.truncated
        discount = jnp.where(ended, 0.0, _turns(state, new))
        return new, TimeStep(arrival.observation, arrival.reward, discount, jnp.bool_(False))

    return model


def _against_random(game: Any, reset: Callable, arrive: Callable) -> Episodes:
    """Games against random moves. The state is that of the game and the agent's player."""

    def reply(key: Array, state: Any, player: Array, reward: Array) -> tuple[Any, Array]:
        """Moves until it is the player's turn, and adds up the player's rewards."""

        def move(loop: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
            key, state, reward = loop
            key, action_key, step_key = jax.random.split(key, 3)
            action = jax.random.categorical(action_key, jnp.log(state.legal_action_mask))
            state = game.step(state, action, step_key)
            return key, state, reward + state.rewards[player]

        def waits(loop: tuple[Array, Any, Array]) -> Array:
            _, state, _ = loop
            return (state.current_player != player) & ~(state.terminated | state.truncated)

        _, state, reward = jax.lax.while_loop(waits, move, (key, state, reward))
        return state, reward

    def begin(key: Array) -> tuple[ArrayTree, ArrayTree]:
        key, player_key, reply_key = jax.random.split(key, 3)
        _, state = reset(key)
        player = jax.random.randint(player_key, (), 0, 2)
        state, _ = reply(reply_key, state, player, jnp.float32(0))
        return arrive(state, jnp.float32(0)).observation, (state, player)

    def step(key: Array, state: tuple[Any, Array], action: Array) -> tuple[Arrival, ArrayTree]:
        now, player = state
        step_key, reply_key = jax.random.split(key)
        now = game.step(now, action, step_key)
        now, reward = reply(reply_key, now, player, now.rewards[player])
        return arrive(now, reward), (now, player)

    return Episodes(begin, step)


def _make_render(observed: Callable[[Any], Array]) -> Callable[[Any], np.ndarray]:
    """``(state) -> image``: a square for each place of the board, in the colour of its plane."""

    def render(state: Any) -> np.ndarray:
        planes = np.asarray(observed(state)).astype(bool)
        planes = planes.reshape(*planes.shape[:2], -1) if planes.ndim > 1 else planes[None, :, None]
        image = np.full((*planes.shape[:2], 3), 235, np.uint8)
        for i in range(min(planes.shape[2], len(COLOURS))):
            image[planes[..., i]] = COLOURS[i]
        image = image.repeat(SQUARE, 0).repeat(SQUARE, 1)
        image[::SQUARE] = image[:, ::SQUARE] = 200
        return image

    return render
