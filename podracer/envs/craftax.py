"""Environments of Craftax: Craftax and Craftax-Classic, with symbols or pixels as observations.

They have gymnax's old interface, see ``old_gymnax.py``. Making a world costs as much as 25 steps,
so starts are computed once in each unroll (benchmarks/resets.py).
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from podracer.envs import gymnax
from podracer.envs.arguments import change_fields, import_suite
from podracer.envs.autoreset import AutoresetState
from podracer.errors import unknown
from podracer.types import Environment

NAMES = tuple(
    f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")
)
# Pixels of a side of a block in a drawing.
BLOCK = 16


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment of Craftax.

    Args:
      name: Craftax's id, such as "Craftax-Classic-Symbolic-v1".
      kwargs: fields of ``StaticEnvParams``, such as ``map_size``.
      params: fields of ``EnvParams``, such as ``max_timesteps``.

    Raises:
      ConfigError: Craftax is not installed, or no such environment, argument or parameter.
    """
    craftax = import_suite("craftax.craftax_env", "craftax")
    if name not in NAMES:
        raise unknown("craftax environment", name, NAMES)
    env_id = f"craftax:{name}"
    env = craftax.make_craftax_env_from_name(name, auto_reset=False)
    # Lists come from a command line or a saved configuration, and must be hashable.
    static = {key: tuple(x) if isinstance(x, list) else x for key, x in kwargs.items()}
    static = change_fields(env_id, env.default_static_params(), static, "env_kwargs")
    made = gymnax.adapt(type(env)(static), env_id, params, cached=True)
    return made._replace(render=_make_render(name))


def _make_render(name: str) -> Callable[[AutoresetState], np.ndarray]:
    """``(state) -> image`` with Craftax's own drawing code, compiled when it is first used."""
    package = "craftax.craftax_classic" if "Classic" in name else "craftax.craftax"

    @functools.cache
    def renderer() -> Callable[[Any], Any]:
        module = importlib.import_module(f"{package}.renderer")
        return jax.jit(module.make_craftax_pixel_renderer(BLOCK))

    def render(state: AutoresetState) -> np.ndarray:
        return np.asarray(renderer()(state.env)).clip(0, 255).astype(np.uint8)

    return render
