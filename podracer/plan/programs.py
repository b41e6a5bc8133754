"""Compiles the programs of a run for TPU devices that this machine does not have."""

import dataclasses
import re
import time
from typing import Any, NamedTuple

import jax

from podracer.plan.architectures import TracedProgram


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
