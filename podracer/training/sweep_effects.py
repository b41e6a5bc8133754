"""Which settings of a sweep have an effect in its run, as the traced program itself says."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from podracer.config import Config
from podracer.distributed.checksum import path_name
from podracer.errors import ConfigError


def check_effects(config: Config, functions: Sequence[jax.stages.Wrapped], state: Any) -> None:
    """Checks that each setting of a sweep changes something, so that no two agents are the same.

    Args:
      config: the run's configuration.
      functions: all jitted functions of the state.
      state: shapes of the state, with the settings in ``settings``.

    Raises:
      ConfigError: nothing depends on a setting.
    """
    unused = state.settings.keys() - effective_settings(functions, state)
    if unused:
        raise ConfigError(
            f"sweep.{min(unused)} has no effect: nothing that agent={config.agent!r} computes with "
            "the other settings of this run depends on it; remove it from the sweep"
        )


def effective_settings(functions: Sequence[jax.stages.Wrapped], state: Any) -> set[str]:
    """The settings on which results depend, apart from what becomes of the settings themselves."""
    found = set()
    given = [_parts(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for function in functions:
        traced = function.trace(state)
        results = jax.tree_util.tree_leaves_with_path(traced.out_info)
        wanted = [not {"settings", "selected"} & set(_parts(path)) for path, _ in results]
        _, used = dce_jaxpr(traced.jaxpr.jaxpr, wanted)
        found |= {
            parts[1]
            for parts, is_used in zip(given, used, strict=True)
            if parts[0] == "settings" and is_used
        }
    return found


def _parts(path: Any) -> list[str]:
    return path_name(path).split("/")
