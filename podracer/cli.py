"""The command line, the same for every architecture: flags in, exit code out.

Exit codes: 0 done; 2 an impossible setting, found before anything compiled; 3 a loss or gradient
became NaN or infinite; 4 an actor thread failed or hangs; 5 the run can't be saved or read back;
42 ended by SIGTERM, to be started again; 130 interrupted. After 42 and 130 the run has been saved.
"""

import ast
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from podracer.config import default_config
from podracer.errors import (
    ActorError,
    ConfigError,
    DivergedError,
    PreemptedError,
    SaveError,
    unknown,
)
from podracer.session import Options

# What a run is given beside its config, see ``session.Options``.
OPTIONS: dict[str, tuple[Any, str]] = {
    "workdir": (flags.DEFINE_string, "The run's folder; default: runs/NAME_OF_THE_CONFIG"),
    "restart": (flags.DEFINE_bool, "Begin anew; a run that is in the workdir moves aside"),
    "init_from": (flags.DEFINE_string, "Workdir of another run, whose last weights to begin with"),
    "quiet": (flags.DEFINE_bool, "Print nothing but errors"),
    "verbose": (flags.DEFINE_bool, "Show all values of each row of metrics"),
    "profile": (flags.DEFINE_integer, "Write a trace of so many updates into WORKDIR/profile"),
}
# Sections whose keys are an environment's to know.
OPEN_SECTIONS = ("env_params", "env_kwargs")
OK, BAD_CONFIG, DIVERGED, ACTOR, UNSAVED, PREEMPTED, INTERRUPTED = 0, 2, 3, 4, 5, 42, 130
CODES = {
    ConfigError: BAD_CONFIG,
    DivergedError: DIVERGED,
    ActorError: ACTOR,
    SaveError: UNSAVED,
    PreemptedError: PREEMPTED,
}


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
    except tuple(CODES) as error:
        print(f"error: {error}", file=sys.stderr)
        return CODES[type(error)]
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
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    raise PreemptedError(
        "asked to end by SIGTERM, before the first step; the same command begins again"
    )
