"""Environments of NAVIX, which are MiniGrid's.

NAVIX's symbolic and categorical observations are grids of integers, which are categories and not
quantities, so they become one-hot. Observations in RGB remain images.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import spaces
from podracer.envs.arguments import check_names, import_suite
from podracer.envs.autoreset import Arrival, AutoresetState, Episodes, autoreset
from podracer.errors import ConfigError, unknown
from podracer.types import Array, ArrayTree, Environment, Spec

# MiniGrid's numbers of kinds of objects, of colours, and of states: of doors, or directions.
SYMBOLS = (11, 6, 4)
VIEWS = ("symbolic", "categorical", "rgb")
OBSERVATIONS = tuple(f"{view}{person}" for view in VIEWS for person in ("", "_first_person"))


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with NAVIX.

    Args:
      name: NAVIX's id, such as "Navix-Empty-8x8-v0".
      kwargs: fields of the environment that hold numbers, such as ``max_steps``, and
        ``observation_fn``, one of ``OBSERVATIONS``.
      params: must be empty.

    Raises:
      ConfigError: NAVIX is not installed, or no such environment or argument.
    """
    navix = import_suite("navix", "navix")
    registered = navix.registry()
    if name not in registered:
        raise unknown("navix environment", name, registered)
    env_id = f"navix:{name}"
    check_names(env_id, params, ())
    view = kwargs.get("observation_fn", "symbolic")
    if view not in OBSERVATIONS:
        raise unknown(f"observation_fn of {env_id}", view, OBSERVATIONS)
    env = navix.make(name)
    check_names(env_id, kwargs, {"observation_fn", *_numbers(env)}, "env_kwargs")
    function = getattr(navix.observations, view)
    try:
        env = navix.make(name, **{**kwargs, "observation_fn": function})
    except TypeError as error:
        raise ConfigError(
            f"{env_id} can't be made with env_kwargs={dict(kwargs)}: {error}"
        ) from error
    return _adapt(navix, env, env_id, view)


def _numbers(env: Any) -> list[str]:
    """The fields of an environment that hold numbers."""
    fields = [field.name for field in dataclasses.fields(env)]
    return [name for name in fields if isinstance(getattr(env, name), int | float)]


def _observe(view: str, observation: Array) -> Array:
    """An observation as agents see it."""
    if view.startswith("rgb"):
        return observation
    if view.startswith("categorical"):
        return jax.nn.one_hot(observation, SYMBOLS[0])
    layers = [jax.nn.one_hot(observation[..., i], count) for i, count in enumerate(SYMBOLS)]
    return jnp.concatenate(layers, -1)


def _adapt(navix: Any, env: Any, name: str, view: str) -> Environment:
    init_cache = navix.rendering.cache.RenderingCache.init

    def drawable(timestep: Any) -> Any:
        state = timestep.state
        return timestep.replace(state=state.replace(cache=init_cache(state.grid)))

    def bare(timestep: Any) -> Any:
        return timestep.replace(state=timestep.state.replace(cache=None))

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        timestep = env.reset(key)
        return _observe(view, timestep.observation), bare(timestep)

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[Arrival, ArrayTree]:
        # ``step`` would reset in the step after an episode, which autoreset.py does. The cache of
        # drawings, 192 bytes for each cell, is made again where observations are drawn, so that it
        # is neither carried nor copied in each step.
        timestep = env._step(drawable(state), action)
        arrival = Arrival(
            _observe(view, timestep.observation),
            timestep.reward,
            timestep.is_termination(),
            timestep.is_truncation(),
        )
        return arrival, bare(timestep)

    def render(state: AutoresetState) -> np.ndarray:
        return np.asarray(navix.observations.rgb(drawable(state.env).state))

    observation, _ = jax.eval_shape(reset, jax.random.key(0))
    spec = Spec(observation, spaces.action_space(env.action_space, name))
    made = autoreset(Episodes(reset, step), spec, cached=True)
    return made._replace(render=render, observe=lambda x: _observe(view, x))
