"""Environments in JAX that reset themselves, made from functions that know one episode only.

A *terminated* episode is reset in the same step, as nothing follows its end. A *truncated* one
first arrives at its true final observation, from which agents bootstrap, and is reset in the next
step, which ignores the action. ``agents/returns.py`` has the rule that covers both.

Under ``vmap``, each step computes the first state of the next episode for every environment,
whether its episode ends or not. Where a reset is expensive, ``cached`` computes one for every
environment in each unroll instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.types import Array, ArrayTree, Environment, Spec, TimeStep


class Arrival(NamedTuple):
    """What a suite's environment returns on arriving at a state.

    Attributes:
      observation: as agents see it, see ``types.Spec``.
      reward: ``[]``, of the transition to this state.
      terminated: ``[]`` bool, whether the episode ends because nothing follows.
      truncated: ``[]`` bool, whether it ends although it could continue; of no effect where it is
        terminated as well.
    """

    observation: ArrayTree
    reward: Array
    terminated: Array
    truncated: Array


class Episodes(NamedTuple):
    """An environment that does not reset itself.

    Attributes:
      reset: ``(key) -> (observation, state)``.
      step: ``(key, state, action) -> (arrival, state)``. It is also called in a state in which the
        episode has ended; what it returns there has no effect.
    """

    reset: Callable[[Array], tuple[ArrayTree, ArrayTree]]
    step: Callable[[Array, ArrayTree, Array], tuple[Arrival, ArrayTree]]


class AutoresetState(struct.PyTreeNode):
    """State of an environment that resets itself.

    Attributes:
      env: the suite's own state.
      truncated: ``[]`` bool, whether the episode was truncated on arriving at it.
      start: observation and state with which the next episode begins; ``()`` unless cached.
    """

    env: ArrayTree
    truncated: Array
    start: ArrayTree


def autoreset(episodes: Episodes, spec: Spec, *, cached: bool = False) -> Environment:
    """An environment that resets itself, without drawing.

    Args:
      episodes: the environment.
      spec: its observations and actions.
      cached: whether the start of the next episode is computed once in each unroll, not in each
        step. Episodes of an environment that begin within the same unroll then begin alike.
    """

    def reset(key: Array) -> tuple[AutoresetState, TimeStep]:
        observation, state = episodes.reset(key)
        start = episodes.reset(jax.random.fold_in(key, 1)) if cached else ()
        timestep = TimeStep(observation, jnp.float32(0), jnp.float32(1), jnp.bool_(True))
        return AutoresetState(state, jnp.bool_(False), start), timestep

    def step(key: Array, state: AutoresetState, action: Array) -> tuple[AutoresetState, TimeStep]:
        step_key, reset_key = jax.random.split(key)
        arrival, env_state = episodes.step(step_key, state.env, action)
        terminated = jnp.asarray(arrival.terminated, bool) & ~state.truncated
        first = terminated | state.truncated
        truncated = arrival.truncated & ~first
        start = state.start if cached else episodes.reset(reset_key)
        observation, env_state = jax.tree.map(
            lambda new, old: jnp.where(first, new, old), start, (arrival.observation, env_state)
        )
        timestep = TimeStep(
            observation,
            jnp.where(state.truncated, 0, arrival.reward).astype(jnp.float32),
            1 - terminated.astype(jnp.float32),
            first,
        )
        return AutoresetState(env_state, truncated, state.start), timestep

    def refresh(key: Array, state: AutoresetState) -> AutoresetState:
        return state.replace(start=episodes.reset(key))

    return Environment(spec, reset, step, refresh=refresh if cached else None)
