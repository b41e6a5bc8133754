"""Settings that are numbers of the maths, in which agents that learn in one program may differ."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from podracer.types import Leaf

RecordT = TypeVar("RecordT")

# Every float of a config's sections for agent, learner and replay is such a setting, unless this
# metadata of its field says that the number decides what the program is.
SAME_FOR_ALL = {"members": "same"}
# The metadata of one that is turned off by 0, which is another program.
OFF_AT_ZERO = {"members": "positive"}


def is_on(setting: Leaf) -> bool:
    """Whether a setting that 0 turns off is on. Where agents differ in it, it is (``OFF_AT_ZERO``),
    and their numbers are known when the program runs."""
    return not isinstance(setting, int | float) or setting > 0


def substitute(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """A copy of a frozen dataclass with these values of its fields, which are not checked: in a
    compiled program, they may have none yet."""
    new = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new
