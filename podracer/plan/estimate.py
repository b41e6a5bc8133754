"""What a run needs of a slice, and how fast it could be at most."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from podracer.config import Config
from podracer.errors import ConfigError
from podracer.plan import costs, programs
from podracer.plan.chips import Slice
from podracer.plan.costs import COLLECTIVES, Kernel
from podracer.plan.programs import Compiled, Layout, Memory, TooLarge

NOT_INCLUDED = (
    "the host's time between calls, metrics, evaluation",
    "latency of collectives: only their bytes count",
    "the network between slices",
)
NOT_INCLUDED_SEBULBA = (
    "environments on the host, and what moves between host and devices",
    "what waits beside the programs: other threads' unrolls, weights on their way",
)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """How many run on each device, and how many bytes they combine."""

    number: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program; numbers are of one update of the run on one device (a core, or a chip of one).

    Attributes:
      name: of the function.
      where: which devices run it.
      memory: of one device.
      compile_seconds: here.
      flops: with all loops.
      bytes: to and from main memory, with all loops.
      instructions: that a device runs one after the other.
      per_gradient_step: collectives that run at every gradient step.
      per_update: the others.
      host: instructions that wait for the host; there should be none.
      uncounted: instructions in loops whose number of rounds depends on data; they count as one.
      roofline_seconds: if every instruction ran at the chip's published peaks.
      compiler_seconds: by the cycles that the compiler itself expects; None without a clock.
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
    host: tuple[str, ...]
    uncounted: int
    roofline_seconds: float
    compiler_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Fit:
    """A run that is too large.

    Attributes:
      program: that does not fit.
      needed: bytes of one device; 0 if the compiler does not say.
      available: bytes of one device.
      fits: sizes that compile and fit, by config key, the rest unchanged; None where none does.
      message: of the compiler.
    """

    program: str
    needed: float
    available: float
    fits: dict[str, int | None]
    message: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a slice.

    Attributes:
      topology, num_slices: where.
      arch: "anakin" or "sebulba".
      chips, cores, hosts: of all slices; a core is what JAX sees as a device.
      num_envs, envs_per_core, unroll_length: sizes; environments by cores that learn.
      steps_per_update: environment steps.
      gradient_steps: of an update.
      memory: bytes that a core has.
      programs: what runs; () where it does not fit.
      too_large: why it does not fit.
      roofline_steps_per_second: no run can be faster; None where it does not fit.
      compiler_steps_per_second: by the compiler's own expectation.
      not_included: in these two.
    """

    topology: str
    num_slices: int
    arch: str
    chips: int
    cores: int
    hosts: int
    num_envs: int
    envs_per_core: int
    unroll_length: int
    steps_per_update: int
    gradient_steps: int
    memory: float
    programs: tuple[ProgramPlan, ...]
    too_large: Fit | None
    roofline_steps_per_second: float | None
    compiler_steps_per_second: float | None
    not_included: tuple[str, ...]


def _roofline(kernel: Kernel, where: Slice) -> float:
    """Seconds of one time, at the published peaks of one device."""
    chip, share = where.chip, where.share
    return max(
        kernel.flops / (chip.flops * share),
        kernel.bytes / (chip.bandwidth * share),
        # Each byte is sent for the sum and again for the result; not so between slices.
        2 * kernel.sent / (chip.interconnect * share) if kernel.opcode in COLLECTIVES else 0.0,
    )


def _expected(kernel: Kernel, where: Slice) -> float:
    """Seconds of one time by the compiler's cycles, and no less than by the roofline."""
    return max(kernel.cycles / (where.chip.clock or 1), _roofline(kernel, where))


def _collectives(kernels: Iterable[Kernel], calls: float, per: float) -> Collectives:
    kernels = list(kernels)
    return Collectives(
        sum(k.times for k in kernels) * calls / per,
        sum(k.times * k.sent for k in kernels) * calls / per,
    )


def _program(compiled: Compiled, where: Slice, gradient_steps: int) -> ProgramPlan:
    kernels, calls = costs.kernels(compiled.text), compiled.piece.calls

    def total(one: Callable[[Kernel], float]) -> float:
        return calls * sum(k.times * one(k) for k in kernels)

    collectives = [k for k in kernels if k.sent]
    often = [k for k in collectives if k.times * calls >= gradient_steps]
    return ProgramPlan(
        name=compiled.piece.name,
        where=compiled.piece.where,
        memory=compiled.memory,
        compile_seconds=compiled.seconds,
        flops=total(lambda k: k.flops),
        bytes=total(lambda k: k.bytes),
        instructions=total(lambda k: 1),
        per_gradient_step=_collectives(often, calls, gradient_steps),
        per_update=_collectives((k for k in collectives if k not in often), calls, 1),
        host=tuple(k.name for k in kernels if k.host),
        uncounted=sum(not k.counted for k in kernels),
        roofline_seconds=total(lambda k: _roofline(k, where)),
        compiler_seconds=total(lambda k: _expected(k, where)) if where.chip.clock else None,
    )


def _seconds(plans: Iterable[ProgramPlan], layout: Layout, key: str) -> float | None:
    """Of an update: what acts and what learns run at once, where they have devices of their own."""
    seconds: dict[str, float] = {}
    for plan in plans:
        one = getattr(plan, key)
        if one is None:
            return None
        seconds[plan.where] = seconds.get(plan.where, 0.0) + one
    return sum(seconds.values()) if layout.shared else max(seconds.values())


# Compiled programs of single devices, by chip and text.
Known = dict[tuple[str, str], Compiled | TooLarge]


def _too_large(results: list[Compiled | TooLarge], layout: Layout, memory: float) -> Fit | None:
    for piece, result in zip(layout.pieces, results, strict=False):
        if isinstance(result, TooLarge):
            available = result.available or memory
            return Fit(piece.name, result.needed, available, {}, result.message)
        if result.memory.total > memory:
            return Fit(piece.name, result.memory.total, memory, {}, "")
    return None


def _compile(layout: Layout, where: Slice, known: Known) -> list[Compiled | TooLarge]:
    """Every program, up to the first that is refused."""
    results = []
    for piece in layout.pieces:
        # A program of one device is the same on every slice of its chip.
        alone = (where.topology.partition(":")[0], piece.lowered.as_text())
        result = known.get(alone) if piece.where == programs.ACTORS else None
        result = result or programs.compile_piece(piece)
        if piece.where == programs.ACTORS:
            known[alone] = result
        results.append(result)
        if isinstance(result, TooLarge):
            break
    return results


def _divisors(n: int) -> Iterator[int]:
    """Of n, without n itself, the largest first."""
    return (n // k for k in range(2, n + 1) if n % k == 0)


def _largest_that_fits(
    config: Config, key: str, fit: Fit, attempt: Callable[[Config], Fit | None]
) -> int | None:
    """The size that a straight line says would fit, or the next smaller one that does.

    Args:
      config: which does not fit.
      key: of the size.
      fit: by how much it does not.
      attempt: compiles a config; None if it fits.
    """
    size = getattr(config, key)
    most = size * fit.available / fit.needed if fit.needed else size / 2
    for smaller in _divisors(size):
        if smaller > most:
            continue
        try:
            again = attempt(dataclasses.replace(config, **{key: smaller}))
        except ConfigError:
            # Does not divide over devices or minibatches.
            continue
        if again is None:
            return smaller
        most = smaller * again.available / again.needed if again.needed else smaller / 2
    return None


def make(config: Config, arch: str, env: Any, where: Slice, known: Known | None = None) -> Plan:
    """Compiles a run for a slice and works out what it needs.

    Args:
      config: of the run.
      arch: "anakin" or "sebulba".
      env: as ``programs.make_env`` makes it.
      where: the slice.
      known: what other plans have compiled already, and this one will have.

    Raises:
      ConfigError: sizes don't fit the slice.
    """
    memory, known = where.chip.memory * where.share, {} if known is None else known
    layout = programs.lay_out(config, arch, env, where)
    results = _compile(layout, where, known)
    fit = _too_large(results, layout, memory)
    if fit:

        def attempt(config: Config) -> Fit | None:
            layout = programs.lay_out(config, arch, env, where)
            return _too_large(_compile(layout, where, known), layout, memory)

        keys = ("num_envs", "unroll_length")
        sizes = {key: _largest_that_fits(config, key, fit, attempt) for key in keys}
        fit = dataclasses.replace(fit, fits=sizes)
    gradient_steps = config.num_epochs * config.num_minibatches
    # Refused ones are left out by `fit`; the type says so.
    plans = tuple(
        _program(result, where, gradient_steps)
        for result in results
        if not fit and isinstance(result, Compiled)
    )
    sizes = layout.sizes

    def speed(key: str) -> float | None:
        seconds = _seconds(plans, layout, key) if plans else None
        return sizes.steps_per_update / seconds if seconds else None

    return Plan(
        topology=where.topology,
        num_slices=where.num_slices,
        arch=arch,
        chips=where.num_chips,
        cores=len(where.devices),
        hosts=len(where.hosts),
        num_envs=sizes.num_envs,
        envs_per_core=sizes.envs_per_device,
        unroll_length=sizes.unroll_length,
        steps_per_update=sizes.steps_per_update,
        gradient_steps=gradient_steps,
        memory=memory,
        programs=plans,
        too_large=fit,
        roofline_steps_per_second=speed("roofline_seconds"),
        compiler_steps_per_second=speed("compiler_seconds"),
        not_included=NOT_INCLUDED + (NOT_INCLUDED_SEBULBA if arch == "sebulba" else ()),
    )
