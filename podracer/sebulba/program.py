"""Sebulba's compiled functions: the update over all learner devices, and acting on one device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer.acting import host_unroll
from podracer.acting.host_unroll import ActorState, HostUnroll, UnrollState
from podracer.acting.independent_unroll import Arrivals, make_independent_unroll
from podracer.config import Config
from podracer.distributed import mesh as mesh_lib
from podracer.learning.learner import Metrics
from podracer.training import builder
from podracer.training.builder import Components
from podracer.types import (
    ENVS_AXIS,
    Array,
    ArrayTree,
    Device,
    HostEnvironment,
    TimeStep,
    TrainState,
    Trajectory,
    Weights,
)


class SebulbaState(struct.PyTreeNode):
    """The learner's state.

    Attributes:
      train: weights, optimizer state and the number of updates, the same on every learner device.
      source: the state of the agent's ``Source``, sharded with the environments.
      key: the run's random key.
    """

    train: TrainState
    source: ArrayTree
    key: Array


_REPLICATED: Any = mesh_lib.REPLICATED
STATE_SPECS = SebulbaState(_REPLICATED, mesh_lib.SHARDED, _REPLICATED)
TRAJECTORY_SPECS: Any = jax.tree.map(
    lambda axis: (mesh_lib.SHARDED, mesh_lib.SHARDED_SECOND)[axis], ENVS_AXIS
)


def interleave(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Joins the trajectories of K threads, with environments in order of their global numbers.

    Thread k steps the environments k, k + K, k + 2K, ... Because every thread's batch is split into
    as many parts as there are learner devices, each learner device receives consecutive numbers.
    Neither the number of learner devices nor that of threads therefore changes which transitions a
    minibatch contains.
    """

    def join(axis: int, *xs: Array) -> Array:
        x = jnp.stack(xs, axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return jax.tree.map(
        lambda axis, *xs: jax.tree.map(partial(join, axis), *xs), ENVS_AXIS, *trajectories
    )


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Joins trajectories one after the other: those of remote environments, of which one may have
    unrolls in several, in the order in which it completed them."""

    def join(axis: int, *xs: Array) -> Array:
        return jnp.concatenate(xs, axis)

    return jax.tree.map(
        lambda axis, *xs: jax.tree.map(partial(join, axis), *xs), ENVS_AXIS, *trajectories
    )


class LearnerFunctions(NamedTuple):
    """The learner's functions, to be jitted for the learner devices.

    Attributes:
      init: ``(key) -> SebulbaState``.
      update: ``(SebulbaState, trajectories) -> (SebulbaState, weights, metrics)``. The weights to
        publish are a copy of those in the state, which is donated to the next update.
    """

    init: Any
    update: Any


def copy_weights(weights: Weights) -> Weights:
    """A copy of the weights in separate memory."""
    return jax.tree.map(jnp.copy, weights)


def make_learner_functions(
    components: Components,
    mesh: jax.sharding.Mesh,
    parts: Sequence[Trajectory],
    join: Callable[[Sequence[Trajectory]], Trajectory] = interleave,
) -> LearnerFunctions:
    """The learner's functions.

    Args:
      components: agent, optimizer and update.
      mesh: the mesh over all learner devices.
      parts: shapes of the trajectories that a learner device receives for an update.
    """
    trajectory = jax.eval_shape(join, parts)

    def init(key: Array) -> SebulbaState:
        train = builder.init_train_state(components, key)
        return SebulbaState(train, components.agent.source.init(trajectory), key)

    def update(
        state: SebulbaState, trajectories: tuple[Trajectory, ...]
    ) -> tuple[SebulbaState, Weights, Metrics]:
        _, update_key = builder.update_keys(state.key, state.train.step)
        train, source, metrics = components.update(
            state.train, state.source, join(trajectories), update_key
        )
        return SebulbaState(train, source, state.key), copy_weights(train.weights), metrics

    return LearnerFunctions(
        mesh_lib.per_device(init, mesh, _REPLICATED, STATE_SPECS),
        mesh_lib.per_device(
            update,
            mesh,
            (STATE_SPECS, (TRAJECTORY_SPECS,) * len(parts)),
            (STATE_SPECS, _REPLICATED, _REPLICATED),
        ),
    )


def lower_update(functions: LearnerFunctions, state: Any, trajectories: Any) -> jax.stages.Lowered:
    """The update, lowered for these arguments or their shapes; the state is donated."""
    return jax.jit(functions.update, donate_argnums=0).lower(state, trajectories)


def make_actor_functions(
    config: Config, env: HostEnvironment, components: Components, key: Array, num_learners: int
) -> HostUnroll:
    """An actor's functions; ``begin`` takes the unroll's number in place of its key.

    Args:
      config: the run's configuration.
      env: the environment.
      components: agent, optimizer and update.
      key: the run's random key.
      num_learners: number of learner devices of a host, for which trajectories are split.
    """
    functions = host_unroll.make_host_unroll(
        env, components.agent, config.unroll_length, num_learners
    )

    def begin(weights: Weights, state: ActorState, n: Array) -> Any:
        act_key, _ = builder.update_keys(key, n)
        return functions.begin(weights, state, act_key)

    return functions._replace(begin=begin)


class ActorShapes(NamedTuple):
    """Shapes and dtypes of what an actor's functions take and return.

    Attributes:
      env_ids: ``[B]``, the environments' global numbers.
      arrival: a time step ``[B, ...]`` as it is transferred to the device.
      weights: the weights to act with.
      state: the state between two unrolls.
      number: ``[]``, the unroll's number.
      unroll: the unfinished unroll.
      parts: the trajectory, one part for each learner device.
    """

    env_ids: Any
    arrival: TimeStep
    weights: Weights
    state: ActorState
    number: Any
    unroll: UnrollState
    parts: tuple[Trajectory, ...]


def actor_shapes(
    functions: HostUnroll, env: HostEnvironment, weights: Any, batch: int
) -> ActorShapes:
    """The shapes of everything on an actor device, without compiling.

    Args:
      functions: the actor's functions.
      env: the environment.
      weights: shapes of the weights.
      batch: number of environments of an actor thread.
    """
    env_ids = jax.ShapeDtypeStruct((batch,), np.int32)
    number = jax.ShapeDtypeStruct((), np.int32)
    arrival = host_unroll.transfer_shapes(env, batch)
    state = jax.eval_shape(functions.start, env_ids, arrival)
    unroll, _ = jax.eval_shape(functions.begin, weights, state, number)
    _, parts = jax.eval_shape(functions.close, unroll, arrival)
    return ActorShapes(env_ids, arrival, weights, state, number, unroll, parts)


def lower_actor(functions: HostUnroll, shapes: ActorShapes, device: Device) -> HostUnroll:
    """An actor's functions, lowered for its device; unfinished unrolls are donated."""
    on_device = jax.sharding.SingleDeviceSharding(device)
    placed: ActorShapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), shapes
    )
    # With a single learner device the trajectory is the unroll's own memory; parts are copies.
    donated = (0,) if len(shapes.parts) == 1 else ()

    def lower(function: Any, donate: tuple[int, ...], *arguments: Any) -> Any:
        return jax.jit(function, donate_argnums=donate).lower(*arguments)

    return HostUnroll(
        lower(functions.start, (), placed.env_ids, placed.arrival),
        lower(functions.begin, (), placed.weights, placed.state, placed.number),
        lower(functions.act, (1,), placed.weights, placed.unroll, placed.arrival),
        lower(functions.close, donated, placed.unroll, placed.arrival),
    )


def compile_actor(functions: HostUnroll, shapes: ActorShapes, device: Device) -> HostUnroll:
    """Compiles an actor's functions for its device."""
    lowered: Any = lower_actor(functions, shapes, device)
    return HostUnroll(*(function.compile() for function in lowered))


class CompiledIndependent(NamedTuple):
    """Acting in independent environments, compiled for an actor device.

    Batches are filled up to one of a few sizes, so that nothing is compiled during a run.

    Attributes:
      init: see ``IndependentUnroll``.
      allocate: see ``IndependentUnroll``.
      act: by the number of rows.
      take: by the number of rows.
      length: steps of an unroll (T).
      unrolls: unrolls of a trajectory that a learner device receives.
    """

    init: Any
    allocate: Any
    act: dict[int, Any]
    take: dict[int, Any]
    length: int
    unrolls: int

    @property
    def most(self) -> int:
        """The largest number of rows."""
        return max(self.act)

    def size(self, rows: int) -> int:
        """The smallest compiled size for this number of rows."""
        return min(size for size in self.act if size >= rows)


def batch_sizes(most: int) -> list[int]:
    """The sizes to compile for batches of at most ``most`` rows: this number, halved up to three
    times."""
    return sorted({-(-most // 2**i) for i in range(4)})


def compile_independent(
    env: HostEnvironment,
    components: Components,
    key: Array,
    shapes: ActorShapes,
    device: Device,
    *,
    places: int,
    batch: int,
) -> CompiledIndependent:
    """Compiles acting in independent environments for an actor device.

    Args:
      env: the environment.
      components: agent, optimizer and update.
      key: the run's random key.
      shapes: of an actor thread with environments of its own.
      device: the actor device.
      places: places of an actor thread.
      batch: most environments that are acted on at once.
    """
    trajectory = shapes.parts[0]
    functions = make_independent_unroll(
        env, components.agent, lambda n: builder.update_keys(key, n)[0], trajectory
    )
    on_device = jax.sharding.SingleDeviceSharding(device)

    def compiled(function: Any, donate: tuple[int, ...], *arguments: Any) -> Any:
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), arguments
        )
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=on_device)
        return jitted.lower(*placed).compile()

    def numbers(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows,), np.int32)

    state = jax.eval_shape(functions.init, numbers(places))

    def act(rows: int) -> Any:
        starts = jax.ShapeDtypeStruct((rows,), np.bool_)
        timestep = host_unroll.transfer_shapes(env, rows)
        arrivals = Arrivals(numbers(rows), numbers(rows), numbers(rows), starts, timestep)
        return compiled(functions.act, (1,), shapes.weights, state, arrivals)

    def take(rows: int) -> Any:
        return compiled(functions.take, (0, 1), state, trajectory, numbers(rows), numbers(rows))

    sizes = batch_sizes(min(batch, places))
    length, unrolls = trajectory.action.shape[:2]
    return CompiledIndependent(
        compiled(functions.init, (), numbers(places)),
        compiled(functions.allocate, ()),
        {rows: act(rows) for rows in sizes},
        {rows: take(rows) for rows in sizes},
        length,
        unrolls,
    )
