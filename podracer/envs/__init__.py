"""Environments by id, ``suite:name``, or a user's own by ``module:Class``."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from podracer.envs import dummy, envpool, gymnasium, gymnax
from podracer.errors import ConfigError, unknown
from podracer.types import Environment, HostEnvironment

# Written in JAX, for Anakin; and on the host, for Sebulba.
SUITES: dict[str, Callable[..., Environment]] = {"gymnax": gymnax.make, "dummy": dummy.make}
HOST_SUITES: dict[str, Callable[..., HostEnvironment]] = {
    "envpool": envpool.make,
    "gymnasium": gymnasium.make,
    "dummy": dummy.make_host,
}


def _split(env_id: str, example: str) -> tuple[str, str]:
    suite, colon, name = env_id.partition(":")
    if not colon or not name:
        raise ConfigError(f"env={env_id!r} names no suite; an id is {example}")
    return suite, name


def make(env_id: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """Makes an environment written in JAX.

    Args:
      env_id: "gymnax:CartPole-v1", "dummy:counting", or "my_module:MyEnv".
      kwargs: for its constructor.
      params: its parameters, as far as they differ from their defaults.

    Raises:
      ConfigError: there is no such environment, argument or parameter.
    """
    suite, name = _split(env_id, "'gymnax:CartPole-v1', 'dummy:counting' or 'my_module:MyEnv'")
    if suite in SUITES:
        return SUITES[suite](name, kwargs, params)
    if suite in HOST_SUITES:
        raise ConfigError(
            f"env={env_id!r} is stepped on the host; train on it by python -m podracer.sebulba"
        )
    if importlib.util.find_spec(suite.partition(".")[0]) is None:
        raise unknown("environment suite, and no module has that name:", suite, SUITES)
    return gymnax.load(env_id, kwargs, params)


def make_host(
    env_id: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """Makes an environment that is stepped on the host.

    Args:
      env_id: "envpool:Pong-v5", "gymnasium:LunarLander-v3" or "dummy:counting".
      kwargs: for its constructor, or options of its pool.
      params: its parameters, as far as they differ from their defaults.
      newest_frame: see ``envpool.make``.

    Raises:
      ConfigError: there is no such environment, argument or parameter.
    """
    suite, name = _split(env_id, "'envpool:Pong-v5' or 'gymnasium:LunarLander-v3'")
    if suite in SUITES and suite not in HOST_SUITES:
        raise ConfigError(
            f"env={env_id!r} is written in JAX; train on it by python -m podracer.anakin"
        )
    if suite not in HOST_SUITES:
        raise unknown("suite of environments on the host", suite, HOST_SUITES)
    return HOST_SUITES[suite](name, kwargs, params, newest_frame=newest_frame)
