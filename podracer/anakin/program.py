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

from podracer.acting import unroll
from podracer.acting.evaluation import make_evaluation
from podracer.acting.statistics import Episodes
from podracer.anakin.averaging import average_groups, init_groups
from podracer.anakin.selection import make_select
from podracer.anakin.state import AnakinState, Start, make_start, state_specs
from podracer.config import Config, members
from podracer.config.sizes import Sizes
from podracer.distributed import mesh as mesh_lib
from podracer.learning.selection import no_scores
from podracer.training import builder, memory
from podracer.training.builder import Components
from podracer.training.memory import StateMemory
from podracer.training.rows import CallMetrics
from podracer.types import Agent, Array, Device, Devices, Environment, TrainState


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
        groups = sizes.num_groups
        devices = {"devices": f"{sizes.num_devices} x {device.device_kind} ({device.platform})"}
        in_group = sizes.num_devices // groups
        number = in_group * sizes.envs_per_device
        environments = f"{number:,} = {in_group} x {sizes.envs_per_device:,}"
        if sizes.learners == 1:
            return {**devices, "environments": environments}
        each, at_once = sizes.learners // groups, sizes.agents_at_once
        turns = "" if at_once == each else f", {at_once:,} at a time"
        what = "agent" if sizes.num_agents > 1 else "averaged group"
        return {
            **devices,
            f"{what}s": f"{sizes.learners:,} = {groups} x {each:,}, by groups of devices{turns}",
            "environments": f"{environments}, for each {what}",
        }


# ``(settings, devices) ->`` agent, optimizer and update of an agent with these settings of its own.
Build = Callable[[dict[str, Array], Devices], Components]


def make_init(
    env: Environment, build: Build, sizes: Sizes, *, stagger: int, selects: bool
) -> Callable[..., AnakinState]:
    """``(start, group) -> AnakinState`` as each device runs it, for one agent, or for one of the
    groups that average, of which this is the number.

    Args:
      env: the environment.
      build: makes agent, optimizer and update.
      sizes: the run's sizes.
      stagger: the largest number of random actions before the first step; 0 takes none.
      selects: whether agents copy others, see ``anakin.selection``.
    """

    def init(start: Start, group: Array | int = 0) -> AnakinState:
        key, components = start.key, build(start.settings, builder.DEVICES)
        train = builder.init_train_state(components, key)
        in_group = sizes.num_devices // sizes.num_groups
        first = (group * in_group + mesh_lib.device_index()) * sizes.envs_per_device
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
        alive = jnp.bool_(True) if sizes.num_agents > 1 else ()
        scores = no_scores(train.step) if selects else ()
        return AnakinState(train, envs, source, key, start.settings, alive, scores)

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
    env: Environment, build: Build, sizes: Sizes, updates: int, *, whole_episodes: bool
) -> Callable[[AnakinState], tuple[AnakinState, CallMetrics]]:
    """``(AnakinState) -> (AnakinState, CallMetrics)`` as each device runs it, for one learner.

    Args:
      env: the environment.
      build: makes agent, optimizer and update.
      sizes: the run's sizes.
      updates: number of updates.
      whole_episodes: whether each unroll begins new episodes.
    """
    several = sizes.learners > 1

    def one_update(state: AnakinState, _: None) -> tuple[AnakinState, CallMetrics]:
        # The number of this device among all that collect for the agent, as its environments have.
        number = state.rollout.env_id[0] // sizes.envs_per_device
        components = build(state.settings, builder.DEVICES._replace(number=lambda: number))
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
        state, metrics = jax.lax.scan(one_update, state, length=updates)
        # Losses are already means over devices; episodes are summed here, once for all updates.
        episodes = mesh_lib.all_sum(metrics.episodes)
        if not isinstance(state.scores, tuple):
            state = state.replace(scores=state.scores.add(episodes.episodes, episodes.ret))
        return state, metrics._replace(episodes=episodes)

    return step


def _of_several(init: Callable[[Start], AnakinState]) -> Callable[[Start], AnakinState]:
    """The initial state of the agents of a device's group, of what all agents begin with."""

    def init_own(starts: Start) -> AnakinState:
        # One agent after another: jaxlib 0.10 factors batches of matrices, which orthogonal
        # initialisation needs, on the threads that its CPU devices already occupy: a deadlock.
        return jax.lax.map(init, mesh_lib.own_agents(starts))

    return init_own


def _in_turns(
    step: Callable[[AnakinState], tuple[AnakinState, CallMetrics]], at_once: int
) -> Callable[[AnakinState], tuple[AnakinState, CallMetrics]]:
    """The step of all agents of a device, by steps of ``at_once`` of them."""

    # The state is changed where it is: what `jax.lax.map` does would need its memory twice.
    def turn(state: AnakinState, first: Array) -> tuple[AnakinState, CallMetrics]:
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, at_once), state)
        own, metrics = step(own)

        def put(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new, first, 0)

        return jax.tree.map(put, state, own), metrics

    def step_agents(state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        agents = state.key.shape[0]
        if agents == at_once:
            return step(state)
        state, metrics = jax.lax.scan(turn, state, jnp.arange(0, agents, at_once))
        return state, jax.tree.map(lambda x: x.reshape(agents, *x.shape[2:]), metrics)

    return step_agents


def _make_functions(
    config: Config, env: Environment, build: Build, sizes: Sizes
) -> tuple[Callable[[Start], AnakinState], Callable[[AnakinState], Any]]:
    """The initial state and the step of a call, as each device runs them."""
    several, averages = sizes.num_agents > 1, sizes.learners > sizes.num_agents
    selects = config.selection.every > 0
    init = make_init(env, build, sizes, stagger=config.stagger, selects=selects)
    updates = config.averaging.every if averages else sizes.updates_per_call
    step = make_step(env, build, sizes, updates, whole_episodes=config.whole_episodes)
    if sizes.learners > 1:
        step = _in_turns(jax.vmap(step), sizes.agents_at_once)
    if averages:
        init = init_groups(init, config.averaging)
        step = average_groups(step, config.averaging, sizes.updates_per_call // updates)
    if not several:
        return init, step
    drawn_from = members.distributions(config.sweep) if selects else {}
    select = make_select(config.selection, drawn_from, sizes.num_updates)

    # What the host reads is the same on every device.
    def step_all(state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        state, metrics = step(state)
        if selects:
            state, selected = select(state)
            metrics = metrics._replace(selected=selected)
        return state, mesh_lib.gather_agents(metrics)

    return _of_several(init), step_all


def _make_evaluate(
    config: Config, env: Environment, build: Build, sizes: Sizes
) -> Callable[[AnakinState], Episodes]:
    """The evaluation, as each device runs it."""
    in_group = sizes.num_devices // sizes.num_groups

    def evaluate(state: AnakinState) -> Episodes:
        key = builder.evaluation_key(state.key, state.train.step)
        agent = build(state.settings, builder.DEVICES).agent
        play = make_evaluation(env, agent, in_group, config.evaluation)
        return play(state.train.weights, key)

    def evaluate_all(state: AnakinState) -> Episodes:
        episodes = jax.lax.map(evaluate, state, batch_size=sizes.agents_at_once)
        return mesh_lib.gather_agents(episodes)

    return evaluate_all if sizes.num_agents > 1 else evaluate


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
    own = config.of_group

    def build(settings: dict[str, Array], devices: Devices) -> Components:
        return builder.build(members.trace(own, settings), env.spec, sizes, devices)

    start = make_start(config, mesh.devices.flat[0].platform)
    init, step = _make_functions(config, env, build, sizes)
    evaluate = _make_evaluate(config, env, build, sizes)
    specs, replicated = state_specs(sizes), mesh_lib.REPLICATED
    jitted_init = jax.jit(mesh_lib.per_device(init, mesh, replicated, specs))
    return AnakinProgram(
        init=jitted_init,
        step=jax.jit(
            mesh_lib.per_device(step, mesh, (specs,), (specs, replicated)), donate_argnums=0
        ),
        evaluate=jax.jit(mesh_lib.per_device(evaluate, mesh, (specs,), replicated)),
        env=env,
        agent=builder.build(config.alone(config.members[0]), env.spec, sizes).agent,
        sizes=sizes,
        mesh=mesh,
        state=mesh_lib.sharded_shapes(jax.eval_shape(jitted_init, start), mesh, specs),
    )
