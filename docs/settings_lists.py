"""Writes the lists of docs/settings.md, from the dataclasses of the configuration.

python docs/settings_lists.py
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from docstring_parser import google
from flax.traverse_util import flatten_dict

from podracer.agents import AGENTS
from podracer.config import Config
from podracer.learning.optimizer import OptimizerConfig
from podracer.learning.rollout import RolloutConfig

PAGE = pathlib.Path(__file__).parent / "settings.md"
FIRST = "## The run"


def page() -> str:
    """The page, with its introduction as it is, and all settings: those of a run, those of each
    section, and the defaults of agents."""
    introduction = PAGE.read_text().partition(FIRST)[0]
    parts = [FIRST, *_entries(Config())]
    for name, section in sorted(_sections(Config())):
        parts += ["", f"## `{name}`", *_entries(section, f"{name}.")]
    return introduction + "\n".join([*parts, *_defaults_of_agents()]) + "\n"


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
    return [
        "",
        *(
            f"- **`{prefix}{field.name}`** = `{_default(value)}`: {texts[field.name]}"
            for field in dataclasses.fields(config)
            if not dataclasses.is_dataclass(value := getattr(config, field.name))
        ),
    ]


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _defaults_of_agents() -> Iterator[str]:
    yield from ("", "## Defaults of agents", "", "| agent | setting | default |", "|---|---|---|")
    for agent, module in sorted(AGENTS.items()):
        for name, value in flatten_dict(module.DEFAULTS, sep=".").items():
            yield f"| `{agent}` | `{name}` | `{_default(value)}` |"


if __name__ == "__main__":
    PAGE.write_text(page())
