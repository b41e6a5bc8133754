"""Parses the text of a compiled program (XLA's optimized HLO) into records."""

import math
import re
from typing import NamedTuple


class Shape(NamedTuple):
    """The type of one array.

    Attributes:
      dims: dimensions of the array.
      num_bytes: size in bytes without padding.
      hbm_bytes: size in the device's main memory, with the padding of its layout; 0 for an array
        in another memory.
    """

    dims: tuple[int, ...]
    num_bytes: int
    hbm_bytes: int


class Instruction(NamedTuple):
    """One instruction, a line of the text.

    Attributes:
      name: name of the result.
      shapes: arrays of the result, several if it is a tuple.
      opcode: the operation, such as "dot" or "fusion".
      operands: names of the instructions whose results it takes.
      arguments: the text between the parentheses.
      attributes: the text after the parentheses.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str


class Computation(NamedTuple):
    """A computation: its instructions by name, in order; ``root`` is the one it returns."""

    instructions: dict[str, Instruction]
    root: Instruction


class Module(NamedTuple):
    """A program: its computations by name, and the name of the one that it starts with."""

    computations: dict[str, Computation]
    entry: str


_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z\d]*\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
NAME = re.compile(r"%([\w.\-]+)")


def _shape(match: re.Match) -> Shape:
    """The array of a match of ``_ARRAY``, with the padding of its layout's tiles."""
    kind, digits, sizes, layout = match.groups()
    bits = 8 if kind == "pred" else int(digits or 0)
    dims = tuple(int(n.strip("<=")) for n in sizes.split(",") if n)
    num_bytes = -(-math.prod(dims) * bits // 8)
    order, _, tiling = (layout or "").partition(":")
    memory_space = re.search(r"S\((\d+)\)", tiling)
    if memory_space:
        return Shape(dims, num_bytes, 0)
    tile = re.search(r"T\(([\d,]+)\)", tiling)
    if not tile or not dims:
        return Shape(dims, num_bytes, num_bytes)
    # The minor dimensions are padded to multiples of the tile.
    physical = [dims[int(axis)] for axis in reversed(order.split(","))]
    tiles = [int(n) for n in tile[1].split(",")]
    physical = [1] * (len(tiles) - len(physical)) + physical
    for i, n in enumerate(reversed(tiles), 1):
        physical[-i] = -(-physical[-i] // n) * n
    return Shape(dims, num_bytes, -(-math.prod(physical) * bits // 8))


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses in the text of a compiled program: {text[:80]}")


def _instruction(name: str, text: str) -> Instruction:
    """The instruction of a line ``name = text``."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes = tuple(map(_shape, _ARRAY.finditer(text[:end])))
    opening = text.index("(", end)
    closing = _closing(text, opening)
    arguments = text[opening + 1 : closing]
    return Instruction(
        name,
        shapes,
        text[end:opening].strip(),
        tuple(NAME.findall(arguments)),
        arguments,
        text[closing + 1 :],
    )


def parse(text: str) -> Module:
    """Parses the program of ``compiled.as_text()``."""
    computations, entry, name = {}, "", ""
    found: dict[str, Instruction] = {}
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name, found = header[2], {}
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            root = found.get("ROOT") or list(found.values())[-1]
            found.pop("ROOT", None)
            computations[name] = Computation(found, root)
            name = ""
        elif name and (match := _LINE.match(line)):
            found[match[1]] = _instruction(match[1], match[2])
            if line.lstrip().startswith("ROOT "):
                found["ROOT"] = found[match[1]]
    return Module(computations, entry)
