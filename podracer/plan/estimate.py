"""Estimates the memory that a run needs on a slice, and an upper bound of its speed."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from podracer.config import Config
from podracer.errors import ConfigError
from podracer.plan import costs, programs
from podracer.plan.architectures import ACTORS, Architecture, TracedRun
from podracer.plan.chips import Slice
from podracer.plan.costs import COLLECTIVES, Kernel
from podracer.plan.programs import CompileResult, Memory, OutOfMemory

CAPACITY = "replay.capacity"


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives that each device executes: how many, and how many bytes they combine."""

    number: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """Estimates for one program, per device and update of the run.

    A device is a core of a v2 or v3 chip, and a whole chip otherwise.

    Attributes:
      name: name of the function.
      where: which devices execute it.
      memory: memory that it needs on one device.
      compile_seconds: time to compile it on this machine.
      flops: floating point operations, loops included.
      bytes: bytes read from and written to main memory, loops included.
      instructions: number of instructions that a device executes in sequence.
      per_gradient_step: collectives of each gradient step, of the agents that learn at once.
      per_update: all other collectives.
      between_slices: what a device sends to other slices, of all these collectives.
      host: instructions that wait for the host; there should be none.
      uncounted: number of instructions in loops whose trip count depends on data; they are counted
        for one iteration.
      roofline_seconds: time if every instruction ran at the chip's published peaks.
      compiler_seconds: time by the compiler's estimate of cycles; None if the clock is unknown.
    """

    name: str
    where: str
    memory: Memory
    compile_seconds: float
    flops: float
    bytes: float
    instructions: float
    per_gradient_step: Collectives
    per_update: Collectives
    between_slices: Collectives
    host: tuple[str, ...]
    uncounted: int
    roofline_seconds: float
    compiler_seconds: float | None


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """Why a run does not fit, and which smaller sizes do.

    Attributes:
      program: name of the program that does not fit.
      needed: bytes that it needs on one device; 0 if the compiler does not report them.
      available: bytes of memory of one device.
      replay: the part of ``needed`` that is the agent's replay.
      fits: for each config key, the largest value found that compiles and fits while the other
        settings stay as they are; None if there is none.
      message: error message of the compiler.
    """

    program: str
    needed: float
    available: float
    replay: int
    fits: dict[str, int | None]
    message: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimates for a run on a slice.

    Attributes:
      topology, num_slices: the slice.
      arch: "anakin", "meta" or "sebulba".
      chips, cores, hosts: totals over all slices; a core is what JAX sees as a device.
      num_agents: the agents of the run.
      learners, num_groups, agents_at_once: the learners with weights of their own, which are the
        agents, the groups of one agent that average, or with "meta" the agents that learn one rule;
        the groups of cores that they are spread over; and how many of a group learn at the same
        time.
      num_envs, unroll_length: sizes of the run, for each agent.
      envs_per_core: environments of a learner on each core that learns.
      steps_per_update: environment steps per update of an agent.
      gradient_steps: gradient steps per update of an agent, or with "meta" of the rule.
      num_updates: updates of the whole run.
      memory: bytes of memory of a core.
      programs: the programs of the run; () if the run does not fit.
      too_large: why the run does not fit; None if it fits.
      roofline_steps_per_second: upper bound of the speed, of all agents together; None if the run
        does not fit.
      compiler_steps_per_second: speed by the compiler's estimate of cycles; None if the run does
        not fit or the clock is unknown.
      not_included: what these two speeds leave out.
    """

    topology: str
    num_slices: int
    arch: str
    chips: int
    cores: int
    hosts: int
    num_agents: int
    learners: int
    num_groups: int
    agents_at_once: int
    num_envs: int
    envs_per_core: int
    unroll_length: int
    steps_per_update: int
    gradient_steps: int
    num_updates: int
    memory: float
    programs: tuple[ProgramPlan, ...]
    too_large: TooLarge | None
    roofline_steps_per_second: float | None
    compiler_steps_per_second: float | None
    not_included: tuple[str, ...]


def _roofline_seconds(kernel: Kernel, tpu_slice: Slice) -> float:
    """Time of one execution on one device at the chip's published peaks."""
    chip, fraction = tpu_slice.chip, tpu_slice.chips_per_device
    communicates = kernel.opcode in COLLECTIVES
    return max(
        kernel.flops / (chip.flops * fraction),
        kernel.bytes / (chip.bandwidth * fraction),
        # A ring all-reduce sends each byte twice: to reduce, and to distribute the result.
        2 * kernel.comm_bytes / (chip.interconnect * fraction) if communicates else 0.0,
    )


def _compiler_seconds(kernel: Kernel, tpu_slice: Slice) -> float:
    """Time of one execution by the compiler's estimate of cycles, at least the roofline's."""
    cycle_seconds = kernel.cycles / (tpu_slice.chip.clock or 1)
    return max(cycle_seconds, _roofline_seconds(kernel, tpu_slice))


def _collectives(kernels: Iterable[Kernel], calls: float, repeats: float) -> Collectives:
    """The collectives in ``calls`` calls of a program, divided by ``repeats``."""
    kernels = list(kernels)
    return Collectives(
        sum(k.executions for k in kernels) * calls / repeats,
        sum(k.executions * k.comm_bytes for k in kernels) * calls / repeats,
    )


def _plan_program(compiled: CompileResult, tpu_slice: Slice, gradient_steps: int) -> ProgramPlan:
    """The estimates for a compiled program of a run, given its gradient steps per update, those of
    all turns."""
    kernels, calls = costs.kernels(compiled.text), compiled.program.calls

    def total(cost: Callable[[Kernel], float]) -> float:
        return calls * sum(k.executions * cost(k) for k in kernels)

    collectives = [k for k in kernels if k.comm_bytes]
    every_step = [k for k in collectives if k.executions * calls >= gradient_steps]
    others = [k for k in collectives if k not in every_step]
    clock = tpu_slice.chip.clock
    return ProgramPlan(
        name=compiled.program.name,
        where=compiled.program.where,
        memory=compiled.memory,
        compile_seconds=compiled.seconds,
        flops=total(lambda k: k.flops),
        bytes=total(lambda k: k.bytes),
        instructions=total(lambda k: 1),
        per_gradient_step=_collectives(every_step, calls, gradient_steps),
        per_update=_collectives(others, calls, 1),
        between_slices=_collectives((k for k in collectives if k.opcode == "send"), calls, 1),
        host=tuple(k.name for k in kernels if k.host_transfer),
        uncounted=sum(not k.known_trips for k in kernels),
        roofline_seconds=total(lambda k: _roofline_seconds(k, tpu_slice)),
        compiler_seconds=total(lambda k: _compiler_seconds(k, tpu_slice)) if clock else None,
    )


def _update_seconds(plans: Iterable[ProgramPlan], shared_devices: bool, key: str) -> float | None:
    """Time of an update; None if that of a program is unknown.

    Args:
      plans: the programs of the run.
      shared_devices: whether acting and learning take turns on the same devices; on devices of
        their own they run at the same time.
      key: "roofline_seconds" or "compiler_seconds".
    """
    seconds: dict[str, float] = {}
    for plan in plans:
        program_seconds = getattr(plan, key)
        if program_seconds is None:
            return None
        seconds[plan.where] = seconds.get(plan.where, 0.0) + program_seconds
    return sum(seconds.values()) if shared_devices else max(seconds.values())


# Compiled programs of single devices, by chip and text of the program.
CompileCache = dict[tuple[str, str], CompileResult | OutOfMemory]


def _too_large(
    results: list[CompileResult | OutOfMemory], run: TracedRun, memory: float
) -> TooLarge | None:
    """The first program that does not fit in ``memory`` bytes; None if all of them fit."""
    for program, result in zip(run.programs, results, strict=False):
        if isinstance(result, OutOfMemory):
            available = result.available or memory
            return TooLarge(
                program.name, result.needed, available, program.replay, {}, result.message
            )
        if result.memory.total > memory:
            return TooLarge(program.name, result.memory.total, memory, program.replay, {}, "")
    return None


def _compile(
    run: TracedRun, tpu_slice: Slice, cache: CompileCache
) -> list[CompileResult | OutOfMemory]:
    """Compiles the programs of a run in order, up to the first that does not fit."""
    results = []
    for program in run.programs:
        # A program of a single device is the same on all slices of a chip.
        key = (tpu_slice.topology.partition(":")[0], program.lowered.as_text())
        result = cache.get(key) if program.where == ACTORS else None
        result = result or programs.compile_traced(program)
        if program.where == ACTORS:
            cache[key] = result
        results.append(result)
        if isinstance(result, OutOfMemory):
            break
    return results


def _divisors(n: int) -> Iterator[int]:
    """The divisors of n except n itself, in descending order."""
    return (n // k for k in range(2, n + 1) if n % k == 0)


def _largest_that_fits(
    config: Config,
    key: str,
    size: int,
    excess: TooLarge,
    check: Callable[[Config], TooLarge | None],
) -> int | None:
    """The largest divisor of a size with which a run fits; None if none does.

    The replay buffer is assumed to grow in proportion to its capacity, and all other memory in
    proportion to the other sizes, so that divisors which can't fit are skipped without compiling.
    If a smaller size needs as much memory, this size is taken to have no effect on it.

    Args:
      config: config of a run that does not fit.
      key: dotted config key of the size.
      size: the size of that run, for which the config may have 0.
      excess: the memory that the run needs and the memory that is available.
      check: compiles the run of a config; returns None if it fits.
    """
    limit = _limit(key, size, excess)
    for smaller in _divisors(size):
        if smaller > limit:
            continue
        try:
            remaining = check(_replace(config, key, smaller))
        except ConfigError:
            # This size doesn't divide over devices or minibatches, or is less than replay.begin.
            continue
        if remaining is None:
            return smaller
        if remaining.needed >= excess.needed > 0:
            return None
        limit = _limit(key, smaller, remaining)
    return None


def _limit(key: str, size: int, excess: TooLarge) -> float:
    """The size with which a run would just fit, see ``_largest_that_fits``."""
    if not excess.needed:
        return size / 2
    others = excess.needed - excess.replay
    growing, fixed = (excess.replay, others) if key == CAPACITY else (others, excess.replay)
    return size * (excess.available - fixed) / growing


def _replace(config: Config, key: str, value: int) -> Config:
    """The config with one setting changed, which may be that of a section."""
    section, _, name = key.rpartition(".")
    if not section:
        return dataclasses.replace(config, **{name: value})
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: changed})


def _with_fits(
    excess: TooLarge,
    config: Config,
    at_once: dict[str, int],
    check: Callable[[Config], TooLarge | None],
) -> TooLarge:
    """``excess`` with the smaller sizes that fit; see ``TracedRun.at_once`` and
    ``_largest_that_fits``."""
    sizes = {"num_envs": config.num_envs, "unroll_length": config.unroll_length}
    if excess.replay:
        sizes |= {CAPACITY: config.replay.capacity, "replay.batch": config.replay.batch}
    fits = {
        key: _largest_that_fits(config, key, size, excess, check)
        for key, size in (sizes | at_once).items()
    }
    return dataclasses.replace(excess, fits=fits)


def make_plan(
    config: Config,
    arch: Architecture,
    env: Any,
    tpu_slice: Slice,
    cache: CompileCache | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles a run for a slice and estimates its memory and speed.

    Args:
      config: config of the run.
      arch: the architecture of the run.
      env: the environment, from ``arch.make_env``.
      tpu_slice: the slice.
      cache: programs that other plans have compiled; this plan's are added.
      log: called with what takes long, before it begins.

    Raises:
      ConfigError: sizes don't fit the slice.
    """
    memory = tpu_slice.chip.memory * tpu_slice.chips_per_device
    cache = {} if cache is None else cache
    log(f"compiling for {tpu_slice.topology}")
    run = arch.trace(config, env, tpu_slice)
    results = _compile(run, tpu_slice, cache)
    too_large = _too_large(results, run, memory)
    if too_large:
        log("this does not fit; compiling smaller sizes to find those that do")

        def check(config: Config) -> TooLarge | None:
            run = arch.trace(config, env, tpu_slice)
            return _too_large(_compile(run, tpu_slice, cache), run, memory)

        too_large = _with_fits(too_large, config, run.at_once, check)
    turns = run.sizes.learners // run.sizes.num_groups // run.sizes.agents_at_once
    # Without too_large, no result is OutOfMemory; isinstance tells the type checker.
    fitting = () if too_large else (x for x in results if isinstance(x, CompileResult))
    plans = tuple(_plan_program(x, tpu_slice, run.gradient_steps * turns) for x in fitting)
    sizes = run.sizes

    def speed(key: str) -> float | None:
        seconds = _update_seconds(plans, run.shared_devices, key) if plans else None
        return sizes.num_agents * sizes.steps_per_update / seconds if seconds else None

    return Plan(
        topology=tpu_slice.topology,
        num_slices=tpu_slice.num_slices,
        arch=arch.name,
        chips=tpu_slice.num_chips,
        cores=len(tpu_slice.devices),
        hosts=len(tpu_slice.hosts),
        num_agents=sizes.num_agents,
        learners=sizes.learners,
        num_groups=sizes.num_groups,
        agents_at_once=sizes.agents_at_once,
        num_envs=sizes.num_envs,
        envs_per_core=sizes.envs_per_device,
        unroll_length=sizes.unroll_length,
        steps_per_update=sizes.steps_per_update,
        gradient_steps=run.gradient_steps,
        num_updates=sizes.num_updates,
        memory=memory,
        programs=plans,
        too_large=too_large,
        roofline_steps_per_second=speed("roofline_seconds"),
        compiler_steps_per_second=speed("compiler_seconds"),
        not_included=arch.not_included,
    )
