"""Acting: an agent and environments, unrolled into a ``Trajectory``.

``unroll`` does so with environments written in JAX, as one scan. ``make_host_unroll`` makes the
pieces of the same unroll for environments on the host, one call of a device for each step.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer import returns
from podracer.envs import spaces
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Carry,
    Discrete,
    Environment,
    HostEnvironment,
    Leaf,
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
    """Sums over the episodes that ended, ``[]`` float each."""

    episodes: Leaf
    ret: Leaf
    length: Leaf


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


class HostState(struct.PyTreeNode):
    """B environments on the host, as the device knows them between two unrolls; ``[B, ...]`` each.

    Attributes:
      env_id: the environments' global numbers.
      timestep: where they are.
      carry: the agent's memory.
    """

    env_id: Array
    timestep: TimeStep
    carry: Carry


class Recording(struct.PyTreeNode):
    """An unroll under way.

    Attributes:
      env_id: the environments' global numbers.
      carry: the agent's memory.
      t: ``[]`` int32, the step that was acted on last.
      keys: ``[T, B]``, to act with.
      trajectory: what there is up to step t; the rest is still empty.
    """

    env_id: Array
    carry: Carry
    t: Array
    keys: Array
    trajectory: Trajectory


class HostUnroll(NamedTuple):
    """The pieces of an unroll, all pure, to be jitted; ``sent`` is a ``TimeStep`` as it travels.

    Attributes:
      start: ``(env_ids [B], sent) -> HostState``, after a pool's reset.
      begin: ``(weights, HostState, key) -> (Recording, action [B, ...])``, acts at t = 0.
      act: ``(weights, Recording, sent) -> (Recording, action [B, ...])``, acts at the next t.
      close: ``(Recording, sent) -> (HostState, trajectories)``: the last arrival, and the
        trajectory split on its batch axis, one part for each learner device.
    """

    start: Callable[[Leaf, TimeStep], HostState]
    begin: Callable[[Weights, HostState, Leaf], tuple[Recording, Array]]
    act: Callable[[Weights, Recording, TimeStep], tuple[Recording, Array]]
    close: Callable[[Recording, TimeStep], tuple[HostState, tuple[Trajectory, ...]]]


def sent_shapes(env: HostEnvironment, batch: int) -> TimeStep:
    """Shapes of a time step of ``batch`` environments as it travels."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    one = TimeStep(env.sent, scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), one)


class PoolError(RuntimeError):
    """A pool gave something that is no time step."""


def check_sent(sent: TimeStep, expected: TimeStep) -> None:
    """Checks what a pool gave.

    Args:
      sent: numpy arrays.
      expected: their shapes, see ``sent_shapes``.

    Raises:
      PoolError: another shape or type, NaN or infinity, and where.
    """
    pairs = zip(jax.tree.leaves(sent), jax.tree.leaves(expected), strict=True)
    for number, (array, other) in enumerate(pairs):
        if array.shape != other.shape or array.dtype != other.dtype:
            wrong = (
                f"{array.dtype}{list(array.shape)}, not {np.dtype(other.dtype)}{list(other.shape)}"
            )
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            wrong = "NaN or infinite"
        else:
            continue
        path, _ = jax.tree.leaves_with_path(expected)[number]
        raise PoolError(f"the pool's {jax.tree_util.keystr(path)} is {wrong}")


def host_start(env: HostEnvironment, agent: Agent, env_ids: Array, sent: TimeStep) -> HostState:
    """The state after a pool's reset: no memory, and nothing observed before."""
    spec = env.spec.observation
    nothing = jnp.zeros((env_ids.shape[0], *spec.shape), spec.dtype)
    timestep = sent.replace(observation=env.receive(sent.observation, nothing))
    return HostState(env_ids, timestep, agent.carry(env_ids))


def host_arrive(env: HostEnvironment, before: Array, sent: TimeStep) -> TimeStep:
    """The next time step, of what was sent and the observations before it."""
    return sent.replace(observation=env.receive(sent.observation, before))


def make_host_unroll(env: HostEnvironment, agent: Agent, length: int, parts: int) -> HostUnroll:
    """The pieces of ``length`` steps of acting; keys are those that ``unroll`` would use.

    Args:
      env: what is received.
      agent: who acts.
      length: T.
      parts: learner devices to split the batch for.
    """

    def begin(weights: Weights, state: HostState, key: Array) -> tuple[Recording, Array]:
        keys = env_keys(key, state.env_id, 2 * length).reshape(length, 2, -1)[:, 0]
        carry, action, extras = agent.act(weights, state.carry, state.timestep, keys[0])
        trajectory = Trajectory(
            _first_of(length + 1, state.timestep),
            *_first_of(length, (action, extras)),
            carry=state.carry,
        )
        recording = Recording(state.env_id, carry, jnp.int32(0), keys, trajectory)
        return recording, spaces.to_environment(action, env.spec.action)

    def arrive(past: Trajectory, t: Array | int, sent: TimeStep) -> TimeStep:
        return host_arrive(env, past.timestep.observation[t], sent)

    def act(weights: Weights, recording: Recording, sent: TimeStep) -> tuple[Recording, Array]:
        past, t = recording.trajectory, recording.t + 1
        timestep = arrive(past, recording.t, sent)
        carry, action, extras = agent.act(weights, recording.carry, timestep, recording.keys[t])
        trajectory = Trajectory(
            _write(past.timestep, t, timestep),
            *_write((past.action, past.extras), t, (action, extras)),
            carry=past.carry,
        )
        recording = recording.replace(carry=carry, t=t, trajectory=trajectory)
        return recording, spaces.to_environment(action, env.spec.action)

    def close(recording: Recording, sent: TimeStep) -> tuple[HostState, tuple[Trajectory, ...]]:
        past = recording.trajectory
        last = arrive(past, length - 1, sent)
        timestep = _write(past.timestep, length, last)
        steps = _split(past.replace(timestep=timestep, carry=()), 1, parts)
        carries = _split(past.carry, 0, parts)
        state = HostState(recording.env_id, last, recording.carry)
        return state, tuple(x.replace(carry=c) for x, c in zip(steps, carries, strict=True))

    return HostUnroll(partial(host_start, env, agent), begin, act, close)


def _first_of(length: int, tree: ArrayTree) -> ArrayTree:
    """Room for ``length`` of these, the first one in its place."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype).at[0].set(x), tree)


def _write(past: ArrayTree, t: Array | int, tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda past, x: past.at[t].set(x), past, tree)


def _split(tree: ArrayTree, axis: int, parts: int) -> list[ArrayTree]:
    leaves, structure = jax.tree.flatten(tree)
    split = [jnp.split(leaf, parts, axis) for leaf in leaves]
    return [structure.unflatten([leaf[i] for leaf in split]) for i in range(parts)]
