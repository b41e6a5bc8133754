"""What a compiled program executes on each device: instructions, how often, and their costs.

``cost_analysis()`` counts the body of a loop once, whatever its trip count. Here trip counts are
read from the text of the program and multiplied in. An instruction's flops and bytes are those of
XLA's own analysis (``tests/plan/test_hlo.py`` compares them), except that only bytes of the
device's main memory are counted, including the padding of their layout.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from podracer.plan.hlo import NAME, Computation, Instruction, Module, parse


class Kernel(NamedTuple):
    """An instruction that a device executes.

    Attributes:
      name: name of the instruction.
      opcode: the operation, without the suffix "-start" of asynchronous ones.
      executions: number of executions in one call of the program.
      flops: floating point operations of one execution.
      bytes: bytes that one execution reads from and writes to the device's main memory.
      cycles: the compiler's estimate of the cycles of one execution; 0 if it has none.
      comm_bytes: bytes that one execution of a collective combines, or of a "send" transfers to
        another slice; 0 for all other instructions.
      host_transfer: whether it waits for the host or moves data to or from it.
      known_trips: whether all loops around it have known trip counts; a loop whose trip count
        depends on data is counted as one iteration.
    """

    name: str
    opcode: str
    executions: int
    flops: float
    bytes: int
    cycles: int
    comm_bytes: int
    host_transfer: bool
    known_trips: bool


COLLECTIVES = {
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
}  # fmt: skip
_HOST = {"infeed", "outfeed", "send", "recv"}
# Instructions that neither compute nor move anything.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound")
# One operation per element of the result, as XLA counts them. XLA counts exp, log, tanh, ...
# separately, as transcendentals.
_ELEMENTWISE = {
    "abs", "add", "and", "ceil", "clamp", "compare", "convert", "count-leading-zeros", "divide",
    "floor", "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt",
    "remainder", "round-nearest-afz", "round-nearest-even", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


def kernels(text: str) -> list[Kernel]:
    """The instructions that one call of a program executes on one device.

    Args:
      text: text of the program, ``compiled.as_text()``.
    """
    module = parse(text)
    return list(_execute(module, module.computations[module.entry], 1, True))


def _execute(
    module: Module, computation: Computation, executions: int, known_trips: bool
) -> Iterator[Kernel]:
    """The kernels of ``executions`` executions of a computation."""
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, computation, instruction)
            body = module.computations[_called(instruction, "body")]
            known = known_trips and trips is not None
            yield from _execute(module, body, executions * (1 if trips is None else trips), known)
        elif opcode in ("call", "async-start"):
            name = _called(instruction, "to_apply" if opcode == "call" else "calls")
            yield from _execute(module, module.computations[name], executions, known_trips)
        elif opcode == "conditional":
            names = NAME.findall(instruction.attributes.partition("metadata=")[0])
            branches = [
                list(_execute(module, module.computations[name], executions, known_trips))
                for name in names
            ]
            # The branch taken depends on data; assume the most expensive one.
            yield from max(branches, key=_work)
        elif not _is_free(instruction):
            yield _kernel(module, computation, instruction, executions, known_trips)


def _work(kernels: list[Kernel]) -> float:
    """Flops and bytes together, to compare the branches of a conditional."""
    return sum(k.executions * (k.flops + k.bytes) for k in kernels)


def _is_free(instruction: Instruction) -> bool:
    """Whether an instruction costs nothing, or its cost is counted at the "-start" before it."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return any(f'"{name}"' in instruction.attributes for name in _FREE_CALLS)
    return opcode in _FREE or opcode.endswith(("-done", "-update"))


def _kernel(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    executions: int,
    known_trips: bool,
) -> Kernel:
    opcode = instruction.opcode.removesuffix("-start")
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    operands = [computation.instructions[name] for name in instruction.operands]
    # Transfers to other slices pass through the hosts' network, but don't wait for code on a host.
    to_slice = opcode in ("send", "recv") and "megascale" in instruction.attributes
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    callback = bool(target and re.search("callback|Host", target[1]))
    communicates = opcode in COLLECTIVES or to_slice
    return Kernel(
        name=instruction.name,
        opcode=opcode,
        executions=executions,
        flops=_flops(module, computation, instruction),
        bytes=_bytes(module, computation, instruction),
        cycles=int(cycles[1]) if cycles else 0,
        comm_bytes=sum(s.num_bytes for o in operands for s in o.shapes) if communicates else 0,
        host_transfer=(opcode in _HOST and not to_slice) or callback,
        known_trips=known_trips,
    )


def _called(instruction: Instruction, key: str) -> str:
    """The name of the computation that an instruction calls as ``key``."""
    match = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.attributes)
    if match is None:
        raise ValueError(f"{instruction.opcode} {instruction.name} has no {key}")
    return match[1]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The number of iterations of a while loop in ``computation``; None if it depends on data.

    It is known if the compiler has annotated it, or if the loop has the form of a scan: a counter
    that starts at a constant, is incremented by a constant, and is compared with a constant.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[_called(loop, "condition")]
    body = module.computations[_called(loop, "body")]
    test = _operation(module, condition, condition.root)
    if test is None or test[0].opcode != "compare" or "direction=LT" not in test[0].attributes:
        return None
    counter = condition.instructions[test[1][0]]
    index = re.search(r"index=(\d+)", counter.attributes)
    limit = _constant(condition, test[1][1])
    initial = computation.instructions[loop.operands[0]]
    if index is None or limit is None or initial.opcode != "tuple":
        return None
    start = _constant(computation, initial.operands[int(index[1])])
    step = _step(module, body, int(index[1]))
    return None if start is None or step is None else max(0, -(-(limit - start) // step))


def _step(module: Module, body: Computation, index: int) -> int | None:
    """The constant that a loop's body adds to element ``index`` of its state; None if none."""
    if body.root.opcode != "tuple":
        return None
    new = _operation(module, body, body.instructions[body.root.operands[index]])
    if new is None or new[0].opcode != "add":
        return None
    constants = [_constant(body, name) for name in new[1]]
    return next((c for c in constants if c), None)


def _operation(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction, tuple[str, ...]] | None:
    """An operation and the names of its operands in ``computation``.

    If the instruction is a fusion of a single operation, that operation; None for other fusions.
    """
    if instruction.opcode != "fusion":
        return instruction, instruction.operands
    fused = module.computations[_called(instruction, "calls")]
    inner = [fused.instructions[name] for name in fused.root.operands]
    if any(i.opcode != "parameter" for i in inner):
        return None
    return fused.root, tuple(instruction.operands[int(i.arguments)] for i in inner)


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an instruction if it is an integer constant, else None."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.arguments):
        return None
    return int(instruction.arguments)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Floating point operations, counted as in XLA's own analysis."""
    opcode, out = instruction.opcode, sum(math.prod(s.dims) for s in instruction.shapes[:1])
    if opcode == "fusion":
        fused = module.computations[_called(instruction, "calls")]
        return sum(_flops(module, fused, i) for i in fused.instructions.values())
    if opcode in _ELEMENTWISE:
        return out
    if opcode in ("dot", "convolution"):
        return 2 * out * _products_per_output(computation, instruction)
    if opcode in ("reduce", "reduce-window"):
        combined = math.prod(computation.instructions[instruction.operands[0]].shapes[0].dims) - out
        if opcode == "reduce-window":
            combined = out * (math.prod(_window(instruction, "size", 1)) - 1)
        function = module.computations[_called(instruction, "to_apply")]
        inner = (_flops(module, function, i) for i in function.instructions.values())
        return combined * sum(inner)
    return 0


def _products_per_output(computation: Computation, instruction: Instruction) -> float:
    """The mean number of products that are summed for an element of a dot or a convolution."""
    left, right = (
        computation.instructions[name].shapes[0].dims for name in instruction.operands[:2]
    )
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return math.prod(
            left[int(i)] for i in (contracted[1] if contracted else "").split(",") if i
        )
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"convolution {instruction.name} has no dim_labels")
    inputs, kernel, output = labels.groups()
    products = right[kernel.index("i")]
    out = instruction.shapes[0].dims
    spatial = sorted(label for label in kernel if label.isdigit())
    windows = zip(
        _window(instruction, "stride", 1, len(spatial)),
        _window(instruction, "lhs_dilate", 1, len(spatial)),
        _window(instruction, "rhs_dilate", 1, len(spatial)),
        _window(instruction, "pad", 0, len(spatial)),
        strict=True,
    )
    for label, window in zip(spatial, windows, strict=True):
        n, k, m = left[inputs.index(label)], right[kernel.index(label)], out[output.index(label)]
        products *= _overlaps(n, k, m, *window) / m
    return products


def _overlaps(
    n: int, k: int, m: int, stride: int, lhs_dilation: int, rhs_dilation: int, pad: int
) -> int:
    """The number of (output, kernel) positions along one axis that read an input, not padding.

    Args:
      n: input size.
      k: kernel size.
      m: output size.
      stride: stride of the window.
      lhs_dilation: dilation of the input.
      rhs_dilation: dilation of the kernel.
      pad: padding before the input.
    """
    dilated = (n - 1) * lhs_dilation + 1
    positions = (o * stride + j * rhs_dilation - pad for o in range(m) for j in range(k))
    return sum(0 <= x < dilated and x % lhs_dilation == 0 for x in positions)


def _window(instruction: Instruction, key: str, default: int, rank: int = 0) -> list[int]:
    """A field of ``window={size=3x3 pad=1_1x1_1 ...}`` by axis; for pad, the padding before.

    Args:
      instruction: the instruction with the window.
      key: name of the field.
      default: value for each axis if there is no such field.
      rank: number of axes if there is no such field.
    """
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    field = re.search(rf"\b{key}=(\S+)", window[1]) if window else None
    if field is None:
        return [default] * rank
    return [int(part.partition("_")[0]) for part in field[1].split("x")]


def _hbm_bytes(instruction: Instruction) -> int:
    """Size of an instruction's result in main memory."""
    return sum(shape.hbm_bytes for shape in instruction.shapes)


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads from and writes to the device's main memory."""
    operands = [computation.instructions[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode == "fusion":
        fused = module.computations[_called(instruction, "calls")]
        return _fusion_bytes(fused, instruction, operands)
    if opcode in ("dynamic-slice", "slice"):
        read = instruction.shapes[0].num_bytes if _hbm_bytes(operands[0]) else 0
        return _hbm_bytes(instruction) + read
    if opcode == "gather":
        read = instruction.shapes[0].num_bytes if _hbm_bytes(operands[0]) else 0
        return _hbm_bytes(instruction) + read + _hbm_bytes(operands[1])
    if opcode == "dynamic-update-slice":
        written = operands[1].shapes[0].num_bytes if _hbm_bytes(instruction) else 0
        return written + _hbm_bytes(operands[1])
    if opcode.endswith("-start") and len(instruction.shapes) > 1:
        # The result is a tuple of result, operands and synchronization flags: only the first is
        # written.
        return _hbm_bytes(operands[0]) + instruction.shapes[0].hbm_bytes
    return sum(map(_hbm_bytes, operands)) + _hbm_bytes(instruction)


def _fusion_bytes(fused: Computation, fusion: Instruction, operands: list[Instruction]) -> int:
    """Bytes that a fusion reads and writes: only slices, where it uses only slices of an array."""
    total = 0
    for instruction in fused.instructions.values():
        if instruction.opcode == "parameter":
            whole = _hbm_bytes(operands[int(instruction.arguments)])
            sliced = _sliced_bytes(fused, instruction)
            total += whole if sliced is None else min(whole, sliced)
    roots = [fused.root]
    if fused.root.opcode == "tuple":
        roots = [fused.instructions[name] for name in fused.root.operands]
    if len(roots) != len(fusion.shapes):
        return total + _hbm_bytes(fusion)
    for root, shape in zip(roots, fusion.shapes, strict=True):
        while root.opcode == "bitcast":
            root = fused.instructions[root.operands[0]]
        written = shape.hbm_bytes
        if root.opcode == "dynamic-update-slice":
            written = min(written, fused.instructions[root.operands[1]].shapes[0].num_bytes)
        total += written
    return total


def _sliced_bytes(fused: Computation, source: Instruction) -> int | None:
    """Bytes of the slices that a fusion reads from an array; None if it reads the whole array."""
    total = 0
    for user in fused.instructions.values():
        if source.name not in user.operands:
            continue
        first = user.operands[0] == source.name
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += user.shapes[0].num_bytes
        elif user.opcode == "bitcast":
            part = _sliced_bytes(fused, user)
            if part is None:
                return None
            total += part
        elif not (user.opcode == "dynamic-update-slice" and first):
            return None
    return total
