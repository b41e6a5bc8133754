"""The command that trains the agents of one point of a sweep alone."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podracer.config.members import Point

# Flags of a sweep's command that do not belong to one of its points.
_OF_THE_SWEEP = (
    "workdir", "restart", "config.population", "config.num_seeds", "config.seed",
)  # fmt: skip


def command_alone(content: Mapping[str, Any], point: Point, workdir: str) -> str:
    """The command, made from the sweep's own, in a workdir of its own.

    It is empty where that of the sweep does not suffice: it was started from Python, its config
    file has parts of the sweep, or selections have changed the agents' settings.

    Args:
      content: the run's ``config.json``.
      point: a point of the sweep.
      workdir: the run's folder.
    """
    config, flags = content["config"], list(_flags(content.get("command", ())[3:]))
    given = {name for name, _ in flags}
    needed = {f"config.sweep.{name}" for name in point.settings}
    needed |= {"config.population"} if config.get("population") else set()
    if config.get("selection", {}).get("every") or not needed <= given:
        return ""
    left_out = {*_OF_THE_SWEEP, *needed, *(f"config.{name}" for name in point.settings)}
    kept = [argument for name, text in flags if name not in left_out for argument in text]
    own = [*point.text.split(), f"--workdir={workdir}-{point.members[0].name}"]
    return shlex.join([*content["command"][:3], *kept, *own])


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The flags of a command line: the name of each, and its one or two arguments."""
    rest = list(arguments)
    while rest:
        first = rest.pop(0)
        name, equals, _ = first.lstrip("-").partition("=")
        value = () if equals or not rest or rest[0].startswith("-") else (rest.pop(0),)
        yield name, (first, *value)
