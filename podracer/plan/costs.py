"""What a device runs in one call of a compiled program, how often, and what each of it costs.

``cost_analysis()`` counts the body of a loop once, whatever its trip count. Here trip counts are
read from the text and multiplied in. What is counted for an instruction is what XLA's own analysis
counts (``tests/test_hlo.py`` compares them), but for bytes: only those of the device's main memory
are, with the padding of their layout.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from podracer.plan.hlo import NAME, Computation, Instruction, Module, parse


class Kernel(NamedTuple):
    """What a device runs as one piece.

    Attributes:
      name: of its instruction.
      opcode: what it does, without "-start" where it runs beside others.
      times: how often in one call of the program.
      flops: of one time.
      bytes: to and from the device's main memory, of one time.
      cycles: that the compiler itself expects, of one time; 0 where it says nothing.
      sent: bytes that a collective combines, or that go to another slice ("send"), of one time; 0
        for all others.
      host: it waits for the host or moves data to or from it.
      counted: all loops around it have known trip counts; the others count as one.
    """

    name: str
    opcode: str
    times: int
    flops: float
    bytes: int
    cycles: int
    sent: int
    host: bool
    counted: bool


COLLECTIVES = {
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
}  # fmt: skip
_HOST = {"infeed", "outfeed", "send", "recv"}
# Those that move nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound")
# One operation for each element of the result, as XLA counts them; exp, log, tanh, ... are none.
_ELEMENTWISE = {
    "abs", "add", "and", "ceil", "clamp", "compare", "convert", "count-leading-zeros", "divide",
    "floor", "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt",
    "remainder", "round-nearest-afz", "round-nearest-even", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


def kernels(text: str) -> list[Kernel]:
    """All that one call of the program of ``compiled.as_text()`` runs on one device."""
    module = parse(text)
    return list(_run(module, module.computations[module.entry], 1, True))


def _run(module: Module, where: Computation, times: int, counted: bool) -> Iterator[Kernel]:
    for instruction in where.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, where, instruction)
            body = module.computations[_called(instruction, "body")]
            known = counted and trips is not None
            yield from _run(module, body, times * (1 if trips is None else trips), known)
        elif opcode in ("call", "async-start"):
            name = _called(instruction, "to_apply" if opcode == "call" else "calls")
            yield from _run(module, module.computations[name], times, counted)
        elif opcode == "conditional":
            branches = NAME.findall(instruction.attributes.partition("metadata=")[0])
            runs = [list(_run(module, module.computations[b], times, counted)) for b in branches]
            # Which one is taken is not known: the dearest.
            yield from max(runs, key=lambda run: sum(k.times * (k.flops + k.bytes) for k in run))
        elif not _free(instruction):
            yield _kernel(module, where, instruction, times, counted)


def _free(instruction: Instruction) -> bool:
    """It is only there for the compiler, or was counted where it started."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return any(f'"{name}"' in instruction.attributes for name in _FREE_CALLS)
    return opcode in _FREE or opcode.endswith(("-done", "-update"))


def _kernel(
    module: Module, where: Computation, instruction: Instruction, times: int, counted: bool
) -> Kernel:
    opcode = instruction.opcode.removesuffix("-start")
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    operands = [where.instructions[name] for name in instruction.operands]
    # What goes to other slices leaves by way of the host's network, but no code there waits for it.
    abroad = opcode in ("send", "recv") and "megascale" in instruction.attributes
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return Kernel(
        instruction.name,
        opcode,
        times,
        _flops(module, where, instruction),
        _bytes(module, where, instruction),
        int(cycles[1]) if cycles else 0,
        sum(s.size for o in operands for s in o.shapes) if opcode in COLLECTIVES or abroad else 0,
        (opcode in _HOST and not abroad) or bool(target and re.search("callback|Host", target[1])),
        counted,
    )


def _called(instruction: Instruction, key: str) -> str:
    match = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.attributes)
    if match is None:
        raise ValueError(f"{instruction.opcode} {instruction.name} names no {key}")
    return match[1]


def trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """How often the body of a while loop runs; None if that depends on data.

    Either the compiler has written it down, or the loop has the form of every scan: a counter that
    starts at a constant, grows by one, and is compared with one.
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
    start_of = where.instructions[loop.operands[0]]
    if index is None or limit is None or start_of.opcode != "tuple":
        return None
    start = _constant(where, start_of.operands[int(index[1])])
    step = _step(module, body, int(index[1]))
    return None if start is None or step is None else max(0, -(-(limit - start) // step))


def _step(module: Module, body: Computation, index: int) -> int | None:
    """By how much a loop's counter grows, None if not by a constant."""
    if body.root.opcode != "tuple":
        return None
    new = _operation(module, body, body.instructions[body.root.operands[index]])
    if new is None or new[0].opcode != "add":
        return None
    constants = [_constant(body, name) for name in new[1]]
    return next((c for c in constants if c), None)


def _operation(
    module: Module, where: Computation, instruction: Instruction
) -> tuple[Instruction, tuple[str, ...]] | None:
    """An operation and its operands' names in ``where``, also where it is all of a fusion."""
    if instruction.opcode != "fusion":
        return instruction, instruction.operands
    fused = module.computations[_called(instruction, "calls")]
    inner = [fused.instructions[name] for name in fused.root.operands]
    if any(i.opcode != "parameter" for i in inner):
        return None
    return fused.root, tuple(instruction.operands[int(i.arguments)] for i in inner)


def _constant(where: Computation, name: str) -> int | None:
    instruction = where.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = where.instructions[instruction.operands[0]]
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.arguments):
        return None
    return int(instruction.arguments)


def _flops(module: Module, where: Computation, instruction: Instruction) -> float:
    """As XLA's own analysis counts them."""
    opcode, out = instruction.opcode, sum(math.prod(s.dims) for s in instruction.shapes[:1])
    if opcode == "fusion":
        fused = module.computations[_called(instruction, "calls")]
        return sum(_flops(module, fused, i) for i in fused.instructions.values())
    if opcode in _ELEMENTWISE:
        return out
    if opcode in ("dot", "convolution"):
        return 2 * out * _products(where, instruction)
    if opcode in ("reduce", "reduce-window"):
        combined = math.prod(where.instructions[instruction.operands[0]].shapes[0].dims) - out
        if opcode == "reduce-window":
            combined = out * (math.prod(_window(instruction, "size", 1)) - 1)
        function = module.computations[_called(instruction, "to_apply")]
        inner = (_flops(module, function, i) for i in function.instructions.values())
        return combined * sum(inner)
    return 0


def _products(where: Computation, instruction: Instruction) -> float:
    """Of how many products each element of a dot or a convolution is the sum, on average."""
    left, right = (where.instructions[name].shapes[0].dims for name in instruction.operands[:2])
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
    for label, (stride, spread, dilation, low) in zip(spatial, windows, strict=True):
        n, k, m = left[inputs.index(label)], right[kernel.index(label)], out[output.index(label)]
        products *= _overlaps(n, k, m, stride, spread, dilation, low) / m
    return products


def _overlaps(n: int, k: int, m: int, stride: int, spread: int, dilation: int, low: int) -> int:
    """Pairs of an output's and a kernel's place along one axis that meet an input, not padding."""
    span = (n - 1) * spread + 1
    places = (o * stride + j * dilation - low for o in range(m) for j in range(k))
    return sum(0 <= place < span and place % spread == 0 for place in places)


def _window(instruction: Instruction, key: str, default: int, rank: int = 0) -> list[int]:
    """A field of ``window={size=3x3 pad=1_1x1_1 ...}``; of pads, the lower ones."""
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    field = re.search(rf"\b{key}=(\S+)", window[1]) if window else None
    if field is None:
        return [default] * rank
    return [int(part.partition("_")[0]) for part in field[1].split("x")]


def _stored(instruction: Instruction) -> int:
    return sum(shape.stored for shape in instruction.shapes)


def _bytes(module: Module, where: Computation, instruction: Instruction) -> int:
    """To and from the device's main memory."""
    operands = [where.instructions[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode == "fusion":
        fused = module.computations[_called(instruction, "calls")]
        return _fusion_bytes(fused, instruction, operands)
    if opcode in ("dynamic-slice", "slice"):
        return _stored(instruction) + (instruction.shapes[0].size if _stored(operands[0]) else 0)
    if opcode == "gather":
        read = instruction.shapes[0].size if _stored(operands[0]) else 0
        return _stored(instruction) + read + _stored(operands[1])
    if opcode == "dynamic-update-slice":
        written = operands[1].shapes[0].size if _stored(instruction) else 0
        return written + _stored(operands[1])
    if opcode.endswith("-start") and len(instruction.shapes) > 1:
        # Results, then what was there before, then what is waited for.
        return _stored(operands[0]) + instruction.shapes[0].stored
    return sum(map(_stored, operands)) + _stored(instruction)


def _fusion_bytes(fused: Computation, fusion: Instruction, operands: list[Instruction]) -> int:
    """What a fusion reads and writes: slices, where it takes or replaces no more of an array."""
    total = 0
    for instruction in fused.instructions.values():
        if instruction.opcode == "parameter":
            whole = _stored(operands[int(instruction.arguments)])
            part = _read(fused, instruction)
            total += whole if part is None else min(whole, part)
    roots = [fused.root]
    if fused.root.opcode == "tuple":
        roots = [fused.instructions[name] for name in fused.root.operands]
    if len(roots) != len(fusion.shapes):
        return total + _stored(fusion)
    for root, shape in zip(roots, fusion.shapes, strict=True):
        while root.opcode == "bitcast":
            root = fused.instructions[root.operands[0]]
        size = shape.stored
        if root.opcode == "dynamic-update-slice":
            size = min(size, fused.instructions[root.operands[1]].shapes[0].size)
        total += size
    return total


def _read(fused: Computation, source: Instruction) -> int | None:
    """Bytes of one array that a fusion looks at; None for all of it."""
    total = 0
    for user in fused.instructions.values():
        if source.name not in user.operands:
            continue
        first = user.operands[0] == source.name
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += user.shapes[0].size
        elif user.opcode == "bitcast":
            part = _read(fused, user)
            if part is None:
                return None
            total += part
        elif not (user.opcode == "dynamic-update-slice" and first):
            return None
    return total
