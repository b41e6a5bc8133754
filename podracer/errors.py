"""Errors that a person can act on, and the exit codes that commands end with."""

import argparse
import difflib
import enum
import inspect
import pathlib
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn

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


PACKAGE = pathlib.Path(__file__).parent
PAGE = "docs/troubleshooting.md"
# The sections of the page that list the messages of a file or folder; the longest name that fits
# counts.
SECTIONS = {
    "": "config",
    "__main__.py": "starting-a-run",
    "acting/policy.py": "evaluating-and-comparing-runs",
    "acting/rendering.py": "evaluating-and-comparing-runs",
    "distributed/": "devices-and-several-hosts",
    "distributed/signals.py": "exit-codes",
    "doctor.py": "doctor",
    "envs/": "environments",
    "envs/permission.py": "evaluating-and-comparing-runs",
    "evaluate/": "evaluating-and-comparing-runs",
    "look.py": "evaluating-and-comparing-runs",
    "match.py": "evaluating-and-comparing-runs",
    "monitoring/": "evaluating-and-comparing-runs",
    "monitoring/writers.py": "live-view-tensorboard-weights--biases",
    "plan/": "tpu-planning",
    "plot.py": "evaluating-and-comparing-runs",
    "remote/": "remote-workers",
    "sebulba/threads.py": "a-thread-fails-or-hangs",
    "storage/": "saving-and-resuming",
    "storage/workdir.py": "workdirs",
    "training/agreement.py": "devices-and-several-hosts",
    "training/command_line.py": "starting-a-run",
    "training/match.py": "evaluating-and-comparing-runs",
    "training/memory.py": "memory",
    "training/options.py": "live-view-tensorboard-weights--biases",
    "training/rows.py": "divergence",
    "training/saved_run.py": "evaluating-and-comparing-runs",
    "worker/": "remote-workers",
}
CRASH = "a-crash"


def section_of(file: str) -> str:
    """The section of the page that lists the messages of a file, given its path in the package."""
    return SECTIONS[max((name for name in SECTIONS if file.startswith(name)), key=len)]


def see(section: str) -> str:
    """The line below an error that says where it is explained."""
    return f"See {PAGE}#{section}"


def _own_section() -> str:
    """The section for the function outside this module that raises an error."""
    frame = sys._getframe()
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        if PACKAGE in path.parents and path != pathlib.Path(__file__):
            return section_of(path.relative_to(PACKAGE).as_posix())
        frame = frame.f_back
    return "exit-codes"


class _Explained(BaseException):
    """An error with a note that says where it is explained; Python prints the note below it."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self.add_note(see(_own_section()))


class ConfigError(_Explained, ValueError):
    """An impossible setting, found before anything compiles: the user must change something."""

    code: ClassVar[ExitCode] = ExitCode.CONFIG


class DivergedError(_Explained, RuntimeError):
    """A loss or a gradient became NaN or infinite."""

    code: ClassVar[ExitCode] = ExitCode.DIVERGED


class ActorError(_Explained, RuntimeError):
    """A thread of Sebulba failed or hangs."""

    code: ClassVar[ExitCode] = ExitCode.STALLED


class SaveError(_Explained, RuntimeError):
    """The state of a run cannot be written or read back."""

    code: ClassVar[ExitCode] = ExitCode.NOT_SAVED


class DriftError(_Explained, RuntimeError):
    """Devices that must hold the same weights do not."""

    code: ClassVar[ExitCode] = ExitCode.DRIFTED


class DisplacedError(_Explained, RuntimeError):
    """The workdir now belongs to another run, which must not be displaced in turn."""

    code: ClassVar[ExitCode] = ExitCode.DISPLACED


class TransientError(_Explained, RuntimeError):
    """Storage or the network failed even after retries; the same command may work later."""

    code: ClassVar[ExitCode] = ExitCode.TRANSIENT


class PreemptedError(_Explained):
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


def _output_is_closed() -> bool:
    """Whether nobody reads what is printed any more, as after ``| head``."""
    poll = select.poll()
    poll.register(1)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def run_command(command: Callable[[], Any]) -> ExitCode:
    """Runs a command and returns the exit code.

    An expected error is printed in one line, any other one with its traceback. A line below it says
    where it is explained.
    """
    try:
        command()
    except ERRORS as error:
        # JAX adds notes of its own, on what it has removed from the traceback.
        print(f"error: {error}\n{error.__notes__[0]}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".rstrip(), file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return ExitCode.CRASHED
        # Printed here, because Python would first wait for threads and other processes.
        error.add_note(see(CRASH))
        traceback.print_exc()
        return ExitCode.CRASHED
    return ExitCode.OK


class ArgumentParser(argparse.ArgumentParser):
    """Reads a command line; a mistake in it becomes a ``ConfigError``."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the arguments")


def check_kwargs(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if an environment's maker does not take these ``env_kwargs``."""
    signature = inspect.signature(function)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = signature.parameters
        any_name = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
        wrong = next((key for key in kwargs if key not in known), None)
        reason = error
        if wrong is not None and known and not any_name:
            reason = unknown("argument", wrong, known)
        raise ConfigError(f"{name} does not take env_kwargs={dict(kwargs)}: {reason}") from error


def missing_extra(extra: str, feature: str) -> ConfigError:
    """The error for an optional dependency that is not installed, with the commands to install it.

    Args:
      extra: name of the extra in ``pyproject.toml`` that brings the packages.
      feature: what needs them, as the subject of a sentence ("logging.wandb=True").
    """
    return ConfigError(
        f"{feature} needs packages that are not installed; install them in the clone of podracer "
        f"with pip install -e '.[{extra}]'"
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
