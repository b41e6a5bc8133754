"""Environments by id, ``suite:name``, or a user's own by ``module:Class``."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from podracer.envs import dummy, gymnax
from podracer.errors import ConfigError, unknown
from podracer.types import Environment

SUITES = {"gymnax": gymnax.make, "dummy": dummy.make}


def make(env_id: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """Makes an environment written in JAX.

    Args:
      env_id: "gymnax:CartPole-v1", "dummy:counting", or "my_module:MyEnv".
      kwargs: for its constructor.
      params: its parameters, as far as they differ from their defaults.

    Raises:
      ConfigError: there is no such environment, argument or parameter.
    """
    suite, colon, name = env_id.partition(":")
    if not colon or not name:
        raise ConfigError(
            f"env={env_id!r} names no suite; an id is 'gymnax:CartPole-v1', 'dummy:counting' or "
            "'my_module:MyEnv'"
        )
    if suite in SUITES:
        return SUITES[suite](name, kwargs, params)
    if importlib.util.find_spec(suite.partition(".")[0]) is None:
        raise unknown("environment suite, and no module has that name:", suite, SUITES)
    return gymnax.load(env_id, kwargs, params)
