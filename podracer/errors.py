"""Errors a person can act on: what was wrong, the value, and what would be right."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """An impossible setting, found before anything compiles. The commands exit with code 2."""

    code = 2


class DivergedError(RuntimeError):
    """A loss or a gradient became NaN or infinite. The commands exit with code 3."""

    code = 3


class ActorError(RuntimeError):
    """A thread of Sebulba failed or hangs. The commands exit with code 4."""

    code = 4


class SaveError(RuntimeError):
    """What a run has learned can't be written or read back. The commands exit with code 5."""

    code = 5


class DriftError(RuntimeError):
    """Devices that must hold the same weights don't. The commands exit with code 6."""

    code = 6


class PreemptedError(BaseException):
    """The system asked the run to end; it has been saved. The commands exit with code 42.

    Like ``KeyboardInterrupt`` no ``Exception``: what tries again after a failure must not take it
    for one.
    """

    code = 42


ERRORS = (ConfigError, DivergedError, ActorError, SaveError, DriftError, PreemptedError)
OK, FAILED, INTERRUPTED = 0, 1, 130


def code_of(error: BaseException | None) -> int:
    """The exit code of a command that ends by this error, if by one."""
    if error is None:
        return OK
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.code if isinstance(error, ERRORS) else FAILED


def check_kwargs(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if an environment's maker does not take these ``env_kwargs``."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} does not take env_kwargs={dict(kwargs)}: {error}") from error


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest ones that do.

    Args:
      kind: what was looked up, as a reader would call it ("agent", "config key").
      name: the name that was not found.
      known: every name that would have been.
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if near:
        return ConfigError(f"unknown {kind} {name!r}; did you mean {' or '.join(near)}?")
    return ConfigError(f"unknown {kind} {name!r}; known are {', '.join(known)}")
