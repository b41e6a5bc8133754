"""Reads the text of a compiled program (XLA's HLO) into records."""

import math
import re
from typing import NamedTuple


class Shape(NamedTuple):
    """One array of an instruction's type.

    Attributes:
      dims: its shape.
      size: bytes without padding.
      stored: bytes it takes in the device's main memory, with padding; 0 if it lies elsewhere.
    """

    dims: tuple[int, ...]
    size: int
    stored: int


class Instruction(NamedTuple):
    """One line.

    Attributes:
      name: of its result.
      shapes: of its result; several for a tuple.
      opcode: what it does.
      operands: names of its arguments.
      arguments: their text.
      attributes: text of what follows them.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str


class Computation(NamedTuple):
    """Instructions in order, by name; ``root`` is what it returns."""

    instructions: dict[str, Instruction]
    root: Instruction


class Module(NamedTuple):
    """A whole program."""

    computations: dict[str, Computation]
    entry: str


_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z\d]*\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
NAME = re.compile(r"%([\w.\-]+)")


def _shape(match: re.Match) -> Shape:
    kind, digits, sizes, layout = match.groups()
    bits = 8 if kind == "pred" else int(digits or 0)
    dims = tuple(int(n.strip("<=")) for n in sizes.split(",") if n)
    size = -(-math.prod(dims) * bits // 8)
    order, _, places = (layout or "").partition(":")
    space = re.search(r"S\((\d+)\)", places)
    if space:
        return Shape(dims, size, 0)
    tile = re.search(r"T\(([\d,]+)\)", places)
    if not tile or not dims:
        return Shape(dims, size, size)
    # Its minor dimensions are rounded up to the tile.
    physical = [dims[int(axis)] for axis in reversed(order.split(","))]
    tiles = [int(n) for n in tile[1].split(",")]
    physical = [1] * (len(tiles) - len(physical)) + physical
    for i, n in enumerate(reversed(tiles), 1):
        physical[-i] = -(-physical[-i] // n) * n
    return Shape(dims, size, -(-math.prod(physical) * bits // 8))


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"parentheses of a compiled program do not close: {text[:80]}")


def _instruction(name: str, text: str) -> Instruction:
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
    """The program of ``compiled.as_text()``."""
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
