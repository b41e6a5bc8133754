"""Acting in environments written in JAX: a ``Trajectory`` as one scan over time."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from podracer.acting.statistics import Episode, EpisodeSums, sum_finished, track
from podracer.nets import masks
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

# The keys of environments are folded from the key of an unroll with their numbers, and those of its
# resets and of what is prepared for the unroll with numbers that no environment has.
RESET, REFRESH = 2**32 - 1, 2**32 - 2


class RolloutState(struct.PyTreeNode):
    """B environments and the agent that acts in them, between two unrolls; ``[B, ...]`` each.

    Attributes:
      env_id: the environments' *global* numbers, over all devices of all processes.
      env_state: the environments' states.
      timestep: the last arrival.
      carry: the agent's carry (its recurrent state).
      episode: sums over the running episodes.
    """

    env_id: Array
    env_state: ArrayTree
    timestep: TimeStep
    carry: Carry
    episode: Episode


def env_keys(key: Array, env_ids: Array, count: int) -> Array:
    """Keys ``[count, B]``: those of an environment depend on its id, not on the others."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), count))(env_ids)
    return jnp.swapaxes(keys, 0, 1)


def reset(env: Environment, agent: Agent, key: Array, env_ids: Array) -> RolloutState:
    """Resets environments ``env_ids [B]``."""
    env_state, timestep = jax.vmap(env.reset)(env_keys(key, env_ids, 1)[0])
    zeros = jnp.zeros(env_ids.shape)
    return RolloutState(env_ids, env_state, timestep, agent.carry(env_ids), Episode(zeros, zeros))


def random_actions(spec: Spec, observation: ArrayTree, keys: Array) -> Array:
    """Uniformly random legal actions ``[B, ...]``, for observations and keys ``[B, ...]``."""
    action = spec.action
    if isinstance(action, Discrete):
        choose = partial(masks.random_action, num_actions=action.num_actions)
        return jax.vmap(choose)(keys, masks.legal(observation))
    return jax.vmap(lambda key: jax.random.uniform(key, action.shape, minval=-1, maxval=1))(keys)


def stagger(env: Environment, state: RolloutState, key: Array, most: int) -> RolloutState:
    """Takes a random number of random actions, up to ``most``, in each environment.

    Environments that were reset together end their episodes together, so that a short unroll would
    only see one phase of an episode.
    """
    ages = jax.vmap(lambda key: jax.random.randint(key, (), 0, most + 1))
    age = ages(env_keys(jax.random.fold_in(key, most), state.env_id, 1)[0])

    def advance(i: Array, state: RolloutState) -> RolloutState:
        act_key, env_key = env_keys(jax.random.fold_in(key, i), state.env_id, 2)
        action = random_actions(env.spec, state.timestep.observation, act_key)
        env_state, timestep = jax.vmap(env.step)(env_key, state.env_state, action)
        episode, _, _ = track(state.episode, timestep)
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
    *,
    whole_episodes: bool = False,
) -> tuple[RolloutState, Trajectory, EpisodeSums]:
    """Acts for ``length`` steps.

    Args:
      env: a single environment, which is vmapped here.
      agent: the agent that acts.
      weights: the agent's weights.
      state: the state of the environments and the agent at the start.
      key: random key of this unroll, the same on all devices.
      length: number of steps (T).
      whole_episodes: whether all environments begin new episodes first.

    Returns:
      The state after the unroll, the trajectory, and sums over the episodes that ended in it.
    """
    if whole_episodes:
        state = reset(env, agent, jax.random.fold_in(key, RESET), state.env_id)
    if env.refresh is not None:
        (refresh_key,) = env_keys(jax.random.fold_in(key, REFRESH), state.env_id, 1)
        state = state.replace(env_state=jax.vmap(env.refresh)(refresh_key, state.env_state))
    # Keys are drawn for all steps at once, which is faster than in the loop.
    keys = env_keys(key, state.env_id, 2 * length)
    keys = keys.reshape(length, 2, -1)

    def step(state: RolloutState, keys: Array):
        act_key, env_key = keys
        carry, action, extras = agent.act(weights, state.carry, state.timestep, act_key)
        env_state, timestep = jax.vmap(env.step)(env_key, state.env_state, action)
        episode, total, ended = track(state.episode, timestep)
        new = RolloutState(state.env_id, env_state, timestep, carry, episode)
        return new, (state.timestep, action, extras, total, ended)

    start = state.carry
    state, (timesteps, action, extras, total, ended) = jax.lax.scan(step, state, keys)
    timesteps = jax.tree.map(
        lambda x, last: jnp.concatenate([x, last[None]]), timesteps, state.timestep
    )
    trajectory = Trajectory(timesteps, action, extras, start, state.env_id)
    return state, trajectory, sum_finished(total, ended)
