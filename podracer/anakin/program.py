"""Anakin's compiled program: environments, acting, loss and update, on all devices at once.

https://arxiv.org/abs/2104.06272, section "Anakin". ``vmap`` fills a device with environments,
``shard_map`` replicates that over the mesh, gradients are averaged over it, and ``scan`` does many
updates in one host call. Environments and weights never leave the devices.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from podracer import mesh as mesh_lib
from podracer import rollout
from podracer.agents import AGENTS
from podracer.config import Config, Sizes
from podracer.evaluate import Episodes, make_evaluate
from podracer.learner import Update, make_optimizer, make_update
from podracer.loop import CallMetrics
from podracer.nets import actor_critic
from podracer.types import Agent, Array, Environment, TrainState


class State(struct.PyTreeNode):
    """All of an Anakin run: what a checkpoint has to hold.

    Attributes:
      train: what the learner owns, the same on every device.
      rollout: the environments, sharded over devices.
      key: of the run. Every other key is folded from it and ``train.step``, so that it never
        changes.
    """

    train: TrainState
    rollout: rollout.RolloutState
    key: Array


class Program(NamedTuple):
    """Functions of a whole run, to be jitted.

    Attributes:
      init: ``(key) -> State``.
      step: ``(State) -> (State, CallMetrics)``, ``updates_per_call`` updates.
      evaluate: ``(State) -> Episodes``.
      env: where.
      agent: who acts and learns.
    """

    init: Callable[[Array], State]
    step: Callable[[State], tuple[State, CallMetrics]]
    evaluate: Callable[[State], Episodes]
    env: Environment
    agent: Agent


# What the run's key is folded with, for each use of its own.
WEIGHTS, ENVIRONMENTS, STAGGER, UPDATES, EVALUATION = range(5)


def make_init(
    env: Environment,
    agent: Agent,
    optimizer: optax.GradientTransformation,
    sizes: Sizes,
    stagger: int,
) -> Callable[[Array], State]:
    """``(key) -> State`` as each device runs it: environments begin by their global ids."""

    def init(key: Array) -> State:
        weights = agent.init(jax.random.fold_in(key, WEIGHTS))
        train = TrainState(weights, (), optimizer.init(weights.params), jnp.int32(0))
        first = mesh_lib.device_index() * sizes.envs_per_device
        env_key = jax.random.fold_in(key, ENVIRONMENTS)
        envs = rollout.init(env, agent, env_key, first + jnp.arange(sizes.envs_per_device))
        if stagger:
            envs = rollout.stagger(env, envs, jax.random.fold_in(key, STAGGER), stagger)
        return State(train, envs, key)

    return init


def make_step(
    env: Environment, agent: Agent, update: Update, sizes: Sizes
) -> Callable[[State], tuple[State, CallMetrics]]:
    """``(State) -> (State, CallMetrics)`` as each device runs it."""

    def one_update(state: State, _: None) -> tuple[State, CallMetrics]:
        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATES), state.train.step)
        act_key, update_key = jax.random.split(key)
        envs, trajectory, episodes = rollout.unroll(
            env, agent, state.train.weights, state.rollout, act_key, sizes.unroll_length
        )
        train, losses = update(state.train, trajectory, update_key)
        return State(train, envs, state.key), CallMetrics(losses, episodes)

    def step(state: State) -> tuple[State, CallMetrics]:
        state, metrics = jax.lax.scan(one_update, state, length=sizes.updates_per_call)
        # Losses are means over devices already; these are summed up here, once for all updates.
        return state, metrics._replace(episodes=mesh_lib.all_mean(metrics.episodes))

    return step


def make_program(
    config: Config, env: Environment, sizes: Sizes, mesh: jax.sharding.Mesh
) -> Program:
    """Puts environment, network, agent, optimizer and learner together.

    Raises:
      ConfigError: the network can't take the observations.
    """
    network = actor_critic.make(env.spec, config.network)
    agent = AGENTS[config.agent](
        env.spec, network, config.actor_critic, getattr(config, config.agent), mesh_lib.all_mean
    )
    optimizer = make_optimizer(config.learner, sizes.num_updates)
    update = make_update(
        agent,
        optimizer,
        config.learner,
        all_mean=mesh_lib.all_mean,
        device_index=mesh_lib.device_index,
    )
    play = make_evaluate(env, agent, mesh, config.evaluation)

    def evaluate(state: State) -> Episodes:
        key = jax.random.fold_in(jax.random.fold_in(state.key, EVALUATION), state.train.step)
        return play(state.train.weights, key)

    replicated, sharded = mesh_lib.REPLICATED, mesh_lib.SHARDED
    specs = State(train=replicated, rollout=sharded, key=replicated)  # type: ignore[arg-type]
    init = make_init(env, agent, optimizer, sizes, config.stagger)
    step = make_step(env, agent, update, sizes)
    return Program(
        init=mesh_lib.per_device(init, mesh, replicated, specs),
        step=mesh_lib.per_device(step, mesh, (specs,), (specs, replicated)),
        evaluate=evaluate,
        env=env,
        agent=agent,
    )
