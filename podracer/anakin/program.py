"""Anakin's compiled program: environments, acting, loss and update, on all devices at once.

https://arxiv.org/abs/2104.06272, section "Anakin". ``vmap`` fills a device with environments,
``shard_map`` replicates that over the mesh, gradients are averaged over the mesh, and ``scan`` does
many updates in one call. Environments and weights never leave the devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.acting import unroll
from podracer.acting.evaluation import make_evaluation
from podracer.acting.statistics import Episodes
from podracer.config import Config, Sizes
from podracer.distributed import mesh as mesh_lib
from podracer.training import builder, memory
from podracer.training.builder import Components
from podracer.training.loop import CallMetrics
from podracer.training.memory import StateMemory
from podracer.types import Agent, Array, ArrayTree, Device, Environment, TrainState
from podracer.xla_cpu import prng


class AnakinState(struct.PyTreeNode):
    """All state of an Anakin run, which is what a checkpoint holds.

    If several agents learn at once, they are the first axis of every array.

    Attributes:
      train: the learner's state, the same on every device.
      rollout: the environments, sharded over devices.
      source: the state of the agent's ``Source``, sharded with the environments.
      key: the run's random key. It never changes: every other key is folded from it and
        ``train.step``.
    """

    train: TrainState
    rollout: unroll.RolloutState
    source: ArrayTree
    key: Array


def state_specs(num_seeds: int) -> Any:
    """How the state of ``num_seeds`` agents is sharded over the mesh."""
    environments: Any = mesh_lib.SHARDED if num_seeds == 1 else mesh_lib.SHARDED_SECOND
    replicated: Any = mesh_lib.REPLICATED
    return AnakinState(replicated, environments, environments, replicated)


class AnakinProgram(NamedTuple):
    """The jitted functions of a run, and what they were made from.

    Attributes:
      init: ``(key) -> AnakinState``, or ``(keys [num_seeds]) -> AnakinState`` for several agents.
      step: ``(AnakinState) -> (AnakinState, CallMetrics)``, ``updates_per_call`` updates. The state
        is donated: the step reuses its memory.
      evaluate: ``(AnakinState) -> Episodes``.
      env: the environment.
      agent: the agent.
      sizes: the numbers that follow from the configuration.
      mesh: the mesh over all devices.
      state: shapes and shardings of the state.
    """

    init: jax.stages.Wrapped
    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    env: Environment
    agent: Agent
    sizes: Sizes
    mesh: jax.sharding.Mesh
    state: AnakinState

    @property
    def devices(self) -> list[Device]:
        """The devices of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def memory(self) -> StateMemory:
        """The memory of the state."""
        return memory.measure(self.agent.source, self.state, self.mesh)

    @property
    def layout(self) -> dict[str, str]:
        """What runs on which devices, in words."""
        sizes, device = self.sizes, self.devices[0]
        per_device = f"{sizes.num_devices} x {sizes.envs_per_device:,}"
        return {
            "devices": f"{sizes.num_devices} x {device.device_kind} ({device.platform})",
            "environments": f"{sizes.num_envs:,} = {per_device}",
        }


def make_init(
    env: Environment, components: Components, sizes: Sizes, stagger: int
) -> Callable[[Array], AnakinState]:
    """``(key) -> AnakinState`` as each device runs it.

    Args:
      env: the environment.
      components: agent, optimizer and update.
      sizes: the run's sizes.
      stagger: the largest number of random actions before the first step; 0 takes none.
    """

    def init(key: Array) -> AnakinState:
        train = builder.init_train_state(components, key)
        first = mesh_lib.device_index() * sizes.envs_per_device
        env_key = jax.random.fold_in(key, builder.ENVIRONMENTS)
        envs = unroll.reset(
            env, components.agent, env_key, first + jnp.arange(sizes.envs_per_device)
        )
        if stagger:
            stagger_key = jax.random.fold_in(key, builder.STAGGER)
            envs = unroll.stagger(env, envs, stagger_key, stagger)
        act = partial(unroll.unroll, env, components.agent, length=sizes.unroll_length)
        _, trajectory, _ = jax.eval_shape(act, train.weights, envs, key)
        return AnakinState(train, envs, components.agent.source.init(trajectory), key)

    return init


def make_step(
    env: Environment, components: Components, sizes: Sizes, *, whole_episodes: bool
) -> Callable[[AnakinState], tuple[AnakinState, CallMetrics]]:
    """``(AnakinState) -> (AnakinState, CallMetrics)`` as each device runs it.

    Args:
      env: the environment.
      components: agent, optimizer and update.
      sizes: the run's sizes.
      whole_episodes: whether each unroll begins new episodes.
    """

    def one_update(state: AnakinState, _: None) -> tuple[AnakinState, CallMetrics]:
        act_key, update_key = builder.update_keys(state.key, state.train.step)
        envs, trajectory, episodes = unroll.unroll(
            env,
            components.agent,
            state.train.weights,
            state.rollout,
            act_key,
            sizes.unroll_length,
            whole_episodes=whole_episodes,
        )
        train, source, metrics = components.update(
            state.train, state.source, trajectory, update_key
        )
        return AnakinState(train, envs, source, state.key), CallMetrics(metrics, episodes)

    def step(state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        state, metrics = jax.lax.scan(one_update, state, length=sizes.updates_per_call)
        # Losses are already means over devices; episodes are summed here, once for all updates.
        episodes = mesh_lib.all_sum(metrics.episodes)
        return state, metrics._replace(episodes=episodes)

    return step


def make_program(
    config: Config, env: Environment, sizes: Sizes, mesh: jax.sharding.Mesh
) -> AnakinProgram:
    """Builds a run's program.

    Args:
      config: the run's configuration.
      env: the environment.
      sizes: the run's sizes.
      mesh: the mesh over all devices.

    Raises:
      ConfigError: the network does not fit the observations.
    """
    components = builder.build(config, env.spec, sizes)
    play = make_evaluation(env, components.agent, mesh, config.evaluation)

    def evaluate(state: AnakinState) -> Episodes:
        key = builder.evaluation_key(state.key, state.train.step)
        return play(state.train.weights, key)

    replicated, specs = mesh_lib.REPLICATED, state_specs(config.num_seeds)
    init = make_init(env, components, sizes, config.stagger)
    step = make_step(env, components, sizes, whole_episodes=config.whole_episodes)
    if config.num_seeds > 1:
        # One agent after another: jaxlib 0.10 factors batches of matrices, which orthogonal
        # initialisation needs, on the threads that its CPU devices already occupy: a deadlock.
        init = partial(jax.lax.map, init)
        step, evaluate = jax.vmap(step), jax.vmap(evaluate)
    jitted_init = jax.jit(mesh_lib.per_device(init, mesh, replicated, specs))
    keys = prng.keys(config.seeds, mesh.devices.flat[0].platform)
    return AnakinProgram(
        init=jitted_init,
        step=jax.jit(
            mesh_lib.per_device(step, mesh, (specs,), (specs, replicated)), donate_argnums=0
        ),
        evaluate=jax.jit(evaluate),
        env=env,
        agent=components.agent,
        sizes=sizes,
        mesh=mesh,
        state=mesh_lib.sharded_shapes(jax.eval_shape(jitted_init, keys), mesh, specs),
    )
