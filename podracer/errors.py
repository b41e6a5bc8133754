"""Errors that a person can act on, and the exit codes that commands end with."""

import difflib
import enum
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

# The name for pip: on the package index, "podracer" is a podcast library.
DISTRIBUTION = "podracer-rl"


class ExitCode(enum.IntEnum):
    """How a command ended. Launchers start it again unless the code is one of ``FINAL``."""

    OK = 0
    CRASHED = 1
    CONFIG = 2
    DIVERGED = 3
    STALLED = 4
    NOT_SAVED = 5
    DRIFTED = 6
    DISPLACED = 7
    PREEMPTED = 42
    TRANSIENT = 75
    INTERRUPTED = 130


FINAL = frozenset(
    {
        ExitCode.OK,
        ExitCode.CONFIG,
        ExitCode.DIVERGED,
        ExitCode.DISPLACED,
        ExitCode.INTERRUPTED,
    }
)


class ConfigError(ValueError):
    """An impossible setting, found before anything compiles: the user must change something."""

    code: ClassVar[ExitCode] = ExitCode.CONFIG


class DivergedError(RuntimeError):
    """A loss or a gradient became NaN or infinite."""

    code: ClassVar[ExitCode] = ExitCode.DIVERGED


class ActorError(RuntimeError):
    """A thread of Sebulba failed or hangs."""

    code: ClassVar[ExitCode] = ExitCode.STALLED


class SaveError(RuntimeError):
    """The state of a run cannot be written or read back."""

    code: ClassVar[ExitCode] = ExitCode.NOT_SAVED


class DriftError(RuntimeError):
    """Devices that must hold the same weights do not."""

    code: ClassVar[ExitCode] = ExitCode.DRIFTED


class DisplacedError(RuntimeError):
    """The workdir now belongs to another run, which must not be displaced in turn."""

    code: ClassVar[ExitCode] = ExitCode.DISPLACED


class TransientError(RuntimeError):
    """Storage or the network failed even after retries; the same command may work later."""

    code: ClassVar[ExitCode] = ExitCode.TRANSIENT


class PreemptedError(BaseException):
    """The system asked the run to end, with SIGTERM.

    Like ``KeyboardInterrupt`` it is not an ``Exception``: code that retries after a failure must
    not treat it as one.
    """

    code: ClassVar[ExitCode] = ExitCode.PREEMPTED


ERRORS = (
    ConfigError,
    DivergedError,
    ActorError,
    SaveError,
    DriftError,
    DisplacedError,
    TransientError,
    PreemptedError,
)


def code_of(error: BaseException | None) -> ExitCode:
    """The exit code of a command that ends with this error; None is success."""
    if error is None:
        return ExitCode.OK
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return error.code if isinstance(error, ERRORS) else ExitCode.CRASHED


def run_command(command: Callable[[], Any]) -> ExitCode:
    """Runs a command, prints an expected error in one line, and returns the exit code."""
    try:
        command()
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def check_kwargs(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if an environment's maker does not take these ``env_kwargs``."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} does not take env_kwargs={dict(kwargs)}: {error}") from error


def missing_extra(extra: str, feature: str) -> ConfigError:
    """The error for an optional dependency that is not installed, with the commands to install it.

    Args:
      extra: name of the extra in ``pyproject.toml`` that brings the packages.
      feature: what needs them, as the subject of a sentence ("logging.wandb=True").
    """
    return ConfigError(
        f"{feature} needs packages that are not installed; install them with "
        f"pip install '{DISTRIBUTION}[{extra}]', or in a clone with pip install -e '.[{extra}]'"
    )


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the nearest ones that do.

    Args:
      kind: what was looked up, as a reader would call it ("agent", "config key").
      name: the name that was not found.
      known: all names that exist.
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if near:
        return ConfigError(f"unknown {kind} {name!r}; did you mean {' or '.join(near)}?")
    return ConfigError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
