"""Which environments may run code that their user has not chosen.

A workdir names an environment and its arguments, and may come from a stranger. Environments that
installed packages register are safe to make, as long as their arguments are numbers.
"""

from collections.abc import Mapping
from typing import Any

from podracer.errors import ConfigError

# Suites that register all of their environments, none of which uses a string as a file name.
SAFE_SUITES = (
    "gymnax", "brax", "craftax", "jumanji", "navix", "pgx", "playground", "grid", "dummy",
)  # fmt: skip
# Suites of which some environments open a file or start a program that an argument specifies, as
# ViZDoom does with vzd_path. XLand-MiniGrid downloads and unpickles the benchmark that it is given.
OTHER_SUITES = ("gymnasium", "envpool", "xminigrid")


def _strings(name: str, value: Any) -> list[str]:
    """Every string in a JSON value, as NAME='STRING'."""
    if isinstance(value, str):
        return [f"{name}={value!r}"]
    if isinstance(value, Mapping):
        nested = {f"{name}.{key}": x for key, x in value.items()}
    elif isinstance(value, list | tuple):
        nested = {f"{name}[{i}]": x for i, x in enumerate(value)}
    else:
        return []
    return [string for key, x in nested.items() for string in _strings(key, x)]


def needs_permission(env_id: str, kwargs: Mapping[str, Any]) -> str | None:
    """Why making an environment may run code that no installed package has registered.

    Args:
      env_id: see ``envs.make_environment`` and ``envs.make_host_environment``.
      kwargs: keyword arguments of its constructor.

    Returns:
      The reason, as the predicate of a sentence; None if there is no such risk.
    """
    suite, _, name = env_id.partition(":")
    if suite in SAFE_SUITES:
        return None
    if suite not in OTHER_SUITES:
        return f"imports the module {suite!r}"
    module, colon, _ = name.partition(":")
    if colon:
        return f"imports the module {module!r}"
    strings = _strings("env_kwargs", kwargs)
    return f"has {strings[0]}, which may name a file or a program" if strings else None


def check_permission(env_id: str, kwargs: Mapping[str, Any], allowed: str | None) -> None:
    """Raises ``ConfigError`` if an environment needs permission and does not have it.

    Args:
      env_id: the environment that a workdir names.
      kwargs: keyword arguments of its constructor.
      allowed: the id of the environment that the user permits.
    """
    reason = needs_permission(env_id, kwargs)
    if reason is not None and env_id != allowed:
        raise ConfigError(
            f"the workdir's environment {env_id!r} {reason}; if you trust the workdir, add "
            f"--allow_env={env_id} (from Python: allow_env={env_id!r})"
        )
