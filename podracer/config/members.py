"""The members of a run: the agents that learn in one program, each with a seed of its own and, in a
sweep, with settings of its own.

A sweep names settings and their values: lists, of which every combination is a point; or, with a
``population``, lists and distributions such as "log_uniform(1e-5, 1e-2)", from which that many
points are drawn. Each point is trained with each seed.
"""

import dataclasses
import difflib
import itertools
import math
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.errors import ConfigError
from podracer.learning.scalars import OFF_AT_ZERO, SAME_FOR_ALL, RecordT, substitute
from podracer.learning.selection import Distribution

_PATTERN = re.compile(r"(log_uniform|uniform)\(([^,]+),([^,]+)\)")


class Member(NamedTuple):
    """An agent of a run.

    Attributes:
      name: under which its metrics are logged.
      seed: its seed.
      settings: its own settings, by dotted name.
    """

    name: str
    seed: int
    settings: Mapping[str, float]

    def at(self, row: Mapping[str, Any]) -> "Member":
        """The member with its settings at a row of metrics, which selections may have changed."""
        settings = {name: row.get(f"{self.name}/{name}", x) for name, x in self.settings.items()}
        return self._replace(settings=settings)


class Point(NamedTuple):
    """Members with the same settings, whose seeds follow one another."""

    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The name of its member, or of the first and the last of them."""
        names = [member.name for member in self.members]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    @property
    def settings(self) -> Mapping[str, float]:
        """The settings that all of its members have."""
        return self.members[0].settings

    @property
    def text(self) -> str:
        """The settings and seeds of its members, as on a command line."""
        values = {**self.settings, "seed": self.members[0].seed}
        if len(self.members) > 1:
            values["num_seeds"] = len(self.members)
        return " ".join(f"--config.{name}={x}" for name, x in values.items())

    def at(self, row: Mapping[str, Any]) -> "Point":
        """The point with its members' settings at a row of metrics."""
        return Point(tuple(member.at(row) for member in self.members))

    def remark(self, row: Mapping[str, Any]) -> str:
        """What a report adds to its name if members of it have diverged by a row of metrics."""
        count = sum(row.get(f"{member.name}/train/diverged") == 1 for member in self.members)
        return f" ({f'{count} ' * (len(self.members) > 1)}diverged)" if count else ""


def expand(sweep: Mapping[str, Any], population: int, seeds: Sequence[int]) -> tuple[Member, ...]:
    """All members of a run, those of the first point first.

    Args:
      sweep: values by setting, in sections as those of a config.
      population: number of points to draw; 0 takes every combination.
      seeds: the seeds of each point; the first one also decides what is drawn.

    Raises:
      ConfigError: values that are neither a list of numbers nor, if points are drawn, a
        distribution.
    """
    values = {name: _parse(name, x, population) for name, x in _flatten(sweep)}
    if population:
        columns = [_draw(name, x, population, seeds[0]) for name, x in values.items()]
        points = list(zip(*columns, strict=True))
    else:
        points = list(itertools.product(*values.values()))
    chosen = [dict(zip(values, point, strict=True)) for point in points]
    pairs = itertools.product(chosen, seeds)
    if not sweep:
        return tuple(Member(f"seed_{seed}", seed, settings) for settings, seed in pairs)
    return tuple(Member(f"member_{i}", seed, settings) for i, (settings, seed) in enumerate(pairs))


def distributions(sweep: Mapping[str, Any]) -> dict[str, Distribution]:
    """What the settings of a sweep are drawn from, by dotted name.

    Raises:
      ConfigError: a setting has a list of values.
    """
    parsed = {name: _parse(name, x, population=1) for name, x in _flatten(sweep)}
    for name, values in parsed.items():
        if isinstance(values, list):
            raise ConfigError(
                f"sweep.{name} is a list, but population-based training changes settings between "
                'two numbers: give it as "uniform(LOW, HIGH)" or "log_uniform(LOW, HIGH)"'
            )
    return {name: x for name, x in parsed.items() if isinstance(x, Distribution)}


def ends(sweep: Mapping[str, Any], seed: int) -> tuple[Point, ...]:
    """The smallest settings that population-based training may choose, and the largest: no check
    of a setting that may change during a run depends on another one of them."""
    found = distributions(sweep)
    lowest = {name: x.low for name, x in found.items()}
    highest = {name: x.high for name, x in found.items()}
    return tuple(Point((Member("an end", seed, x),)) for x in (lowest, highest))


def _flatten(sweep: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a sweep by their dotted names."""
    for name, value in sweep.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parse(name: str, values: Any, population: int) -> Distribution | list[float]:
    """The distribution or the list of numbers that a sweep has for a setting."""
    drawn = _parse_distribution(name, values) if isinstance(values, str) else None
    if drawn and population:
        return drawn
    numbers = values if isinstance(values, list | tuple) else ()
    if not numbers or not all(type(x) in (int, float) and math.isfinite(x) for x in numbers):
        or_drawn = ', or a distribution, "uniform(LOW, HIGH)" or "log_uniform(LOW, HIGH)"'
        raise ConfigError(
            f"sweep.{name} must be a list of numbers{or_drawn * bool(population)}, got {values!r}"
            + "; to draw from a distribution, set population to a number" * bool(drawn)
            + "; to compare other values, train each by a command of its own" * bool(numbers)
        )
    return [float(x) for x in numbers]


def _parse_distribution(name: str, text: str) -> Distribution:
    match = _PATTERN.fullmatch(text.replace(" ", ""))
    try:
        kind, low, high = match.groups() if match else ("", "", "")
        found = Distribution(kind == "log_uniform", float(low), float(high))
    except ValueError:
        raise ConfigError(
            f'sweep.{name} must be "uniform(LOW, HIGH)", "log_uniform(LOW, HIGH)" or a list of '
            f"numbers, got {text!r}"
        ) from None
    if not -math.inf < found.low < found.high < math.inf or (found.logarithmic and found.low <= 0):
        positive = " positive" * found.logarithmic
        raise ConfigError(
            f"sweep.{name} must be between two{positive} numbers, the smaller one first, "
            f"got {text!r}"
        )
    return found


def _draw(name: str, values: Distribution | list[float], count: int, seed: int) -> list[float]:
    """As many values of a setting, which do not depend on the other settings of the sweep, nor the
    first ones on their number."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if isinstance(values, list):
        return [values[i] for i in rng.integers(len(values), size=count)]
    # Short enough to be typed.
    return [float(f"{x:.6g}") for x in values.at(rng.uniform(size=count))]


def scalars(record: Any, sections: Collection[str], prefix: str = "") -> dict[str, bool]:
    """The settings that may differ between members, by dotted name, and whether 0 turns them off:
    numbers of the maths.

    Args:
      record: a config, or a section of one.
      sections: the sections of it that belong to the maths.
      prefix: the dotted name of the section and a dot.
    """
    found: dict[str, bool] = {}
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{prefix}{field.name}"
        if type(value) is float and field.metadata != SAME_FOR_ALL:
            found[name] = field.metadata == OFF_AT_ZERO
        elif dataclasses.is_dataclass(value) and (prefix or field.name in sections):
            found |= scalars(value, sections, f"{name}.")
    return found


def check(points: Sequence[Point], allowed: Mapping[str, bool]) -> None:
    """Raises ``ConfigError`` if points differ in a setting that is not among these, see
    ``scalars``, or where 0 turns it off for some."""
    for name in points[0].settings:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            near = [x for x in allowed if x.endswith(f".{name}")] or near
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"sweep.{name} can't differ between agents that learn in one program; {meant}"
                f"settings that can: {', '.join(allowed)}, where the agent uses them"
            )
        if allowed[name] and any(x.settings[name] <= 0 for x in points):
            raise ConfigError(
                f"all values of sweep.{name} must be positive: 0 turns it off, which is another "
                "program"
            )


def replace(record: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a config with these values in place of others, by dotted name; it is checked as any
    config."""
    return dataclasses.replace(record, **_nested(record, values, replace))


def trace(record: RecordT, values: Mapping[str, Any]) -> RecordT:
    """As ``replace``, for values that a compiled program gets as arguments; nothing is checked."""
    return substitute(record, _nested(record, values, trace))


def _nested(record: Any, values: Mapping[str, Any], put: Any) -> dict[str, Any]:
    """The values of a record's own fields; those of its sections are put there by ``put``."""
    own, sections = {}, {}
    for name, value in values.items():
        section, dot, rest = name.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
        else:
            own[name] = value
    return {**own, **{name: put(getattr(record, name), x) for name, x in sections.items()}}
