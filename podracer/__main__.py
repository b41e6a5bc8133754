"""``podracer COMMAND ...``, the same as ``python -m podracer.COMMAND ...``."""

import os
import runpy
import sys
from collections.abc import Sequence

import podracer
from podracer.errors import ExitCode, run_command, unknown

COMMANDS = {
    "anakin": "train in environments written in JAX",
    "sebulba": "train in host environments: envpool and Gymnasium",
    "worker": "step environments for Sebulba on another machine",
    "evaluate": "evaluate a saved run, and draw an episode as a GIF",
    "match": "play games of two players between saved runs, or rate checkpoints",
    "plot": "draw the learning curves of runs",
    "look": "show the progress of a run",
    "doctor": "check what works on this machine, and say what to do about the rest",
    "plan": "estimate memory and speed on a TPU slice, with the TPU compiler",
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    first, last = "usage: podracer COMMAND [...]", "Options of a command: podracer COMMAND --help"
    return "\n".join([first, "", *lines, "", last, "Version: podracer --version"])


def run(argv: Sequence[str]) -> None:
    """Runs a command line without the program's name; a command ends with ``SystemExit``."""
    name, *arguments = argv
    if name in ("-h", "--help", "help"):
        print(usage())
    elif name == "--version":
        print(f"podracer {podracer.__version__}")
    elif name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    else:
        sys.argv[1:] = arguments
        # As for ``python -m``, so that a user's own environments are found.
        if not sys.flags.safe_path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        # Imported only here, so that a command can set environment variables before JAX starts.
        runpy.run_module(f"podracer.{name}", run_name="__main__", alter_sys=True)


def main() -> int:
    """The ``podracer`` command. Returns the exit code."""
    if len(sys.argv) < 2:
        print(usage(), file=sys.stderr)
        return ExitCode.CONFIG
    return run_command(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
