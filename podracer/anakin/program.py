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
from podracer.config import Config, Sizes, members
from podracer.distributed import mesh as mesh_lib
from podracer.training import builder, memory
from podracer.training.builder import Components
from podracer.training.memory import StateMemory
from podracer.training.rows import CallMetrics
from podracer.types import Agent, Array, ArrayTree, Device, Environment, Leaf, TrainState
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
      settings: the settings in which the agents of a sweep differ, by dotted name; they never
        change.
      alive: ``[]`` bool, false once an agent has diverged, which from then on does not learn; if
        there is only one agent, whose run ends then, ``()``.
    """

    train: TrainState
    rollout: unroll.RolloutState
    source: ArrayTree
    key: Array
    settings: dict[str, Array] = struct.field(default_factory=dict)
    alive: Leaf = ()


def state_specs(num_agents: int) -> Any:
    """How the state of ``num_agents`` agents is sharded over the mesh."""
    environments: Any = mesh_lib.SHARDED if num_agents == 1 else mesh_lib.SHARDED_SECOND
    replicated: Any = mesh_lib.REPLICATED
    return AnakinState(replicated, environments, environments, replicated, replicated, replicated)


class AnakinProgram(NamedTuple):
    """The jitted functions of a run, and what they were made from.

    Attributes:
      init: ``(Start) -> AnakinState``.
      step: ``(AnakinState) -> (AnakinState, CallMetrics)``, ``updates_per_call`` updates. The state
        is donated: the step reuses its memory.
      evaluate: ``(AnakinState) -> Episodes``.
      env: the environment.
      agent: the agent; of several, the first one.
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


class Start(NamedTuple):
    """What an agent begins with, or several agents, which are the first axis then.

    Attributes:
      key: its random key, ``[]``.
      settings: see ``AnakinState``.
    """

    key: Array
    settings: dict[str, Array]


def make_start(config: Config, platform: str = "") -> Start:
    """What the agents of a run begin with; ``platform`` is that of ``prng.key``."""
    agents = config.members
    settings = {
        name: jnp.array([x.settings[name] for x in agents], jnp.float32)
        for name in agents[0].settings
    }
    if len(agents) == 1:
        settings = {name: x[0] for name, x in settings.items()}
    return Start(prng.keys([x.seed for x in agents], platform), settings)


# ``(settings) ->`` agent, optimizer and update of an agent with these settings of its own.
Build = Callable[[dict[str, Array]], Components]


def make_init(
    env: Environment, build: Build, sizes: Sizes, *, stagger: int, several: bool
) -> Callable[[Start], AnakinState]:
    """``(start) -> AnakinState`` as each device runs it, for one agent.

    Args:
      env: the environment.
      build: makes agent, optimizer and update.
      sizes: the run's sizes.
      stagger: the largest number of random actions before the first step; 0 takes none.
      several: whether the agent is one of several.
    """

    def init(start: Start) -> AnakinState:
        key, components = start.key, build(start.settings)
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
        source = components.agent.source.init(trajectory)
        alive = jnp.bool_(True) if several else ()
        return AnakinState(train, envs, source, key, start.settings, alive)

    return init


def _keep_finite(
    old: AnakinState, train: TrainState, losses: dict[str, Array]
) -> tuple[TrainState, Array]:
    """What remains of an update of one of several agents, which is only its number if this update
    or an earlier one has diverged; and whether none has."""
    # Any NaN or infinity in learning appears in these two.
    alive = old.alive & jnp.isfinite(losses["total"]) & jnp.isfinite(losses["grad_norm"])
    kept = jax.tree.map(partial(jnp.where, alive), train, old.train)
    return kept.replace(step=train.step), alive


def make_step(
    env: Environment, build: Build, sizes: Sizes, *, whole_episodes: bool, several: bool
) -> Callable[[AnakinState], tuple[AnakinState, CallMetrics]]:
    """``(AnakinState) -> (AnakinState, CallMetrics)`` as each device runs it, for one agent.

    Args:
      env: the environment.
      build: makes agent, optimizer and update.
      sizes: the run's sizes.
      whole_episodes: whether each unroll begins new episodes.
      several: whether the agent is one of several.
    """

    def one_update(state: AnakinState, _: None) -> tuple[AnakinState, CallMetrics]:
        components = build(state.settings)
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
        alive = state.alive
        if several:
            train, alive = _keep_finite(state, train, metrics.losses)
        state = state.replace(train=train, rollout=envs, source=source, alive=alive)
        return state, CallMetrics(metrics, episodes, alive=alive)

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

    def build(settings: dict[str, Array]) -> Components:
        return builder.build(members.trace(config, settings), env.spec, sizes)

    def evaluate(state: AnakinState) -> Episodes:
        key = builder.evaluation_key(state.key, state.train.step)
        agent = build(state.settings).agent
        return make_evaluation(env, agent, mesh, config.evaluation)(state.train.weights, key)

    start = make_start(config, mesh.devices.flat[0].platform)
    several = sizes.num_agents > 1
    replicated, specs = mesh_lib.REPLICATED, state_specs(sizes.num_agents)
    init = make_init(env, build, sizes, stagger=config.stagger, several=several)
    step = make_step(env, build, sizes, whole_episodes=config.whole_episodes, several=several)
    if several:
        # One agent after another: jaxlib 0.10 factors batches of matrices, which orthogonal
        # initialisation needs, on the threads that its CPU devices already occupy: a deadlock.
        init = partial(jax.lax.map, init)
        step, evaluate = jax.vmap(step), jax.vmap(evaluate)
    jitted_init = jax.jit(mesh_lib.per_device(init, mesh, replicated, specs))
    return AnakinProgram(
        init=jitted_init,
        step=jax.jit(
            mesh_lib.per_device(step, mesh, (specs,), (specs, replicated)), donate_argnums=0
        ),
        evaluate=jax.jit(evaluate),
        env=env,
        agent=builder.build(config.alone(config.members[0]), env.spec, sizes).agent,
        sizes=sizes,
        mesh=mesh,
        state=mesh_lib.sharded_shapes(jax.eval_shape(jitted_init, start), mesh, specs),
    )
