"""Acting in host environments: the pieces of an unroll, each to be compiled for a device.

They draw the same keys as ``unroll.unroll``, so that both take the same actions. Observations are
transferred to the device *encoded*: see ``types.HostEnvironment``.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer.acting.unroll import env_keys
from podracer.envs import spaces
from podracer.types import (
    ENVS_AXIS,
    Agent,
    Array,
    ArrayTree,
    Carry,
    HostEnvironment,
    Leaf,
    TimeStep,
    Trajectory,
    Weights,
)


class ActorState(struct.PyTreeNode):
    """The state of B host environments on a device, between two unrolls; ``[B, ...]`` each.

    Attributes:
      env_id: the environments' global numbers.
      timestep: the last arrival, decoded.
      carry: the agent's carry (its recurrent state).
    """

    env_id: Array
    timestep: TimeStep
    carry: Carry


class UnrollState(struct.PyTreeNode):
    """An unfinished unroll.

    Attributes:
      carry: ``[B, ...]``, the agent's carry.
      t: ``[]`` int32, the step that was acted on last.
      keys: ``[T, B]``, the keys to act with.
      trajectory: the steps up to t; those after it are still zeros.
    """

    carry: Carry
    t: Array
    keys: Array
    trajectory: Trajectory


class HostUnroll(NamedTuple):
    """The pieces of an unroll as pure functions, to be jitted.

    ``arrival`` is a ``TimeStep`` ``[B, ...]`` whose observation is encoded.

    Attributes:
      start: ``(env_ids [B], arrival) -> ActorState``, after a pool's reset.
      begin: ``(weights, ActorState, key) -> (UnrollState, action [B, ...])``, acts at t = 0.
      act: ``(weights, UnrollState, arrival) -> (UnrollState, action [B, ...])``, acts at the next
        t.
      close: ``(UnrollState, arrival) -> (ActorState, trajectories)`` with the last arrival; the
        trajectory is split on its batch axis, one part per learner device.
    """

    start: Callable[[Leaf, TimeStep], ActorState]
    begin: Callable[[Weights, ActorState, Leaf], tuple[UnrollState, Array]]
    act: Callable[[Weights, UnrollState, TimeStep], tuple[UnrollState, Array]]
    close: Callable[[UnrollState, TimeStep], tuple[ActorState, tuple[Trajectory, ...]]]


def transfer_shapes(env: HostEnvironment, batch: int) -> TimeStep:
    """Shapes and dtypes of an arrival of ``batch`` environments, its observation encoded."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    one = TimeStep(env.transfer_spec, scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), one)


class PoolError(RuntimeError):
    """A pool returned arrays that are not the expected time step."""


def check_transfer(arrival: TimeStep, expected: TimeStep) -> None:
    """Checks what a pool returned.

    Args:
      arrival: numpy arrays.
      expected: their shapes and dtypes, see ``transfer_shapes``.

    Raises:
      PoolError: an array has another shape or dtype, or is NaN or infinite; the message says which.
    """
    pairs = zip(jax.tree.leaves(arrival), jax.tree.leaves(expected), strict=True)
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


def host_start(env: HostEnvironment, agent: Agent, env_ids: Array, arrival: TimeStep) -> ActorState:
    """The state after a pool's reset: initial carry, and no previous observation."""
    batch, spec = env_ids.shape[0], env.spec.observation
    nothing = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), spec)
    return ActorState(env_ids, host_arrive(env, nothing, arrival), agent.carry(env_ids))


def host_arrive(env: HostEnvironment, previous: ArrayTree, arrival: TimeStep) -> TimeStep:
    """The arrival with its observation decoded, given the observations ``[B, ...]`` before it."""
    return arrival.replace(observation=env.decode_observation(arrival.observation, previous))


def make_host_unroll(
    env: HostEnvironment, agent: Agent, length: int, num_learners: int
) -> HostUnroll:
    """The pieces of ``length`` steps of acting.

    Args:
      env: the environment, which decodes observations.
      agent: the agent that acts.
      length: number of steps (T).
      num_learners: number of learner devices that the batch is split for.
    """

    def begin(weights: Weights, state: ActorState, key: Array) -> tuple[UnrollState, Array]:
        keys = env_keys(key, state.env_id, 2 * length).reshape(length, 2, -1)[:, 0]
        carry, action, extras = agent.act(weights, state.carry, state.timestep, keys[0])
        trajectory = Trajectory(
            _allocate(length + 1, state.timestep),
            *_allocate(length, (action, extras)),
            carry=state.carry,
            env_id=state.env_id,
        )
        unroll = UnrollState(carry, jnp.int32(0), keys, trajectory)
        return unroll, spaces.to_environment(action, env.spec.action)

    def arrive(past: Trajectory, t: Array | int, arrival: TimeStep) -> TimeStep:
        previous = jax.tree.map(lambda x: x[t], past.timestep.observation)
        return host_arrive(env, previous, arrival)

    def act(weights: Weights, unroll: UnrollState, arrival: TimeStep) -> tuple[UnrollState, Array]:
        past, t = unroll.trajectory, unroll.t + 1
        timestep = arrive(past, unroll.t, arrival)
        carry, action, extras = agent.act(weights, unroll.carry, timestep, unroll.keys[t])
        trajectory = Trajectory(
            _write(past.timestep, t, timestep),
            *_write((past.action, past.extras), t, (action, extras)),
            carry=past.carry,
            env_id=past.env_id,
        )
        unroll = unroll.replace(carry=carry, t=t, trajectory=trajectory)
        return unroll, spaces.to_environment(action, env.spec.action)

    def close(unroll: UnrollState, arrival: TimeStep) -> tuple[ActorState, tuple[Trajectory, ...]]:
        past = unroll.trajectory
        last = arrive(past, length - 1, arrival)
        timestep = _write(past.timestep, length, last)
        state = ActorState(past.env_id, last, unroll.carry)
        return state, _split(past.replace(timestep=timestep), num_learners)

    return HostUnroll(partial(host_start, env, agent), begin, act, close)


def _allocate(length: int, tree: ArrayTree) -> ArrayTree:
    """Arrays with a new leading axis of ``length``, whose first entry is ``tree``."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype).at[0].set(x), tree)


def _write(past: ArrayTree, t: Array | int, tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda past, x: past.at[t].set(x), past, tree)


def _split(trajectory: Trajectory, parts: int) -> tuple[Trajectory, ...]:
    """Parts of a trajectory with equally many environments."""
    split = jax.tree.map(
        lambda axis, tree: jax.tree.map(lambda x: jnp.split(x, parts, axis), tree),
        ENVS_AXIS,
        trajectory,
    )
    outer, inner = jax.tree.structure(trajectory), jax.tree.structure([0] * parts)
    return tuple(jax.tree.transpose(outer, inner, split))
