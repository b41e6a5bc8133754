"""Messages between a worker and its server, as bytes: a fixed header and a body.

A body is JSON, or rows of arrays, whose layout both sides know beforehand: no message says how it
is to be read, and nothing in it is executed. Whatever does not fit exactly is a ``WireError``.
"""

import enum
import json
import math
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer.types import ArrayTree, Discrete, HostEnvironment, HostStep, TimeStep

MAGIC, VERSION = b"PDRC", 1
# magic, version, kind, rows, start, sequence, microseconds.
HEADER = struct.Struct("<4sBBHQII")
# Bytes of the largest JSON body.
MOST_JSON = 1 << 20
# Environments are numbered by 16 bits in a message.
MOST_ROWS = 1 << 15


class Kind(enum.IntEnum):
    """What a message is: the first three are a worker's, the others a server's.

    HELLO and WELCOME begin a stream. STEP carries rows of ``HostStep``, ACTIONS rows of actions.
    ALIVE says that a worker still steps its environments. END says why a stream ends.
    """

    HELLO = 1
    STEP = 2
    ALIVE = 3
    WELCOME = 4
    ACTIONS = 5
    END = 6


class WireError(Exception):
    """A message that its receiver must not use. The argument names what is wrong with it, without
    values, so that errors of a kind can be counted."""


class Header(NamedTuple):
    """The header of a message.

    Attributes:
      kind: what the message is.
      start: a random number for each connection of a worker.
      sequence: number of the message in its stream, from 0, modulo 2^32.
      rows: number of environments in the body; 0 in messages without arrays.
      microseconds: of a STEP, the longest time that its environments took.
    """

    kind: Kind
    start: int
    sequence: int
    rows: int = 0
    microseconds: int = 0

    def encode(self) -> bytes:
        """The header as bytes."""
        microseconds = min(self.microseconds, 2**32 - 1)
        sequence = self.sequence % 2**32
        return HEADER.pack(MAGIC, VERSION, self.kind, self.rows, self.start, sequence, microseconds)


def decode(message: bytes) -> tuple[Header, memoryview]:
    """Header and body of a message.

    Raises:
      WireError: it is none.
    """
    if not isinstance(message, bytes) or len(message) < HEADER.size:
        raise WireError("a message shorter than its header")
    magic, version, kind, rows, start, sequence, microseconds = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise WireError("bytes that are no message")
    if version != VERSION:
        raise WireError("a message of another version of podracer")
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError("a message of unknown kind") from None
    header = Header(known, start, sequence, rows, microseconds)
    return header, memoryview(message)[HEADER.size :]


def encode_json(header: Header, values: Mapping[str, Any]) -> bytes:
    """A message whose body is JSON."""
    return header.encode() + json.dumps(values).encode()


def decode_json(body: memoryview) -> dict[str, Any]:
    """The JSON object that is the body of a message.

    Raises:
      WireError: it is none.
    """
    if len(body) > MOST_JSON:
        raise WireError("a JSON body that is too large")
    try:
        values = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise WireError("a body that is not JSON") from error
    if not isinstance(values, dict):
        raise WireError("a body that is no JSON object")
    return values


class Layout:
    """How rows of a tree of arrays are laid out in a body: a number for each row, and then one
    array after the other, ``[rows, ...]`` each, little-endian.

    Attributes:
      row_bytes: bytes of a row.
    """

    def __init__(self, row: ArrayTree):
        """``row``: shapes and dtypes of the arrays of one row."""
        leaves, self._structure = jax.tree.flatten(row)
        paths = jax.tree.leaves_with_path(row)
        self._names = [jax.tree_util.keystr(path) for path, _ in paths]
        self._shapes = [tuple(x.shape) for x in leaves]
        self._dtypes = [np.dtype(x.dtype).newbyteorder("<") for x in leaves]
        sizes = [
            dtype.itemsize * math.prod(shape)
            for dtype, shape in zip(self._dtypes, self._shapes, strict=True)
        ]
        self._sizes, self.row_bytes = sizes, 2 + sum(sizes)

    def describe(self) -> list[str]:
        """The arrays in words, by which both sides compare their layouts."""
        columns = zip(self._names, self._dtypes, self._shapes, strict=True)
        return [f"{name} {dtype.name}{list(shape)}" for name, dtype, shape in columns]

    def check(self, rows: ArrayTree, count: int) -> None:
        """Raises ``WireError`` if arrays ``[count, ...]`` have another shape or dtype than the
        layout, or values that they can't have."""
        columns = zip(jax.tree.leaves(rows), self._names, self._dtypes, self._shapes, strict=True)
        for array, name, dtype, shape in columns:
            if array.shape != (count, *shape) or array.dtype != dtype:
                raise WireError(
                    f"{name} is {array.dtype}{list(array.shape[1:])}, not {dtype.name}{list(shape)}"
                )
            if dtype.kind == "f" and not np.isfinite(array).all():
                raise WireError(f"{name} has NaN or an infinite number")

    def encode(self, header: Header, index: np.ndarray, rows: ArrayTree) -> bytes:
        """A message with these rows.

        Args:
          header: its header, whose number of rows is set here.
          index: ``[rows]``, the numbers of the rows.
          rows: the arrays, ``[rows, ...]`` each, which were checked.
        """
        parts: list[Any] = [header._replace(rows=len(index)).encode(), index.astype("<u2").data]
        for array, dtype in zip(jax.tree.leaves(rows), self._dtypes, strict=True):
            parts.append(np.ascontiguousarray(array, dtype).data.cast("B"))
        return b"".join(parts)

    def decode(self, header: Header, body: memoryview) -> tuple[np.ndarray, ArrayTree]:
        """The numbers of the rows ``[rows]`` and the arrays ``[rows, ...]``, views of the body.

        Raises:
          WireError: the body has another size, or an array has values that it can't have.
        """
        rows = header.rows
        if not 0 < rows <= MOST_ROWS or len(body) != rows * self.row_bytes:
            raise WireError("a body of the wrong size")
        index = np.frombuffer(body, "<u2", rows).astype(np.int32)
        arrays, at = [], 2 * rows
        columns = zip(self._dtypes, self._shapes, self._sizes, strict=True)
        for dtype, shape, size in columns:
            part = body[at : at + rows * size]
            at += rows * size
            if dtype.kind == "b" and (np.frombuffer(part, np.uint8) > 1).any():
                raise WireError("a truth value that is neither 0 nor 1")
            array = np.frombuffer(part, dtype).reshape(rows, *shape)
            if dtype.kind == "f" and not np.isfinite(array).all():
                raise WireError("NaN or an infinite number")
            arrays.append(array)
        return index, self._structure.unflatten(arrays)


class Traffic:
    """What has crossed the wire so far: counts that threads add to."""

    def __init__(self):
        self._lock = threading.Lock()
        self.received = self.sent = 0
        self.rejected: Counter[str] = Counter()

    def add(self, received: int = 0, sent: int = 0) -> None:
        """Adds bytes."""
        with self._lock:
            self.received += received
            self.sent += sent

    def reject(self, kind: str) -> bool:
        """Counts something that was rejected; returns whether it is the first of its kind."""
        with self._lock:
            self.rejected[kind] += 1
            return self.rejected[kind] == 1


def step_layout(env: HostEnvironment) -> Layout:
    """The layout of ``HostStep``s of an environment."""
    scalar: Any = jax.ShapeDtypeStruct((), np.float32)
    flag: Any = jax.ShapeDtypeStruct((), np.bool_)
    timestep = TimeStep(env.transfer_spec, scalar, scalar, flag)
    return Layout(HostStep(timestep, scalar, flag))


def action_layout(env: HostEnvironment) -> Layout:
    """The layout of an environment's actions, in its own units."""
    action = env.spec.action
    if isinstance(action, Discrete):
        return Layout(jax.ShapeDtypeStruct((), np.int32))
    return Layout(jax.ShapeDtypeStruct(action.shape, np.float32))
