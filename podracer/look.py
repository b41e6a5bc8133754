"""``python -m podracer.look WORKDIR [--out=FILE.svg] [--width=N] [--verbose]``: a run's view again.

Prints the live view as it was when the newest row came, and draws it into a file for a document.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from etils import epath
from rich.console import Console

from podracer import bucket
from podracer import view as view_lib
from podracer import workdir as workdir_lib
from podracer.errors import ConfigError
from podracer.view import View


def read(workdir: epath.PathLike) -> View:
    """The view of a run, from its files.

    Raises:
      ConfigError: there is no run in this folder.
    """
    about, rows = workdir_lib.read_config(workdir), workdir_lib.read_rows(workdir)
    summary = bucket.locate(workdir) / workdir_lib.SUMMARY
    # Only a run that is over knows what all of its time went to.
    seconds = json.loads(bucket.read(summary))["seconds"] if summary.exists() else {}
    view = View(view_lib.title(about["config"]), about["sizes"]["total_steps"])
    for row in rows:
        view = view_lib.extend(view, row, seconds, {})
    return view


def main(argv: Sequence[str] | None = None) -> int:
    """Shows a run as a command line says; the exit code is 2 where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m podracer.look", description="Shows how a run went, or goes."
    )
    parser.add_argument("workdir")
    parser.add_argument("--out", type=pathlib.Path, help="an SVG file to draw the view into")
    parser.add_argument("--width", type=int, help="in characters; default: the terminal's")
    parser.add_argument("--verbose", action="store_true", help="all values of the newest row")
    arguments = parser.parse_args(argv)
    console = Console(width=arguments.width, record=arguments.out is not None, highlight=False)
    try:
        view = read(arguments.workdir)
        console.print(view_lib.render(view, console.width, verbose=arguments.verbose))
        if arguments.out is not None:
            console.save_svg(str(arguments.out), title=f"podracer: {arguments.workdir}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
