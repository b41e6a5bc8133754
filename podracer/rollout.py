"""Acting: an agent and environments, unrolled into a ``Trajectory``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer import returns
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Carry,
    Discrete,
    Environment,
    Spec,
    TimeStep,
    Trajectory,
    Weights,
)


class RolloutState(struct.PyTreeNode):
    """B environments and the agent's memory of them, between two unrolls; ``[B, ...]`` each.

    Attributes:
      env_id: the environments' *global* numbers, over all devices of all processes.
      env_state: the environments.
      timestep: where they are.
      carry: the agent's memory.
      episode: sums over their running episodes.
    """

    env_id: Array
    env_state: ArrayTree
    timestep: TimeStep
    carry: Carry
    episode: returns.Episode


class EpisodeMetrics(NamedTuple):
    """Sums over the episodes that ended, ``[]`` float32 each."""

    episodes: Array
    ret: Array
    length: Array


def env_keys(key: Array, env_ids: Array, count: int) -> Array:
    """Keys ``[count, B]``, none shared by two environments, that depend on their ids alone."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), count))(env_ids)
    return jnp.swapaxes(keys, 0, 1)


def init(env: Environment, agent: Agent, key: Array, env_ids: Array) -> RolloutState:
    """Resets environments ``env_ids [B]``."""
    env_state, timestep = jax.vmap(env.reset)(env_keys(key, env_ids, 1)[0])
    zeros = jnp.zeros(env_ids.shape)
    return RolloutState(
        env_ids, env_state, timestep, agent.carry(env_ids), returns.Episode(zeros, zeros)
    )


def random_actions(spec: Spec, keys: Array) -> Array:
    """Uniform actions ``[B, ...]``, one from each key ``[B]``."""
    action = spec.action
    if isinstance(action, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, action.num_actions))(keys)
    return jax.vmap(lambda key: jax.random.uniform(key, action.shape, minval=-1, maxval=1))(keys)


def stagger(env: Environment, state: RolloutState, key: Array, most: int) -> RolloutState:
    """Advances each environment by another number of random actions, up to ``most``.

    Environments that were reset together end their episodes together, and short unrolls then see
    one phase of an episode at a time.
    """
    ages = jax.vmap(lambda key: jax.random.randint(key, (), 0, most + 1))
    age = ages(env_keys(jax.random.fold_in(key, most), state.env_id, 1)[0])

    def advance(i: Array, state: RolloutState) -> RolloutState:
        act_key, env_key = env_keys(jax.random.fold_in(key, i), state.env_id, 2)
        action = random_actions(env.spec, act_key)
        env_state, timestep = jax.vmap(env.step)(env_key, state.env_state, action)
        episode, _, _ = returns.track(state.episode, timestep)
        new = (env_state, timestep, episode)
        old = (state.env_state, state.timestep, state.episode)
        env_state, timestep, episode = jax.tree.map(
            lambda n, o: jnp.where((i < age).reshape(-1, *[1] * (n.ndim - 1)), n, o), new, old
        )
        return state.replace(env_state=env_state, timestep=timestep, episode=episode)

    return jax.lax.fori_loop(0, most, advance, state)


def unroll(
    env: Environment,
    agent: Agent,
    weights: Weights,
    state: RolloutState,
    key: Array,
    length: int,
) -> tuple[RolloutState, Trajectory, EpisodeMetrics]:
    """Acts for ``length`` steps.

    Args:
      env: one environment, vmapped here.
      agent: who acts.
      weights: with what.
      state: where to start.
      key: of this unroll, the same on all devices.
      length: T.

    Returns:
      The state after it, the trajectory, and sums over the episodes that ended in it.
    """
    # Drawn for all steps at once: one call instead of T in the loop.
    keys = env_keys(key, state.env_id, 2 * length)
    keys = keys.reshape(length, 2, -1)

    def step(state: RolloutState, keys: Array):
        act_key, env_key = keys
        carry, action, extras = agent.act(weights, state.carry, state.timestep, act_key)
        env_state, timestep = jax.vmap(env.step)(env_key, state.env_state, action)
        episode, total, ended = returns.track(state.episode, timestep)
        new = RolloutState(state.env_id, env_state, timestep, carry, episode)
        return new, (state.timestep, action, extras, total, ended)

    start = state.carry
    state, (timesteps, action, extras, total, ended) = jax.lax.scan(step, state, keys)
    timesteps = jax.tree.map(
        lambda x, last: jnp.concatenate([x, last[None]]), timesteps, state.timestep
    )
    ended = ended.astype(jnp.float32)
    metrics = EpisodeMetrics(ended.sum(), (ended * total.ret).sum(), (ended * total.length).sum())
    return state, Trajectory(timesteps, action, extras, start), metrics
