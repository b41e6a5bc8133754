"""Writes the lists of docs/settings.md and docs/commands.md, from the code that defines them.

python docs/reference.py
"""

import argparse
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import absl.flags
from docstring_parser import google
from flax.traverse_util import flatten_dict

from podracer import doctor, evaluate, look, match, plot, worker
from podracer.__main__ import COMMANDS
from podracer.agents import AGENTS
from podracer.config import Config
from podracer.learning.optimizer import OptimizerConfig
from podracer.learning.rollout import RolloutConfig
from podracer.plan import __main__ as plan
from podracer.training import command_line

FOLDER = pathlib.Path(__file__).parent


def settings() -> list[str]:
    """All settings: those of a run, those of each section, and the defaults of agents."""
    parts = ["## The run", *_entries(Config())]
    for name, section in sorted(_sections(Config())):
        parts += ["", f"## `{name}`", *_entries(section, f"{name}.")]
    return [*parts, *_defaults_of_agents()]


def commands() -> list[str]:
    """Each command and its flags; commands with the same flags are listed together."""
    config = {"config": command_line.CONFIG}
    flags = {
        "anakin": _flags({**config, **command_line.OPTIONS}),
        "sebulba": _flags({**config, **command_line.OPTIONS}),
        "worker": _flags(worker.FLAGS),
        "evaluate": _flags(evaluate.FLAGS),
        "match": _flags(match.FLAGS),
        "plot": _arguments(plot.PARSER),
        "look": _arguments(look.PARSER),
        "doctor": [*_flags(config), *_arguments(doctor.PARSER)],
        "plan": _flags({**config, **plan.FLAGS}),
    }
    parts: list[str] = []
    for same in dict.fromkeys(
        tuple(name for name in COMMANDS if flags[name] == found) for found in flags.values()
    ):
        parts += ["## " + ", ".join(f"`{name}`" for name in same), ""]
        parts += [f"`python -m podracer.{name}`: {COMMANDS[name]}.\n" for name in same]
        parts += [*flags[same[0]], ""]
    return parts[:-1]


# The lists of each page, which begin at its first heading of the second level.
PAGES = {"settings.md": settings, "commands.md": commands}


def page(name: str) -> str:
    """A page, with its introduction as it is."""
    introduction = (FOLDER / name).read_text().partition("\n## ")[0]
    return introduction + "\n" + "\n".join(PAGES[name]()) + "\n"


def _entry(name: str, text: str, default: Any) -> str:
    """An argument of a command, with its default unless the description says it."""
    text = re.sub(r"(?<!\w)(--[\w.=]*\w|\$\w+)", r"`\1`", " ".join(text.split()))
    if "default" not in text.lower() and default not in (None, False, "", 0, []):
        text = f"{text}. Default: `{default}`"
    return f"- **`{name}`**: {text}"


def _flags(flags: Mapping[str, command_line.Flag]) -> list[str]:
    return [
        _entry(f"--{name}{'' if define is absl.flags.DEFINE_bool else '='}", text, default)
        for name, (define, default, text) in flags.items()
    ]


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    # argparse has no public list of them.
    return [
        _entry(
            f"{action.option_strings[0]}{'=' if action.nargs is None else ''}"
            if action.option_strings
            else str(action.metavar),
            action.help or "",
            action.default,
        )
        for action in parser._actions
        if action.dest != "help"
    ]


def descriptions(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass says about its fields."""
    # A field that is shared with another dataclass is described there.
    others = {
        Config: (OptimizerConfig, RolloutConfig),
    }.get(cls, [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)])
    found = {}
    for source in (cls, *others):
        for entry in google.parse(source.__doc__ or "").params:
            for name in entry.arg_name.split(", "):
                text = " ".join((entry.description or "").split()).replace("``", "`")
                found[name] = re.sub(r"https://[^ ,)]+", r"<\g<0>>", text)
    return found


def _sections(config: Any) -> Iterator[tuple[str, Any]]:
    """The sections of a config, and theirs, by their dotted names."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield field.name, value
            yield from ((f"{field.name}.{name}", section) for name, section in _sections(value))


def _entries(config: Any, prefix: str = "") -> list[str]:
    """A list, and not a table: on a phone, nobody scrolls sideways."""
    texts = descriptions(type(config))
    # Settings that are described together are one entry.
    entries: dict[str, list[str]] = {}
    for field in dataclasses.fields(config):
        if not dataclasses.is_dataclass(value := getattr(config, field.name)):
            name = f"**`{prefix}{field.name}`** = `{_default(value)}`"
            entries.setdefault(texts[field.name], []).append(name)
    return ["", *(f"- {', '.join(names)}: {text}" for text, names in entries.items())]


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _defaults_of_agents() -> Iterator[str]:
    yield from ("", "## Defaults of agents", "", "| agent | setting | default |", "|---|---|---|")
    for agent, module in sorted(AGENTS.items()):
        for name, value in flatten_dict(module.DEFAULTS, sep=".").items():
            yield f"| `{agent}` | `{name}` | `{_default(value)}` |"


if __name__ == "__main__":
    for name in PAGES:
        text = page(name)
        (FOLDER / name).write_text(text)
