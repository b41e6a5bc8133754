"""Which settings of a sweep have an effect in its run, as the traced program itself says."""

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from podracer.anakin.program import AnakinProgram
from podracer.config import Config
from podracer.errors import ConfigError


def check_effects(config: Config, program: AnakinProgram) -> None:
    """Raises ``ConfigError`` if a setting of the sweep changes nothing, so that agents that differ
    in it alone would be the same."""
    unused = set(program.state.settings) - effective_settings(program)
    if unused:
        raise ConfigError(
            f"sweep.{min(unused)} has no effect: nothing that agent={config.agent!r} computes with "
            "the other settings of this run depends on it; remove it from the sweep"
        )


def effective_settings(program: AnakinProgram) -> set[str]:
    """The settings of a sweep on which a step or an evaluation depends, apart from what becomes of
    the settings themselves."""
    found = set()
    given = [_setting(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.state)]
    for function in (program.step, program.evaluate):
        traced = function.trace(program.state)
        results = jax.tree_util.tree_leaves_with_path(traced.out_info)
        wanted = [not {"settings", "selected"} & set(_names(path)) for path, _ in results]
        _, used = dce_jaxpr(traced.jaxpr.jaxpr, wanted)
        found |= {name for name, is_used in zip(given, used, strict=True) if name and is_used}
    return found


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]


def _setting(path: tuple) -> str:
    """The name of the setting that a leaf of the state is; empty for all others."""
    first, *rest = _names(path)
    return rest[0] if first == "settings" else ""
