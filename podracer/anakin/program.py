"""Anakin's compiled program: environments, acting, loss and update, on all devices at once.

https://arxiv.org/abs/2104.06272, section "Anakin". ``vmap`` fills a device with environments,
``shard_map`` replicates that over the mesh, gradients are averaged over it, and ``scan`` does many
updates in one host call. Environments and weights never leave the devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer import mesh as mesh_lib
from podracer import parts as parts_lib
from podracer import rollout
from podracer.config import Config, Sizes
from podracer.episodes import Episodes, make_evaluate
from podracer.loop import CallMetrics
from podracer.parts import Parts
from podracer.types import Agent, Array, Environment, TrainState


class State(struct.PyTreeNode):
    """All of an Anakin run: what a checkpoint has to hold.

    Where several agents learn at once, they are the first axis of every array.

    Attributes:
      train: what the learner owns, the same on every device.
      rollout: the environments, sharded over devices.
      key: of the run. Every other key is folded from it and ``train.step``, so that it never
        changes.
    """

    train: TrainState
    rollout: rollout.RolloutState
    key: Array


def state_specs(num_seeds: int) -> Any:
    """How the state of so many agents lies on the mesh."""
    environments = mesh_lib.SHARDED if num_seeds == 1 else mesh_lib.SHARDED_SECOND
    replicated: Any = mesh_lib.REPLICATED
    return State(train=replicated, rollout=environments, key=replicated)  # type: ignore[arg-type]


class Program(NamedTuple):
    """Functions of a whole run, jitted.

    Attributes:
      init: ``(key) -> State``, ``([num_seeds] keys) -> State`` for several agents.
      step: ``(State) -> (State, CallMetrics)``, ``updates_per_call`` updates; states are donated,
        that is, a step reuses the memory of the one it is given.
      evaluate: ``(State) -> Episodes``.
      env: where.
      agent: who acts and learns.
      mesh: over which devices.
    """

    init: jax.stages.Wrapped
    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    env: Environment
    agent: Agent
    mesh: jax.sharding.Mesh


def make_init(
    env: Environment, parts: Parts, sizes: Sizes, stagger: int
) -> Callable[[Array], State]:
    """``(key) -> State`` as each device runs it: environments begin by their global ids."""

    def init(key: Array) -> State:
        train = parts_lib.init_train_state(parts, key)
        first = mesh_lib.device_index() * sizes.envs_per_device
        env_key = jax.random.fold_in(key, parts_lib.ENVIRONMENTS)
        envs = rollout.init(env, parts.agent, env_key, first + jnp.arange(sizes.envs_per_device))
        if stagger:
            stagger_key = jax.random.fold_in(key, parts_lib.STAGGER)
            envs = rollout.stagger(env, envs, stagger_key, stagger)
        return State(train, envs, key)

    return init


def make_step(
    env: Environment, parts: Parts, sizes: Sizes
) -> Callable[[State], tuple[State, CallMetrics]]:
    """``(State) -> (State, CallMetrics)`` as each device runs it."""

    def one_update(state: State, _: None) -> tuple[State, CallMetrics]:
        act_key, update_key = parts_lib.update_keys(state.key, state.train.step)
        envs, trajectory, episodes = rollout.unroll(
            env, parts.agent, state.train.weights, state.rollout, act_key, sizes.unroll_length
        )
        train, losses = parts.update(state.train, trajectory, update_key)
        return State(train, envs, state.key), CallMetrics(losses, episodes)

    def step(state: State) -> tuple[State, CallMetrics]:
        state, metrics = jax.lax.scan(one_update, state, length=sizes.updates_per_call)
        # Losses are means over devices already; these are summed here, once for all updates.
        episodes = mesh_lib.all_sum(metrics.episodes)
        return state, metrics._replace(episodes=episodes)

    return step


def make_program(
    config: Config, env: Environment, sizes: Sizes, mesh: jax.sharding.Mesh
) -> Program:
    """Puts a whole run together.

    Raises:
      ConfigError: the network can't take the observations.
    """
    parts = parts_lib.make(config, env.spec, sizes)
    play = make_evaluate(env, parts.agent, mesh, config.evaluation)

    def evaluate(state: State) -> Episodes:
        key = parts_lib.evaluation_key(state.key, state.train.step)
        return play(state.train.weights, key)

    replicated, specs = mesh_lib.REPLICATED, state_specs(config.num_seeds)
    init = make_init(env, parts, sizes, config.stagger)
    step = make_step(env, parts, sizes)
    if config.num_seeds > 1:
        # One after another: jaxlib 0.10 factors batches of matrices, as orthogonal weights need, on
        # the threads that its devices already hold, and on a CPU they then wait for each other.
        init = partial(jax.lax.map, init)
        step, evaluate = jax.vmap(step), jax.vmap(evaluate)
    return Program(
        init=jax.jit(mesh_lib.per_device(init, mesh, replicated, specs)),
        step=jax.jit(
            mesh_lib.per_device(step, mesh, (specs,), (specs, replicated)), donate_argnums=0
        ),
        evaluate=jax.jit(evaluate),
        env=env,
        agent=parts.agent,
        mesh=mesh,
    )
