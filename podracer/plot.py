"""Draws learning curves: ``python -m podracer.plot WORKDIR ... [--out=curves]``.

Writes ``curves.png`` and ``curves.svg`` and prints a table. Runs that differ only in their seed, as
the agents of one with ``num_seeds``, have one curve: the mean with its 95 % Student-t interval.
"""

import argparse
import sys
from collections.abc import Sequence

from podracer.errors import ArgumentParser, run_command
from podracer.monitoring import figures

PARSER = ArgumentParser(
    prog="python -m podracer.plot",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("runs", nargs="+", metavar="WORKDIR", help="The folder of a run")
PARSER.add_argument("--out", default="curves", help="Path without .png and .svg, or with .pdf")
PARSER.add_argument(
    "--metric", help=f"Metric to draw; default: {figures.RETURN}, of sweeps {figures.EVALUATION}"
)
PARSER.add_argument("--x", default="both", choices=figures.X, help="x axis of the figure")
PARSER.add_argument(
    "--smooth", type=int, default=1, metavar="ROWS", help="Average each point over as many rows"
)
PARSER.add_argument(
    "--label",
    action="append",
    default=[],
    metavar="SETTING",
    help="A setting to name in labels, and again for more of them; default: all that differ",
)
PARSER.add_argument(
    "--name", action="append", default=[], help="A curve's name; one for each, in the runs' order"
)
PARSER.add_argument(
    "--sweep", action="store_true", help="Draw the agents of one sweep, and their settings"
)


def _command(argv: Sequence[str] | None) -> None:
    args = vars(PARSER.parse_args(argv))
    plot, metric = figures.plot_runs, figures.RETURN
    if args.pop("sweep"):
        from podracer.monitoring import sweeps  # This imports JAX, which takes a second.

        plot, metric = sweeps.plot_sweep, figures.EVALUATION
    plot(**{**args, "metric": args["metric"] or metric})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` excludes the program's name. Returns the exit code."""
    return run_command(lambda: _command(argv))


if __name__ == "__main__":
    sys.exit(main())
