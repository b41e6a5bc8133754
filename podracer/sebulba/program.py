"""Sebulba's compiled functions: an update over all learner devices, an actor device's steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer import mesh as mesh_lib
from podracer import parts as parts_lib
from podracer import rollout
from podracer.config import Config
from podracer.learner import Metrics
from podracer.parts import Parts
from podracer.rollout import HostUnroll
from podracer.types import Array, Device, HostEnvironment, TimeStep, TrainState, Trajectory, Weights


class State(struct.PyTreeNode):
    """What Sebulba's learner owns, the same on every learner device.

    Attributes:
      train: weights, optimizer and the number of updates.
      key: of the run.
    """

    train: TrainState
    key: Array


# Time comes first, so environments are the second axis of all but the memory.
_IN_TIME: Any = mesh_lib.SHARDED_SECOND
TRAJECTORY_SPECS = Trajectory(_IN_TIME, _IN_TIME, _IN_TIME, carry=mesh_lib.SHARDED)


def interleave(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Trajectories of K threads as one, their environments in order of their global numbers.

    Thread k steps the environments k, k + K, k + 2K, ... Together with a split of every thread's
    batch into as many parts as there are learners, this gives each learner consecutive numbers: so
    neither the number of learners nor that of threads changes what is in which minibatch.
    """

    def join(axis: int, *xs: Array) -> Array:
        x = jnp.stack(xs, axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    steps = [x.replace(carry=()) for x in trajectories]
    carry = jax.tree.map(lambda *xs: join(0, *xs), *(x.carry for x in trajectories))
    return jax.tree.map(lambda *xs: join(1, *xs), *steps).replace(carry=carry)


class Step(NamedTuple):
    """The update, to be jitted for the learner devices.

    Attributes:
      init: ``(key) -> (State, weights)``.
      update: ``(State, trajectories) -> (State, weights, metrics)``.

    The weights are there to be published: a copy, as the state is donated to the next update.
    """

    init: Any
    update: Any


def copy(weights: Weights) -> Weights:
    """Weights of their own."""
    return jax.tree.map(jnp.copy, weights)


def make_step(parts: Parts, mesh: jax.sharding.Mesh, num_threads: int) -> Step:
    """The learner's functions over a mesh of learner devices, for so many trajectories."""

    def init(key: Array) -> tuple[State, Weights]:
        train = parts_lib.init_train_state(parts, key)
        return State(train, key), copy(train.weights)

    def update(
        state: State, trajectories: tuple[Trajectory, ...]
    ) -> tuple[State, Weights, Metrics]:
        _, update_key = parts_lib.update_keys(state.key, state.train.step)
        train, metrics = parts.update(state.train, interleave(trajectories), update_key)
        return state.replace(train=train), copy(train.weights), metrics

    replicated = mesh_lib.REPLICATED
    return Step(
        mesh_lib.per_device(init, mesh, replicated, (replicated, replicated)),
        mesh_lib.per_device(
            update,
            mesh,
            (replicated, (TRAJECTORY_SPECS,) * num_threads),
            (replicated, replicated, replicated),
        ),
    )


def lower_update(step: Step, state: Any, trajectories: Any) -> jax.stages.Lowered:
    """The update, ready to compile for these arguments, or shapes of them; states are donated."""
    return jax.jit(step.update, donate_argnums=0).lower(state, trajectories)


def make_unroll(
    config: Config, env: HostEnvironment, parts: Parts, key: Array, learners: int
) -> HostUnroll:
    """An actor's functions; ``begin`` takes the number of the unroll in place of its key."""
    functions = rollout.make_host_unroll(env, parts.agent, config.unroll_length, learners)

    def begin(weights: Weights, state: rollout.HostState, n: Array) -> Any:
        act_key, _ = parts_lib.update_keys(key, n)
        return functions.begin(weights, state, act_key)

    return functions._replace(begin=begin)


class ActorShapes(NamedTuple):
    """What an actor's functions take and give."""

    env_ids: Any
    sent: TimeStep
    weights: Weights
    state: rollout.HostState
    number: Any
    recording: rollout.Recording
    parts: tuple[Trajectory, ...]


def actor_shapes(
    functions: HostUnroll, env: HostEnvironment, weights: Any, batch: int
) -> ActorShapes:
    """Shapes of everything on an actor device; found without compiling."""
    env_ids = jax.ShapeDtypeStruct((batch,), np.int32)
    number = jax.ShapeDtypeStruct((), np.int32)
    sent = rollout.sent_shapes(env, batch)
    state = jax.eval_shape(functions.start, env_ids, sent)
    recording, _ = jax.eval_shape(functions.begin, weights, state, number)
    _, parts = jax.eval_shape(functions.close, recording, sent)
    return ActorShapes(env_ids, sent, weights, state, number, recording, parts)


def lower_unroll(functions: HostUnroll, shapes: ActorShapes, device: Device) -> HostUnroll:
    """An actor's functions, ready to compile for its device; recordings are donated."""
    on = jax.sharding.SingleDeviceSharding(device)
    placed: ActorShapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes
    )

    # A single part is the recording itself; several are copies.
    whole = (0,) if len(shapes.parts) == 1 else ()

    def lower(function: Any, donate: tuple[int, ...], *arguments: Any) -> Any:
        return jax.jit(function, donate_argnums=donate).lower(*arguments)

    return HostUnroll(
        lower(functions.start, (), placed.env_ids, placed.sent),
        lower(functions.begin, (), placed.weights, placed.state, placed.number),
        lower(functions.act, (1,), placed.weights, placed.recording, placed.sent),
        lower(functions.close, whole, placed.recording, placed.sent),
    )


def compile_unroll(functions: HostUnroll, shapes: ActorShapes, device: Device) -> HostUnroll:
    """Compiles an actor's functions for its device."""
    lowered: Any = lower_unroll(functions, shapes, device)
    return HostUnroll(*(function.compile() for function in lowered))
