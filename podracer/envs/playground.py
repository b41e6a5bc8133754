"""Environments of MuJoCo Playground: the DeepMind control suite, locomotion and manipulation.

They have Brax's interface, and ``brax.py`` adapts them. Their settings are a configuration of the
environment's own, whose fields are env_params: ``episode_length``, ``action_repeat``, ``sim_dt``,
... The physics are those of MJX in JAX (``impl="jax"``), which runs on every device; Playground's
own default, ``impl="warp"``, is for NVIDIA GPUs only and has not been tried with podracer.
"""

import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from podracer.envs import brax
from podracer.envs.arguments import check_names, import_suite
from podracer.errors import ConfigError, TransientError, unknown
from podracer.types import Environment


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with MuJoCo Playground.

    Args:
      name: Playground's name, such as "CartpoleBalance".
      kwargs: must be empty: constructors take nothing but the configuration.
      params: values for fields of the environment's configuration, also of nested ones.

    Raises:
      ConfigError: Playground is not installed, or no such environment or parameter.
      TransientError: the models of robots can't be downloaded at present.
    """
    registry = import_suite("mujoco_playground", "playground").registry
    if name not in registry.ALL_ENVS:
        raise unknown("playground environment", name, registry.ALL_ENVS)
    env_id = f"playground:{name}"
    check_names(env_id, kwargs, (), "env_kwargs")
    config = registry.get_default_config(name)
    changes = dict(_flatten(params))
    check_names(env_id, changes, dict(_flatten(config)))
    if "impl" in config:
        changes.setdefault("impl", "jax")
    try:
        config.update_from_flattened_dict(changes)
        env = registry.load(name, config=config)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{env_id} can't be made with env_params={dict(params)}: {error}"
        ) from error
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise TransientError(
            f"{env_id} downloads the models of robots (mujoco_menagerie) with git when it is first "
            f"made, and that failed: {error}; with git and a network the same command works later"
        ) from error
    return brax.adapt(env, env_id, brax.Limits(config.episode_length, config.action_repeat))


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping) or hasattr(value, "to_dict"):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
