"""The programs that a run executes, compiled for TPU devices that this machine does not have."""

import dataclasses
import re
import time
from typing import Any, NamedTuple

import jax

from podracer import envs
from podracer.anakin import program as anakin_program
from podracer.anakin.meta import program as meta_program
from podracer.config import Config
from podracer.config.sizes import Sizes, devices_of_group, make_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.errors import ConfigError, unknown
from podracer.plan.chips import Slice
from podracer.sebulba import program as sebulba_program
from podracer.sebulba.setup import make_setup
from podracer.training import builder
from podracer.types import Environment, HostEnvironment

ALL, ACTORS, LEARNERS = "every core", "actor cores", "learner cores"


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
      sizes: sizes of the run over all hosts.
      programs: all programs, in the order in which they are executed.
      shared_devices: whether acting and learning take turns on the same devices.
    """

    sizes: Sizes
    programs: list[TracedProgram]
    shared_devices: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory that a program needs.

    Attributes:
      arguments: its arguments.
      replay: the part of ``arguments`` that is the agent's replay, without padding.
      temporaries: intermediate values.
      outputs: its results.
      aliased: the part of ``outputs`` that reuses the memory of donated arguments.
      code: the program itself.
      total: all of these, with aliased memory counted once.
    """

    arguments: int
    replay: int
    temporaries: int
    outputs: int
    aliased: int
    code: int
    total: int


class OutOfMemory(NamedTuple):
    """The compiler's error for a program that doesn't fit in a device's memory.

    Attributes:
      message: the error message.
      needed: bytes that the program needs; 0 if the message doesn't contain them.
      available: bytes that a device has; 0 if the message doesn't contain them.
    """

    message: str
    needed: float
    available: float


class CompileResult(NamedTuple):
    """A compiled program.

    Attributes:
      program: the program that was compiled.
      text: its optimized HLO.
      memory: the memory that it needs.
      seconds: the time it took to compile.
    """

    program: TracedProgram
    text: str
    memory: Memory
    seconds: float


def resolve_architecture(config: Config, arch: str) -> str:
    """The architecture that a run uses.

    Args:
      config: config of the run.
      arch: "anakin", "meta", "sebulba", or "" for "anakin" or "sebulba", as the environment needs.

    Raises:
      ConfigError: there is no such architecture.
    """
    if not arch:
        return envs.architecture(config.env)
    if arch not in _TRACERS:
        raise unknown("architecture", arch, _TRACERS)
    return arch


def make_env(config: Config, arch: str) -> Environment | HostEnvironment:
    """The environment of a run; one is enough for any number of plans."""
    if arch != "sebulba":
        return builder.make_environment(config)
    settings = (config.env, config.env_kwargs, config.env_params)
    newest = config.sebulba.newest_frame
    return envs.make_host_environment(*settings, observed=config.observed, newest_frame=newest)


def device_splits(config: Config, tpu_slice: Slice) -> list[mesh_lib.Split]:
    """The actor and learner devices of each host of a slice."""
    options = config.sebulba
    return [
        mesh_lib.split(
            host, options.actor_devices, options.learner_devices, options.learners_per_actor
        )
        for host in tpu_slice.hosts
    ]


def num_learner_devices(config: Config, arch: str, tpu_slice: Slice) -> int:
    """The number of devices that learn, over which the environments of an agent are divided; a
    device counts once for each group that averages on it."""
    if arch == "meta":
        return 1
    if arch == "anakin":
        return devices_of_group(config, len(tpu_slice.devices)) * config.averaging.groups
    return sum(len(split.learners) for split in device_splits(config, tpu_slice))


def trace_run(config: Config, arch: str, env: Any, tpu_slice: Slice) -> TracedRun:
    """Traces the programs of a run for a slice without compiling them.

    Args:
      config: config of the run.
      arch: "anakin", "meta" or "sebulba".
      env: the environment, from ``make_env``.
      tpu_slice: the slice.

    Raises:
      ConfigError: sizes don't fit the slice.
    """
    return _TRACERS[arch](config, env, tpu_slice)


def _anakin(config: Config, env: Environment, tpu_slice: Slice) -> TracedRun:
    sizes = make_sizes(config, len(tpu_slice.devices))
    mesh = mesh_lib.make_mesh(tpu_slice.devices, sizes.num_groups)
    program = anakin_program.make_program(config, env, sizes, mesh)
    lowered = program.step.lower(program.state)
    replay = program.memory.replay
    step = TracedProgram("step", ALL, 1 / sizes.updates_per_call, lowered, replay)
    return TracedRun(sizes, [step], True)


def _meta(config: Config, env: Environment, tpu_slice: Slice) -> TracedRun:
    del env  # Agents live in worlds of their own.
    devices = tpu_slice.devices
    mesh = mesh_lib.make_mesh(devices, len(devices))
    program = meta_program.make_program(config, len(devices), mesh)
    lowered = program.step.lower(program.state)
    sizes = program.sizes
    step = TracedProgram("step", ALL, 1 / sizes.updates_per_call, lowered)
    # Those of each agent, as in other plans.
    each = dataclasses.replace(
        sizes,
        num_agents=sizes.learners,
        steps_per_update=sizes.steps_per_update // sizes.learners,
        total_steps=sizes.total_steps // sizes.learners,
    )
    return TracedRun(each, [step], True)


def _sebulba(config: Config, env: HostEnvironment, tpu_slice: Slice) -> TracedRun:
    if config.stagger:
        raise ConfigError(
            f"stagger={config.stagger} is for environments written in JAX; set it to 0"
        )
    hosts = device_splits(config, tpu_slice)
    if len({tuple(map(len, split)) for split in hosts}) > 1:
        raise ConfigError(f"{tpu_slice.topology} has hosts with different numbers of devices")
    learners = [device for split in hosts for device in split.learners]
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
    return TracedRun(setup.sizes, run_programs, shared_devices)


_TRACERS = {"anakin": _anakin, "meta": _meta, "sebulba": _sebulba}


def compile_traced(program: TracedProgram) -> CompileResult | OutOfMemory:
    """Compiles a program for its devices; nothing is loaded or executed."""
    start = time.monotonic()
    try:
        compiled = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return parse_out_of_memory(str(error))
    seconds = time.monotonic() - start
    stats: Any = compiled.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    total = sum(sizes.values()) - 2 * sizes["aliased"]
    memory = Memory(**sizes, replay=program.replay, total=total)
    return CompileResult(program, compiled.as_text() or "", memory, seconds)


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Reads the bytes that are needed and available from a compiler's error message."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number = r"([\d.]+)([KMGT]?)"
    for pattern in (
        rf"\({number}\) exceeds available \w+ \({number}\)",
        rf"Used {number} of {number} (?:hbm|HBM)",
    ):
        found = re.search(pattern, message)
        if found:
            needed, unit, available, unit2 = found.groups()
            return OutOfMemory(
                message, float(needed) * units[unit], float(available) * units[unit2]
            )
    return OutOfMemory(message, 0.0, 0.0)
