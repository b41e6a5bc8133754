"""What adapters of suites share: importing a suite, and checking the arguments it is given."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from podracer.errors import ConfigError, missing_extra, unknown


def import_suite(module: str, extra: str) -> ModuleType:
    """Imports a suite that may not be installed.

    Args:
      module: the module to import.
      extra: the extra that installs it, which is also the suite's name in ids of environments.

    Raises:
      ConfigError: the suite, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra(extra, f"an environment '{extra}:...'") from error


def check_names(
    name: str, changes: Mapping[str, Any], known: Iterable[str], section: str = "env_params"
) -> None:
    """Raises ``ConfigError`` if an argument is not among the known ones.

    Args:
      name: id of the environment, for the error.
      changes: the arguments, by name.
      known: the names that exist.
      section: the setting that holds the arguments.
    """
    known = list(known)
    if changes and not known:
        raise ConfigError(f"{name} has no {section}, got {dict(changes)}")
    for key in changes:
        if key not in known:
            raise unknown(f"parameter of {name} in {section}", key, known)


def change_fields(
    name: str, record: Any, changes: Mapping[str, Any], section: str = "env_params"
) -> Any:
    """A dataclass with other values in some fields.

    Args:
      name: id of the environment, for errors.
      record: the dataclass, with the default values.
      changes: new values, by field.
      section: the setting that holds them.

    Raises:
      ConfigError: no such field, or a value of another type.
    """
    check_names(name, changes, record.__dataclass_fields__, section)
    for key, value in changes.items():
        default = getattr(record, key)
        if not np.can_cast(np.asarray(value).dtype, np.asarray(default).dtype, "same_kind"):
            raise ConfigError(f"{section}.{key} of {name} is {default!r}, got {value!r}")
    return record.replace(**changes)


def parameter_names(*functions: Callable[..., Any]) -> list[str]:
    """The names of the keyword arguments that functions take, but for collections of them."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [x for f in functions for x in inspect.signature(f).parameters.values()]
    return [x.name for x in parameters if x.kind in kinds and x.name != "self"]


def import_own(env_id: str, name: str) -> ModuleType:
    """Imports the module that an environment's id names.

    Args:
      env_id: the id, for the error.
      name: the module's name.

    Raises:
      ConfigError: there is no such module; one that this module imports is an error of its own.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"env={env_id!r}: there is no module {error.name!r}") from error
