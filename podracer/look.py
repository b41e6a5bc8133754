"""Shows a run: ``python -m podracer.look WORKDIR [--out=FILE.svg] [--width=N] [--verbose]``.

Prints the dashboard as of the newest row of metrics; with ``--out`` also writes it to an SVG file.
"""

import pathlib
import sys
from collections.abc import Sequence

from podracer.errors import ArgumentParser, run_command
from podracer.monitoring.console import show_run

PARSER = ArgumentParser(prog="python -m podracer.look", description="Shows the progress of a run.")
PARSER.add_argument("workdir", metavar="WORKDIR", help="The folder of a run")
PARSER.add_argument("--out", type=pathlib.Path, help="SVG file to write the dashboard to")
PARSER.add_argument("--width", type=int, help="Width in characters; default: the terminal's")
PARSER.add_argument("--verbose", action="store_true", help="Show all values of the newest row")


def _command(argv: Sequence[str] | None) -> None:
    show_run(**vars(PARSER.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` excludes the program's name. Returns the exit code."""
    return run_command(lambda: _command(argv))


if __name__ == "__main__":
    sys.exit(main())
