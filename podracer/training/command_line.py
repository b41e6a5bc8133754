"""The command line of training, the same for every architecture: flags in, exit code out.

Exit codes are those of ``errors.ExitCode``. After 42 and 130 the run has been saved.
"""

import inspect
import keyword
import multiprocessing
import os
import pathlib
import re
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from podracer.config import Config
from podracer.distributed import processes
from podracer.distributed.signals import SIGNALS
from podracer.errors import ConfigError, ExitCode, PreemptedError, run_command, unknown
from podracer.training.options import Options

# The function that defines a flag, its default and its description.
Flag = tuple[Callable[..., Any], Any, str]
# The options of a run besides its config, see ``options.Options``.
OPTIONS: dict[str, Flag] = {
    name: (define, getattr(Options, name), text)
    for name, (define, text) in {
        "workdir": (flags.DEFINE_string, "Folder or gs://...; default: runs/NAME_OF_THE_CONFIG"),
        "restart": (flags.DEFINE_bool, "Start over; an existing run in the workdir is moved aside"),
        "init_from": (flags.DEFINE_string, "Start from the last weights of this workdir's run"),
        "quiet": (flags.DEFINE_bool, "Print nothing but errors"),
        "verbose": (flags.DEFINE_bool, "Show all values of each row of metrics"),
        "coordinator": (flags.DEFINE_string, "HOST:PORT of process 0, if JAX detects no cluster"),
        "num_processes": (flags.DEFINE_integer, "Number of processes; 1 runs without others"),
        "process_id": (flags.DEFINE_integer, "Number of this process, from 0"),
        "profile": (flags.DEFINE_integer, "Write a trace of this many updates to WORKDIR/profile"),
    }.items()
}
CONFIG: Flag = (
    flags.DEFINE_string,
    None,
    "A config file, or the name of one that podracer ships; --config.KEY=VALUE changes a value",
)
PACKAGE = pathlib.Path(__file__).parents[1]


def shipped_configs() -> dict[str, pathlib.Path]:
    """The config files that podracer ships, by name.

    A wheel has them inside the package, a clone next to it.
    """
    inside = PACKAGE / "configs"
    folder = inside if inside.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(name: str) -> pathlib.Path:
    """The config file of this path, or the shipped one of this name.

    Raises:
      ConfigError: there is neither, or the file is not one of Python.
    """
    path, shipped = pathlib.Path(name), shipped_configs()
    if path.is_file():
        if path.suffix not in ("", ".py"):
            raise ConfigError(
                f"--config={name} is not a Python file that defines get_config(), such as "
                "configs/cartpole.py"
            )
        return path
    if name not in shipped:
        raise unknown("config", name, {*shipped, *map(str, path.parent.glob("*.py"))})
    return shipped[name]


def _load_config(path: pathlib.Path, arguments: Sequence[str]) -> ConfigDict:
    """The ``get_config(*arguments)`` of a config file."""
    # config_flags.DEFINE_config_file would load it with load_module(), which Python 3.15 removes,
    # and would load all config files of a process into one module.
    get_config = runpy.run_path(str(path)).get("get_config")
    if get_config is None:
        raise ConfigError(f"--config={path} defines no function get_config()")
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        given = ":".join([str(path), *arguments])
        raise ConfigError(f"--config={given} does not fit its get_config(): {error}") from error
    config = get_config(*arguments)
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"get_config() of --config={path} must return a ConfigDict, got {config!r}"
        )
    return config.unlock()


class _WholeNumberParser(flags.IntegerParser):
    """Also reads whole numbers that are written as floats: 1e6."""

    def convert(self, argument: Any) -> int:
        try:
            return super().convert(argument)
        except ValueError:
            pass
        try:
            number = float(argument)
        except ValueError:
            number = float("nan")
        if not number.is_integer():
            raise ValueError("must be a whole number")
        return int(number)


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(argument in ("-h", "--help", "-help") for argument in argv)


def _print_help(usage: str, known: Mapping[str, Flag]) -> NoReturn:
    # Without absl's own flags, and without the heading of the module that defines these.
    listed = _define(known).get_help(include_special_flags=False).partition(":\n")[2]
    print(f"usage: python -m podracer.{usage}\n\n{listed}")
    raise SystemExit(ExitCode.OK)


def _define(known: Mapping[str, Flag]) -> flags.FlagValues:
    values = flags.FlagValues()
    for name, (define, default, text) in known.items():
        define(name, default, text, flag_values=values)
    return values


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Parses all of a command line; raises ``ConfigError`` if something in it is wrong."""
    try:
        rest = values(list(argv))
    except flags.UnrecognizedFlagError as error:
        # A setting without the name of the config in front of it, or spelt with hyphens.
        setting = error.flagname.replace("-", "_")
        hint = "settings are flags as in --config.seed=1, listed in docs/settings.md"
        if hasattr(Config, setting):
            hint = f"did you mean --config.{setting}?"
        raise ConfigError(f"{error}; {hint}") from error
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    if len(rest) > 1:
        example = f"--workdir={rest[1]}" if os.path.isdir(rest[1]) else "--config.seed=1"
        raise ConfigError(
            f"unexpected arguments: {' '.join(rest[1:])}; flags take their value after an equals "
            f"sign, as in {example}"
        )


def parse_flags(usage: str, known: Mapping[str, Flag], argv: Sequence[str]) -> dict[str, Any]:
    """The values of a command's flags, by name.

    Args:
      usage: the command and its required flags, for the help text.
      known: the flags.
      argv: the command line, with the program's name first.

    Raises:
      ConfigError: an unknown flag or an impossible value.
    """
    if _asks_for_help(argv):
        _print_help(usage, known)
    values = _define(known)
    _parse(values, argv)
    return {name: values[name].value for name in known}


def parse_config(
    usage: str, known: Mapping[str, Flag], argv: Sequence[str]
) -> tuple[ConfigDict, pathlib.Path, dict[str, Any]]:
    """The config of a command line, the file it comes from, and the command's other flags.

    A key that the config does not have is added to it: the keys of ``env_params`` and
    ``env_kwargs`` belong to the environment, and ``config.parse`` rejects all others, with the
    nearest names.

    Args:
      usage: the command, for the help text.
      known: the flags besides ``--config``.
      argv: the command line, with the program's name first.

    Raises:
      ConfigError: an unknown flag or section, or an impossible value.
    """
    if _asks_for_help(argv):
        _print_help(f"{usage} --config=FILE", {"config": CONFIG, **known})
    name, rest = _take_config(argv)
    name, *arguments = name.split(":", 1)
    path = find_config(name)
    config = _load_config(path, arguments)
    _open_sections(config, rest)
    config_flags.register_flag_parser_for_type(int, _WholeNumberParser())
    values = _define(known)
    try:
        config_flags.DEFINE_config_dict(
            "config",
            config,
            flag_values=values,
            lock_config=False,
            accept_new_attributes=True,
            sys_argv=list(rest),
        )
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    _parse(values, rest)
    return config, path, {name: values[name].value for name in known}


def _open_sections(config: ConfigDict, argv: Sequence[str]) -> None:
    """Adds the sections that a command line names in ``--config.sweep.SECTION.KEY=``. Raises
    ``ConfigError`` if another section does not exist, or if a key can't be the name of a setting.
    """
    for argument in argv:
        flag = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if flag is None:
            continue
        section: Any = config
        prefix = ""
        *sections, key = flag[1].split(".")
        for name in sections:
            if name not in section and sections[0] == "sweep":
                section[name] = ConfigDict()
            items = section.items(preserve_field_references=True)
            known = [prefix + k for k, value in items if isinstance(value, ConfigDict)]
            if prefix + name not in known:
                raise unknown("config section", prefix + name, known)
            section, prefix = section[name], f"{prefix}{name}."
        if not key.isidentifier() or keyword.iskeyword(key):
            raise unknown("config key", prefix + key, (prefix + k for k in section))


def _take_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The value of ``--config``, and the command line without it."""
    values = _define({"config": CONFIG})
    values.set_gnu_getopt()
    try:
        rest = values(list(argv), known_only=True)
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    name = values["config"].value
    if not name:
        raise ConfigError(
            "--config is missing; specify a file, as in --config=my_config.py, or the name of a "
            f"config that podracer ships: {', '.join(shipped_configs())}"
        )
    return name, rest


def main(train: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Trains as a command line specifies, and returns the exit code.

    Args:
      train: an architecture's ``train(config, **options)``.
      argv: the command line, with the program's name first; None takes ``sys.argv``.
    """

    def command() -> None:
        usage = train.__module__.removeprefix("podracer.").removesuffix(".trainer")
        given = sys.argv if argv is None else argv
        config, path, options = parse_config(usage, OPTIONS, given)
        options["workdir"] = options["workdir"] or f"runs/{path.stem}"
        train(config, **options, command=["python", "-m", f"podracer.{usage}", *given[1:]])

    # This handler is in use until the loop installs its own, which saves the run first.
    before = {number: signal.signal(number, _end) for number in SIGNALS}
    try:
        return run_command(command)
    except SystemExit:
        # From --help, or from rich if the output is closed.
        if not processes.failed_alone():
            raise
        traceback.print_exc()
        return ExitCode.CRASHED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads or processes that may hang."""
    # A hanging thread can't be ended: Python would wait for it, or crash in its C++ code. JAX would
    # wait for the other processes, whose watchdogs are ending them.
    failed_alone = processes.failed_alone()
    hangs = any(thread is not threading.main_thread() for thread in threading.enumerate())
    if not failed_alone:
        jax.distributed.shutdown()
    if hangs or failed_alone:
        _exit(code)
    sys.exit(code)


def _exit(code: int) -> NoReturn:
    """Ends the process and its children at once."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(number: int, _: object) -> None:
    """Ends the process: there is nothing to save. An exception would be lost if the signal arrived
    while a library called back Python, as at the end of a garbage collection."""
    text = "before the first step; the same command starts the run again"

    def stop() -> NoReturn:
        if number == signal.SIGINT:
            raise KeyboardInterrupt(text)
        raise PreemptedError(f"stopped by SIGTERM {text}")

    code = ExitCode.PREEMPTED
    try:
        code = run_command(stop)
        _exit(code)
    finally:
        # What was interrupted may have been writing to the same stream.
        os._exit(code)
