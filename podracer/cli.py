"""The command line, the same for every architecture: flags in, exit code out.

Exit codes: 0 done; 2 an impossible setting, found before anything compiled; 3 a loss or gradient
became NaN or infinite; 4 an actor thread failed or hangs, or another process is gone; 5 the run
can't be saved or read back; 6 devices that must hold the same weights don't; 42 ended by SIGTERM,
to be started again; 130 interrupted. After 42 and 130 the run has been saved.
"""

import ast
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from podracer import processes
from podracer.config import default_config
from podracer.errors import (
    ERRORS,
    FAILED,
    INTERRUPTED,
    OK,
    ConfigError,
    PreemptedError,
    code_of,
    unknown,
)
from podracer.session import Options

# What a run is given beside its config, see ``session.Options``.
OPTIONS: dict[str, tuple[Any, str]] = {
    "workdir": (flags.DEFINE_string, "Folder or gs://...; default: runs/NAME_OF_THE_CONFIG"),
    "restart": (flags.DEFINE_bool, "Begin anew; a run that is in the workdir moves aside"),
    "init_from": (flags.DEFINE_string, "Workdir of another run, whose last weights to begin with"),
    "quiet": (flags.DEFINE_bool, "Print nothing but errors"),
    "verbose": (flags.DEFINE_bool, "Show all values of each row of metrics"),
    "coordinator": (flags.DEFINE_string, "HOST:PORT of process 0, where JAX finds no cluster"),
    "num_processes": (flags.DEFINE_integer, "Processes in all; 1 runs this one alone"),
    "process_id": (flags.DEFINE_integer, "Of this process, from 0 on"),
    "profile": (flags.DEFINE_integer, "Write a trace of so many updates into WORKDIR/profile"),
}
# Sections whose keys are an environment's to know.
OPEN_SECTIONS = ("env_params", "env_kwargs")
BAD_CONFIG, DIVERGED, ACTOR, UNSAVED, DRIFTED, PREEMPTED = (error.code for error in ERRORS)


def _config_path(argv: Sequence[str]) -> pathlib.Path:
    """The file that ``--config`` names, without the argument that may follow after a colon."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            path = pathlib.Path((value if equals else following).partition(":")[0])
            if not path.is_file():
                files = sorted(str(p) for p in path.parent.glob("*.py"))
                there = f"; there are {', '.join(files)}" if files else ""
                raise ConfigError(f"--config={path} is no file{there}")
            return path
    raise ConfigError("--config is missing; give a file, as --config=configs/cartpole.py")


def _check_keys(argv: Sequence[str]) -> None:
    """Names the nearest keys where ``--config.KEY`` is none."""
    known = set(_leaves(default_config().to_dict()))
    for argument in argv:
        if argument.startswith(("--config.", "-config.", "--noconfig.")):
            key = argument.partition("=")[0].partition(".")[2]
            if key not in known:
                raise unknown("config key", key, known)


def _take_settings(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str, Any]]]:
    """Takes out what is an environment's own to know: ``--config.env_params.KEY=VALUE``.

    Returns:
      The other arguments, and (section, key, value) of each that was taken.
    """
    rest, taken = [], []
    for argument in argv:
        name, equals, text = argument.partition("=")
        _, _, key = name.partition("config.")
        section, dot, key = key.partition(".")
        if not (argument.startswith("-") and dot and section in OPEN_SECTIONS):
            rest.append(argument)
            continue
        if not equals:
            raise ConfigError(f"{name} needs its value after an equals sign: {name}=VALUE")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        taken.append((section, key, value))
    return rest, taken


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def parse_config(argv: Sequence[str], values: flags.FlagValues) -> tuple[Any, pathlib.Path]:
    """The config of a command line, and the file that it is from.

    Args:
      argv: with the program's name first.
      values: the command's own flags; they have their values afterwards.

    Raises:
      ConfigError: an unknown flag or key, or an impossible value.
    """
    argv, settings = _take_settings(argv)
    config = config_flags.DEFINE_config_file(
        "config",
        help_string="The run's configuration; --config.KEY=VALUE changes a value in it.",
        lock_config=True,
        flag_values=values,
        sys_argv=list(argv),
    )
    if any(argument in ("-h", "--help", "-help") for argument in argv):
        print(f"usage: python -m podracer.COMMAND --config=FILE\n{values.get_help()}")
        raise SystemExit(OK)
    path = _config_path(argv)
    _check_keys(argv)
    try:
        rest = values(list(argv))
    except AttributeError as error:
        if "get_config" in str(error):
            raise ConfigError(f"--config={path} defines no function get_config()") from error
        raise ConfigError(str(error).strip('"')) from error
    except (flags.Error, KeyError, TypeError) as error:
        raise ConfigError(str(error).strip('"')) from error
    if len(rest) > 1:
        raise ConfigError(f"unexpected arguments: {' '.join(rest[1:])}")
    with config.value.unlocked():
        for section, key, value in settings:
            config.value[section][key] = value
    return config.value, path


def _parse(argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The config of a command line, and the run's other options."""
    values = flags.FlagValues()
    for name, (define, text) in OPTIONS.items():
        define(name, getattr(Options, name), text, flag_values=values)
    config, path = parse_config(argv, values)
    options = {name: values[name].value for name in OPTIONS}
    return config, {**options, "workdir": options["workdir"] or f"runs/{path.stem}"}


def exit_code(command: Callable[[], Any]) -> int:
    """Runs a command and says in one line what went wrong; returns the exit code."""
    try:
        command()
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return OK


def main(train: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Trains as a command line says.

    Args:
      train: an architecture's ``train(config, **options)``.
      argv: with the program's name first; None takes ``sys.argv``.

    Returns:
      The exit code.
    """

    def command() -> None:
        config, options = _parse(sys.argv if argv is None else argv)
        train(config, **options)

    # Until the loop takes over, which saves the run first.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return exit_code(command)
    except (Exception, SystemExit):
        # Python would wait for the other processes before it tells the error. (rich ends a process
        # whose output is closed.)
        if not processes.forsaken():
            raise
        traceback.print_exc()
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: int) -> NoReturn:
    """Ends the process, and does not wait for what may never come."""
    # A thread that hangs can't be ended: Python would wait for it, or crash in its C++. JAX would
    # wait for the other processes, which are being ended by their watchdogs.
    forsaken = processes.forsaken()
    hangs = any(thread is not threading.main_thread() for thread in threading.enumerate())
    if not forsaken:
        jax.distributed.shutdown()
    if hangs or forsaken:
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end(*_: object) -> None:
    raise PreemptedError(
        "asked to end by SIGTERM, before the first step; the same command begins again"
    )
