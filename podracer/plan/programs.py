"""The programs of a run, compiled for devices that are not there: the very ones that train."""

import dataclasses
import re
import time
from typing import Any, NamedTuple

import jax

from podracer import config as config_lib
from podracer import envs, prng
from podracer import mesh as mesh_lib
from podracer.anakin import program as anakin_program
from podracer.config import Config, Sizes
from podracer.errors import ConfigError, unknown
from podracer.plan.chips import Slice
from podracer.sebulba import program as sebulba_program
from podracer.sebulba.train import make_run
from podracer.types import Environment, HostEnvironment

ARCHITECTURES = ("anakin", "sebulba")
ALL, ACTORS, LEARNERS = "every core", "actor cores", "learner cores"


class Piece(NamedTuple):
    """One program of a run, ready to compile.

    Attributes:
      name: of the function.
      where: which devices run it.
      calls: of it on each of these, for one update of the run.
      lowered: what compiles.
    """

    name: str
    where: str
    calls: float
    lowered: jax.stages.Lowered


class Layout(NamedTuple):
    """A run on a slice.

    Attributes:
      sizes: of the run, over all hosts.
      pieces: its programs.
      shared: what acts and what learns is on the same devices, one after the other.
    """

    sizes: Sizes
    pieces: list[Piece]
    shared: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device that a program needs.

    Attributes:
      arguments: what it is given.
      temporaries: what it needs while it runs.
      outputs: what it gives.
      aliased: of these, those that take the place of donated arguments.
      code: of the program itself.
      total: of all.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    code: int
    total: int


class TooLarge(NamedTuple):
    """The compiler refused: bytes that are needed, and those that there are; 0 if not said."""

    message: str
    needed: float
    available: float


class Compiled(NamedTuple):
    """A program, compiled: its text, its memory, and how long it took."""

    piece: Piece
    text: str
    memory: Memory
    seconds: float


def architecture(config: Config, arch: str) -> str:
    """Which architecture trains on a config's environment, unless it is said.

    Raises:
      ConfigError: there is no such architecture.
    """
    if not arch:
        suite = config.env.partition(":")[0]
        return "sebulba" if suite in envs.HOST_SUITES and suite not in envs.SUITES else "anakin"
    if arch not in ARCHITECTURES:
        raise unknown("architecture", arch, ARCHITECTURES)
    return arch


def make_env(config: Config, arch: str) -> Environment | HostEnvironment:
    """The environment, made once for all slices."""
    settings = (config.env, config.env_kwargs, config.env_params)
    if arch == "anakin":
        return envs.make(*settings)
    return envs.make_host(*settings, newest_frame=config.sebulba.newest_frame)


def splits(config: Config, where: Slice) -> list[mesh_lib.Split]:
    """What acts and what learns on each host of a slice."""
    options = config.sebulba
    return [
        mesh_lib.split(
            host, options.actor_devices, options.learner_devices, options.learners_per_actor
        )
        for host in where.hosts
    ]


def num_learners(config: Config, arch: str, where: Slice) -> int:
    """Devices that learn, which environments are counted by."""
    if arch == "anakin":
        return len(where.devices)
    return sum(len(split.learners) for split in splits(config, where))


def lay_out(config: Config, arch: str, env: Any, where: Slice) -> Layout:
    """A run's programs for a slice, traced and not yet compiled.

    Raises:
      ConfigError: sizes don't fit the slice.
    """
    return (_anakin if arch == "anakin" else _sebulba)(config, env, where)


def _anakin(config: Config, env: Environment, where: Slice) -> Layout:
    sizes = config_lib.sizes(config, len(where.devices))
    mesh = mesh_lib.make_mesh(where.devices)
    program = anakin_program.make_program(config, env, sizes, mesh)
    state = jax.eval_shape(program.init, prng.keys(config.seeds, where.devices[0].platform))
    state = mesh_lib.placed(state, mesh, anakin_program.state_specs(config.num_seeds))
    lowered = program.step.lower(state)
    return Layout(sizes, [Piece("step", ALL, 1 / sizes.updates_per_call, lowered)], True)


def _sebulba(config: Config, env: HostEnvironment, where: Slice) -> Layout:
    if config.stagger:
        raise ConfigError(
            f"stagger={config.stagger} is for environments written in JAX; set it to 0"
        )
    hosts = splits(config, where)
    if len({tuple(map(len, split)) for split in hosts}) > 1:
        raise ConfigError(f"{where.topology} has hosts with different numbers of devices")
    learners = [device for split in hosts for device in split.learners]
    run = make_run(config, env, hosts[0], learners)
    state, _ = jax.eval_shape(run.step.init, run.key)
    state = mesh_lib.placed(state, run.mesh, mesh_lib.REPLICATED)
    update = sebulba_program.lower_update(run.step, state, run.trajectories())
    actor: Any = sebulba_program.lower_unroll(run.unroll, run.shapes, hosts[0].actors[0])
    threads = config.sebulba.threads
    pieces = [
        # The first step's program, which draws all keys as well, counts as one more of these.
        Piece("act", ACTORS, threads * config.unroll_length, actor.act),
        Piece("close", ACTORS, threads, actor.close),
        Piece("update", LEARNERS, 1, update),
    ]
    shared = bool(set(hosts[0].actors) & set(hosts[0].learners))
    return Layout(run.sizes, pieces, shared)


def compile_piece(piece: Piece) -> Compiled | TooLarge:
    """Compiles for the device of its mesh; nothing is loaded or run."""
    start = time.monotonic()
    try:
        compiled = piece.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refused(str(error))
    seconds = time.monotonic() - start
    stats: Any = compiled.memory_analysis()
    sizes = (
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    memory = Memory(*sizes, sum(sizes) - 2 * stats.alias_size_in_bytes)
    return Compiled(piece, compiled.as_text() or "", memory, seconds)


def refused(message: str) -> TooLarge:
    """What the compiler says when a program does not fit: the largest two numbers of bytes."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number = r"([\d.]+)([KMGT]?)"
    for pattern in (
        rf"\({number}\) exceeds available \w+ \({number}\)",
        rf"Used {number} of {number} (?:hbm|HBM)",
    ):
        found = re.search(pattern, message)
        if found:
            needed, unit, available, unit2 = found.groups()
            return TooLarge(message, float(needed) * units[unit], float(available) * units[unit2])
    return TooLarge(message, 0.0, 0.0)
