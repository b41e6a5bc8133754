"""Environments by id: ``suite:name``, or ``module:Class`` for a user's own."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracer.envs import (
    brax,
    craftax,
    dummy,
    envpool,
    grid_worlds,
    gymnasium,
    gymnax,
    jumanji,
    navix,
    pgx,
    playground,
    xminigrid,
)
from podracer.envs.partial import observe_components
from podracer.envs.simulator import show_state
from podracer.errors import ConfigError, unknown
from podracer.types import Environment, HostEnvironment

# Suites written in JAX, for Anakin, and suites of host environments, for Sebulba.
SUITES: dict[str, Callable[..., Environment]] = {
    "gymnax": gymnax.make,
    "brax": brax.make,
    "craftax": craftax.make,
    "jumanji": jumanji.make,
    "navix": navix.make,
    "pgx": pgx.make,
    "playground": playground.make,
    "xminigrid": xminigrid.make,
    "grid": grid_worlds.make,
    "dummy": dummy.make,
}
HOST_SUITES: dict[str, Callable[..., HostEnvironment]] = {
    "envpool": envpool.make,
    "gymnasium": gymnasium.make,
    "dummy": dummy.make_host,
}


def _split(env_id: str, example: str) -> tuple[str, str]:
    suite, colon, name = env_id.partition(":")
    if not colon or not name:
        raise ConfigError(f"env={env_id!r} names no suite; examples of ids are {example}")
    return suite, name


def architecture(env_id: str) -> str:
    """The architecture that trains in an environment: "anakin" or "sebulba".

    Sebulba is for suites that exist on the host only; a user's own class is written in JAX.
    """
    suite = env_id.partition(":")[0]
    return "sebulba" if suite in HOST_SUITES and suite not in SUITES else "anakin"


def make_environment(
    env_id: str,
    kwargs: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    observed: Sequence[int] = (),
    model: bool = False,
) -> Environment:
    """Makes an environment written in JAX.

    Args:
      env_id: "gymnax:CartPole-v1", "dummy:counting", or "my_module:MyEnv".
      kwargs: keyword arguments of its constructor.
      params: values of its parameters; those left out keep their defaults.
      observed: the components of observations that agents see; () is all.
      model: whether observations hold the environment's state as well, see ``Spec.model``.

    Raises:
      ConfigError: no such environment, argument, parameter or component.
    """
    env = observe_components(_make_environment(env_id, kwargs, params), observed, env_id)
    return show_state(env) if model else env


def _make_environment(
    env_id: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]
) -> Environment:
    suite, name = _split(
        env_id, "'gymnax:CartPole-v1' and, with podracer.sebulba, 'gymnasium:CartPole-v1'"
    )
    if suite in SUITES:
        return SUITES[suite](name, kwargs, params)
    if suite in HOST_SUITES:
        raise ConfigError(
            f"env={env_id!r} is a host environment; train on it with python -m podracer.sebulba"
        )
    module = suite.partition(".")[0]
    # A script's or a notebook's own classes are in __main__, which find_spec() does not find.
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise unknown("environment suite, and no module has that name:", suite, SUITES)
    return gymnax.load(env_id, kwargs, params)


def make_host_environment(
    env_id: str,
    kwargs: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    observed: Sequence[int] = (),
    newest_frame: bool = False,
) -> HostEnvironment:
    """Makes a host environment.

    Args:
      env_id: "envpool:Pong-v5", "gymnasium:LunarLander-v3" or "dummy:counting".
      kwargs: keyword arguments of its constructor, or options of its pool.
      params: values of its parameters; those left out keep their defaults.
      observed: the components of observations that agents see; () is all.
      newest_frame: see ``envpool.make``.

    Raises:
      ConfigError: no such environment, argument, parameter or component.
    """
    suite, name = _split(env_id, "'envpool:Pong-v5' or 'gymnasium:LunarLander-v3'")
    if suite in SUITES and suite not in HOST_SUITES:
        raise ConfigError(
            f"env={env_id!r} is written in JAX; train on it with python -m podracer.anakin"
        )
    if suite not in HOST_SUITES:
        error = unknown("suite of host environments", suite, HOST_SUITES)
        raise ConfigError(
            f"{error}; an environment of your own is gymnasium:{suite}:NAME, or, if it is written "
            "in JAX, one for python -m podracer.anakin"
        )
    env = HOST_SUITES[suite](name, kwargs, params, newest_frame=newest_frame)
    return observe_components(env, observed, env_id)
