"""Builds frozen dataclasses from dictionaries; errors name the setting and the valid values.

dacite does the same, but its error for an unknown key omits the section that the key is in, and it
accepts True for a whole number and NaN for a float.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from podracer.errors import ConfigError, unknown

if TYPE_CHECKING:

    class SettingsDict(ConfigDict):
        """A ``ConfigDict`` whose sections type checkers accept in ``config.network.core = "gru"``;
        by the library's own types such a line is an error."""

        def __getattr__(self, attribute: str) -> Any: ...

else:
    SettingsDict = ConfigDict


def from_mapping(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A frozen dataclass of these values, with nested dataclasses from nested dictionaries.

    Args:
      cls: the dataclass.
      values: values by field name; fields left out keep their defaults.
      prefix: the dotted name of a nested dataclass and a dot, for errors.

    Raises:
      ConfigError: an unknown name, or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    built = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise unknown("config key", name, (f"{prefix}{k}" for k in fields))
        built[key] = _convert(fields[key].type, value, name)
    return cls(**built)


# For each type of a field: what its values must be, and whether a value is valid.
_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda x: type(x) is bool),
    int: ("a whole number", lambda x: type(x) is int),
    float: ("a finite number", lambda x: isinstance(x, float) and math.isfinite(x)),
    str: ("a string", lambda x: type(x) is str),
    tuple[int, ...]: (
        "a tuple of whole numbers",
        lambda x: isinstance(x, tuple) and all(type(i) is int for i in x),
    ),
    Mapping[str, Any]: ("a dictionary", lambda x: isinstance(x, Mapping)),
}


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Converts a value to its field's type: 3 is accepted as 3.0, 3.0 as 3, a list as a tuple."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a section of settings, got {value!r}")
        return from_mapping(kind, value, f"{name}.")
    if kind is float and type(value) is int:
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        value = tuple(value)
    expected, fits = _TYPES[kind]
    if not fits(value):
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
    return value
