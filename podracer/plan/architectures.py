"""The architectures, each with the programs that its runs execute on a slice."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer import envs
from podracer.anakin import program as anakin_program
from podracer.anakin.meta import program as meta_program
from podracer.config import Config
from podracer.config.sizes import Sizes, devices_of_group, make_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.errors import ConfigError, unknown
from podracer.plan.chips import Slice
from podracer.sebulba import program as sebulba_program
from podracer.sebulba.setup import make_environment as make_host_environment
from podracer.sebulba.setup import make_setup
from podracer.training import builder
from podracer.types import Environment, HostEnvironment

ALL, ACTORS, LEARNERS = "every core", "actor cores", "learner cores"
NOT_INCLUDED = (
    "host time between calls, metrics and evaluation",
    "latency of collectives (only their bytes are counted)",
    "the network between slices",
)


class TracedProgram(NamedTuple):
    """A traced program of a run.

    Attributes:
      name: name of the function.
      where: which devices execute it: ``ALL``, ``ACTORS`` or ``LEARNERS``.
      calls: number of calls on each of these devices per update of the run.
      lowered: the program, ready to compile.
      replay: bytes of the agent's replay on each of these devices, one of the arguments.
    """

    name: str
    where: str
    calls: float
    lowered: jax.stages.Lowered
    replay: int = 0


class TracedRun(NamedTuple):
    """The programs of a run on a slice.

    Attributes:
      sizes: sizes of the run over all hosts; steps are those of each agent.
      gradient_steps: gradient steps per update of an agent, or of the rule that agents learn.
      at_once: how many agents learn at the same time on a device, by the key of the setting that
        says it; empty if it is always one.
      programs: all programs, in the order in which they are executed.
      shared_devices: whether acting and learning take turns on the same devices.
    """

    sizes: Sizes
    gradient_steps: int
    at_once: dict[str, int]
    programs: list[TracedProgram]
    shared_devices: bool


class Architecture(NamedTuple):
    """What a plan needs to know of an architecture.

    Attributes:
      name: its name, as ``--arch`` has it.
      make_env: makes a config's environment; one is enough for any number of slices.
      num_learner_devices: the number of devices of a slice that learn, over which the environments
        of an agent are divided; a device counts once for each group that averages on it.
      trace: traces the programs of a run for a slice, with this environment, without compiling
        them. Raises ``ConfigError`` if sizes don't fit the slice.
      not_included: what an estimate of its speed leaves out.
    """

    name: str
    make_env: Callable[[Config], Any]
    num_learner_devices: Callable[[Config, Slice], int]
    trace: Callable[[Config, Any, Slice], TracedRun]
    not_included: tuple[str, ...] = NOT_INCLUDED


def resolve(config: Config, name: str) -> Architecture:
    """The architecture that a run uses.

    Args:
      config: config of the run.
      name: "anakin", "meta", "sebulba", or "" for "anakin" or "sebulba", as the environment needs.

    Raises:
      ConfigError: there is no such architecture.
    """
    known = {each.name: each for each in (ANAKIN, META, SEBULBA)}
    name = name or envs.architecture(config.env)
    if name not in known:
        raise unknown("architecture", name, known)
    return known[name]


def _trace_anakin(config: Config, env: Environment, tpu_slice: Slice) -> TracedRun:
    sizes = make_sizes(config, len(tpu_slice.devices))
    mesh = mesh_lib.make_mesh(tpu_slice.devices, sizes.num_groups)
    program = anakin_program.make_program(config, env, sizes, mesh)
    lowered = program.step.lower(program.state)
    replay = program.memory.replay
    step = TracedProgram("step", ALL, 1 / sizes.updates_per_call, lowered, replay)
    at_once = {"agents_at_once": sizes.agents_at_once} if sizes.agents_at_once > 1 else {}
    return TracedRun(sizes, config.gradient_steps.per_update, at_once, [step], True)


ANAKIN = Architecture(
    name="anakin",
    make_env=builder.make_environment,
    num_learner_devices=lambda config, tpu_slice: (
        devices_of_group(config, len(tpu_slice.devices)) * config.averaging.groups
    ),
    trace=_trace_anakin,
)


def _trace_meta(config: Config, env: None, tpu_slice: Slice) -> TracedRun:
    del env
    devices = tpu_slice.devices
    mesh = mesh_lib.make_mesh(devices, len(devices))
    program = meta_program.make_program(config, len(devices), mesh)
    lowered = program.step.lower(program.state)
    sizes = program.sizes
    step = TracedProgram("step", ALL, 1 / sizes.updates_per_call, lowered)
    each = dataclasses.replace(
        sizes,
        num_agents=sizes.learners,
        steps_per_update=sizes.steps_per_update // sizes.learners,
        total_steps=sizes.total_steps // sizes.learners,
    )
    return TracedRun(each, 1, {"lpg.agents": sizes.learners}, [step], True)


META = Architecture(
    name="meta",
    # Each agent has a grid world of its own, which the program makes.
    make_env=lambda config: None,
    num_learner_devices=lambda config, tpu_slice: 1,
    trace=_trace_meta,
)


def _device_splits(config: Config, tpu_slice: Slice) -> list[mesh_lib.Split]:
    """The actor and learner devices of each host of a slice."""
    options = config.sebulba
    devices = options.actor_devices, options.learner_devices, options.learners_per_actor
    return [mesh_lib.split(host, *devices) for host in tpu_slice.hosts]


def _trace_sebulba(config: Config, env: HostEnvironment, tpu_slice: Slice) -> TracedRun:
    hosts = _device_splits(config, tpu_slice)
    if len({tuple(map(len, split)) for split in hosts}) > 1:
        raise ConfigError(f"{tpu_slice.topology} has hosts with different numbers of devices")
    # The first devices of a slice stand in for its learners: for v5e and v6e, the compiler refuses
    # programs on a part of each host.
    slices = np.array(tpu_slice.devices).reshape(tpu_slice.num_slices, -1)
    per_slice = sum(len(split.learners) for split in hosts) // tpu_slice.num_slices
    learners = list(slices[:, :per_slice].flat)
    setup = make_setup(config, env, hosts[0], learners)
    update = sebulba_program.lower_update(
        setup.learner_functions, setup.state, setup.trajectory_shapes()
    )
    actor: Any = sebulba_program.lower_actor(
        setup.actor_functions, setup.actor_shapes, hosts[0].actors[0]
    )
    threads = config.sebulba.threads
    run_programs = [
        # The first step of an unroll is a program of its own, which also draws all keys; it is
        # counted like the other steps.
        TracedProgram("act", ACTORS, threads * config.unroll_length, actor.act),
        TracedProgram("close", ACTORS, threads, actor.close),
        TracedProgram("update", LEARNERS, 1, update, setup.memory.replay),
    ]
    shared_devices = bool(set(hosts[0].actors) & set(hosts[0].learners))
    return TracedRun(
        setup.sizes, config.gradient_steps.per_update, {}, run_programs, shared_devices
    )


SEBULBA = Architecture(
    name="sebulba",
    make_env=make_host_environment,
    num_learner_devices=lambda config, tpu_slice: sum(
        len(split.learners) for split in _device_splits(config, tpu_slice)
    ),
    trace=_trace_sebulba,
    not_included=(
        *NOT_INCLUDED,
        "environments on the host, and transfers between host and devices",
        "waiting between programs: for the unrolls of other threads, and for new weights",
    ),
)
