"""Acting in host environments that progress independently of each other: the compiled pieces.

N environments have places on a device. Those that have arrived are acted on together, each at a
step of its own unroll; one that is slow, or has gone, delays no other. Keys are those that
``host_unroll`` draws for the same unroll, environment and step, so that both take the same actions.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from podracer.acting.host_unroll import host_arrive
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


class Arrivals(struct.PyTreeNode):
    """What has arrived from some of the places, ``[P, ...]`` each; rows that are not used have a
    place behind the last one.

    Attributes:
      place: int32, number of the place on the device.
      unroll: int32, number of the unroll that its next action belongs to.
      t: int32, step of the unroll that the place is in, from 0 to T. At T this unroll ends, and the
        action is the first one of the next.
      start: bool, whether an environment has just taken the place: its agent remembers nothing.
      timestep: its observation is encoded.
    """

    place: Leaf
    unroll: Leaf
    t: Leaf
    start: Leaf
    timestep: TimeStep


class PlacesState(struct.PyTreeNode):
    """The unfinished unrolls of N places on a device.

    Attributes:
      carry: ``[N, ...]``, the agent's carry.
      before: ``[N, ...]``, the agent's carry before the last step.
      observation: ``[N, ...]``, the last observation.
      unrolls: ``[N, T+1, ...]`` each, with their carry ``[N, ...]`` and environments ``[N]``. Step
        T is the first one of the next unroll.
    """

    carry: Carry
    before: Carry
    observation: ArrayTree
    unrolls: Trajectory


class IndependentUnroll(NamedTuple):
    """The pieces as pure functions, to be jitted; states are to be donated.

    Attributes:
      init: ``(env_ids [N]) -> PlacesState``.
      allocate: ``() -> Trajectory``, room for ``batch`` unrolls on a learner device.
      act: ``(weights, PlacesState, Arrivals) -> (PlacesState, action [P, ...])``.
      take: ``(PlacesState, Trajectory, place [K], position [K]) -> (PlacesState, Trajectory)``,
        after the arrivals at T of these places: copies their unrolls to these positions, and begins
        the next ones. Rows with a place and a position behind the last ones are not used.
    """

    init: Callable[[Leaf], PlacesState]
    allocate: Callable[[], Trajectory]
    act: Callable[[Weights, PlacesState, Arrivals], tuple[PlacesState, Array]]
    take: Callable[[PlacesState, Trajectory, Leaf, Leaf], tuple[PlacesState, Trajectory]]


def make_independent_unroll(
    env: HostEnvironment,
    agent: Agent,
    act_key: Callable[[Array], Array],
    trajectory: Trajectory,
) -> IndependentUnroll:
    """The pieces of acting in independent environments.

    Args:
      env: the environment, which decodes observations.
      agent: the agent that acts.
      act_key: ``(unroll) -> key``, the key of an unroll with this number.
      trajectory: shapes of the trajectories that a learner device receives, ``[T+1, batch, ...]``.
    """
    length = trajectory.action.shape[0]

    def init(env_ids: Array) -> PlacesState:
        places = env_ids.shape[0]

        def allocate(x: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros((places, length + 1, *x.shape[2:]), x.dtype)

        steps = jax.tree.map(allocate, trajectory.replace(carry=(), env_id=()))
        carry = agent.carry(env_ids)
        observation = jax.tree.map(lambda x: x[:, 0], steps.timestep.observation)
        # Copies, because each of them is donated.
        before, first = (jax.tree.map(jnp.copy, carry) for _ in range(2))
        unrolls = steps.replace(carry=first, env_id=env_ids)
        return PlacesState(carry, before, observation, unrolls)

    def allocate() -> Trajectory:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trajectory)

    def act(weights: Weights, state: PlacesState, arrivals: Arrivals) -> tuple[PlacesState, Array]:
        place, t = arrivals.place, arrivals.t
        env_id = state.unrolls.env_id[place]
        # The even ones of the keys that are split from an environment's key.
        own = jax.vmap(lambda n, i: jax.random.fold_in(act_key(n), i))(arrivals.unroll, env_id)
        keys = jax.vmap(jax.random.fold_in)(own, 2 * (t % length))
        carry, previous = _rows((state.carry, state.observation), place)
        fresh = (agent.carry(env_id), jax.tree.map(jnp.zeros_like, previous))
        carry, previous = jax.tree.map(
            lambda new, old: _where(arrivals.start, new, old), fresh, (carry, previous)
        )
        arrival = host_arrive(env, previous, arrivals.timestep)
        after, taken, extras = agent.act(weights, carry, arrival, keys)
        state = PlacesState(
            _put(state.carry, place, after),
            _put(state.before, place, carry),
            _put(state.observation, place, arrival.observation),
            _record(state.unrolls, place, t, arrival, taken, extras, carry),
        )
        return state, spaces.to_environment(taken, env.spec.action)

    def take(
        state: PlacesState, filled: Trajectory, place: Array, position: Array
    ) -> tuple[PlacesState, Trajectory]:
        filled = _copy_unrolls(filled, state.unrolls, place, position)
        unrolls = _begin_next(state.unrolls, place, _rows(state.before, place))
        return state.replace(unrolls=unrolls), filled

    return IndependentUnroll(init, allocate, act, take)


def _record(
    unrolls: Trajectory,
    place: Array,
    t: Array,
    timestep: TimeStep,
    action: Array,
    extras: ArrayTree,
    carry: Carry,
) -> Trajectory:
    """The unrolls with step t of these places; ``carry`` is the agent's before this step."""
    timestep, action, extras = jax.tree.map(
        lambda past, x: past.at[place, t].set(x),
        (unrolls.timestep, unrolls.action, unrolls.extras),
        (timestep, action, extras),
    )
    # An unroll keeps the carry before its first step only. That before step T, the first one of the
    # next unroll, is kept in ``PlacesState.before`` until then.
    first = jnp.where(t == 0, place, jnp.iinfo(jnp.int32).max)
    carry = _put(unrolls.carry, first, carry)
    return unrolls.replace(timestep=timestep, action=action, extras=extras, carry=carry)


def _begin_next(unrolls: Trajectory, place: Array, carry: Carry) -> Trajectory:
    """The unrolls after those of these places are complete: step T becomes step 0."""

    def begin(axis: int, x: Array) -> Array:
        return x.at[place, 0].set(x[place, -1]) if axis else x

    unrolls = jax.tree.map(
        lambda axis, tree: jax.tree.map(partial(begin, axis), tree), ENVS_AXIS, unrolls
    )
    return unrolls.replace(carry=_put(unrolls.carry, place, carry))


def _copy_unrolls(
    filled: Trajectory, unrolls: Trajectory, place: Array, position: Array
) -> Trajectory:
    """Unrolls ``[N, T+1, ...]`` at these places, copied to positions of a trajectory."""
    positions = filled.env_id.shape[0]

    # One after the other: XLA's CPU backend would scatter along the second axis one number at a
    # time.
    def copy(k: Array, filled: Trajectory) -> Trajectory:
        def copy_array(axis: int, past: Array, new: Array) -> Array:
            row = lax.dynamic_index_in_dim(new, place[k], 0)
            row = jnp.moveaxis(row, 0, axis)[: past.shape[0]] if axis else row
            old = lax.dynamic_slice_in_dim(past, position[k], 1, axis)
            row = jnp.where(position[k] < positions, row, old)
            return lax.dynamic_update_slice_in_dim(past, row, position[k], axis)

        return jax.tree.map(
            lambda axis, *trees: jax.tree.map(partial(copy_array, axis), *trees),
            ENVS_AXIS,
            filled,
            unrolls,
        )

    return lax.fori_loop(0, place.size, copy, filled)


def _rows(tree: ArrayTree, place: Array) -> ArrayTree:
    return jax.tree.map(lambda x: x[place], tree)


def _put(past: ArrayTree, place: Array, rows: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda past, x: past.at[place].set(x), past, rows)


def _where(condition: Array, new: Array, old: Array) -> Array:
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)
