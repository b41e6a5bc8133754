"""Learning curves: of many runs for a paper, and of each run at its end.

    python -m podracer.plot runs/ppo-0 runs/ppo-1 runs/vtrace-0 ... --out=curves

writes ``curves.png`` and ``curves.svg`` and prints a table. ``curves.py`` has what is drawn: a line
for each group of runs that differ only in their seed, the mean over seeds with the 95 % Student-t
interval of that mean; one seed is just a line.
"""

import argparse
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podracer import view
from podracer.curves import INTERVAL, Group, curve, group_runs, read_run
from podracer.errors import ConfigError
from podracer.workdir import LEARNING_CURVE, read_config, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib is imported where something is drawn, so that importing this is quick; pyplot never is:
# its state is the whole process's, which may be a notebook or have threads.

RETURN, EVALUATION = "train/episode_return", "eval/episode_return"
X = {"step": ["step"], "time": ["wall_time"], "both": ["step", "wall_time"]}
X_LABELS = {"step": "environment steps", "wall_time": "wall-clock time (s)"}
# Okabe and Ito's, which colour-blind readers can tell apart; then the same with other dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
OK, BAD_CONFIG = 0, 2


def _new_axes(width: float, height: float, panels: int = 1) -> "tuple[Figure, list[Axes]]":
    """In inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="0.9", linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def _format_x(axes: "Axes", x: str) -> None:
    """From zero on, with 1e6 steps as 1M."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel(X_LABELS[x])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if x == "step":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw(groups: Sequence[Group], metric: str, x: Sequence[str], smooth: int = 1) -> "Figure":
    """Draws groups, a panel for each of ``x``.

    Args:
      groups: of runs, read for this metric.
      metric: its name, for the axis.
      x: of "step" and "wall_time".
      smooth: see ``curves.curve``.
    """
    width = 6 if len(x) == 1 else 9
    labels, columns, lines = _legend(groups, width)
    figure, axes = _new_axes(width, 3 + 0.2 * lines, len(x))
    for panel, name in zip(axes, x, strict=True):
        for number, group in enumerate(groups):
            found = curve(group, smooth)
            style: dict[str, Any] = {
                "color": COLORS[number % len(COLORS)],
                "linestyle": DASHES[number // len(COLORS) % len(DASHES)],
                "label": labels[number],
            }
            at, mean, half = found.x[name], found.mean, found.half
            if len(at) == 1:
                panel.errorbar(at, mean, half, fmt="o", capsize=3, **style)
                continue
            panel.plot(at, mean, linewidth=1.5, **style)
            if half is not None:
                low, high = mean - half, mean + half
                panel.fill_between(at, low, high, color=style["color"], alpha=0.2, linewidth=0)
        _format_x(panel, name)
    axes[0].set_ylabel(metric)
    environments = {run.config["env"] for group in groups for run in group.runs}
    if len(environments) == 1:
        figure.suptitle(environments.pop(), fontsize="medium")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        title=_caption(groups, smooth),
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    return figure


def _legend(groups: Sequence[Group], width: int) -> tuple[list[str], int, int]:
    """Labels, and how many columns and lines they fill below a figure of this width in inches."""
    characters = 12 * width
    labels = []
    for label, runs in groups:
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        labels.append(textwrap.fill(f"{label} ({seeds})", characters))
    # Eight for the piece of line beside a label and the gap to the next.
    columns = max(1, characters // (max(map(len, labels)) + 8))
    longest = max(label.count("\n") + 1 for label in labels)
    return labels, columns, -(-len(labels) // columns) * longest


def _caption(groups: Sequence[Group], smooth: int) -> str:
    several = any(len(group.runs) > 1 for group in groups)
    caption = f"mean over seeds and its {INTERVAL}" if several else "one seed each"
    return caption + (f"; smoothed over {smooth} rows" if smooth > 1 else "")


def _number(mean: float, half: float | None = None) -> str:
    """Four digits, or all before the point."""
    digits = int(np.clip(3 - np.floor(np.log10(abs(mean) or 1)), 0, 4))
    return f"{mean:,.{digits}f}" + ("" if half is None else f" ± {half:,.{digits}f}")


def tabulate(groups: Sequence[Group], metric: str, smooth: int = 1) -> Table:
    """A row for each group: what its curve by steps comes to, and the time its runs took.

    "steps" is the last that all seeds have reached, "final" the mean there with its interval,
    "best" the mean's highest point; "seconds" and "steps/s" are means over seeds.
    """
    table = Table(caption=f"{metric}: {_caption(groups, smooth)}", caption_justify="left")
    table.add_column("group", overflow="fold")
    for name in ("seeds", "steps", "final", "best", "seconds", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        (label, runs), found = group, curve(group, smooth)
        table.add_row(
            Text(label),
            str(len(runs)),
            f"{found.x['step'][-1]:,.0f}",
            _number(found.mean[-1], None if found.half is None else found.half[-1]),
            _number(found.mean.max()),
            f"{np.mean([run.seconds for run in runs]):,.1f}",
            f"{np.mean([run.steps_per_second for run in runs]):,.0f}",
        )
    return table


def _notes(groups: Sequence[Group], metric: str) -> Iterator[str]:
    """What a reader of the picture would not see."""
    for run in (run for group in groups for run in group.runs):
        if run.steps < run.total_steps:
            yield (
                f"{run.workdir} is unfinished, at {run.steps:,} of {run.total_steps:,} steps; "
                "its group is drawn as far as all its seeds go"
            )
        if run.missing:
            yield f"{run.workdir}: {metric} was not finite in {run.missing} rows, left out"


def draw_run(workdir: str | os.PathLike[str]) -> pathlib.Path | None:
    """Draws a run into its own folder: returns in training, and evaluations with their deviation.

    Returns:
      The picture, or None where no episode ended in training.
    """
    content, rows = read_config(workdir), read_rows(workdir)
    train = [(row["step"], row[RETURN]) for row in rows if RETURN in row]
    if not train:
        return None
    config = content["config"]
    figure, (axes,) = _new_axes(6, 3.4)
    marker = "." if len(train) == 1 else None
    axes.plot(*zip(*train, strict=True), marker=marker, color=COLORS[0], label="training")
    evaluation = [
        (row["step"], row[EVALUATION], row[f"{EVALUATION}_std"])
        for row in rows
        if EVALUATION in row
    ]
    if evaluation:
        label = f"evaluation ± deviation over {config['evaluation']['episodes']} episodes"
        x, y, deviation = zip(*evaluation, strict=True)
        axes.errorbar(x, y, deviation, fmt="o", ms=4, capsize=3, color=COLORS[1], label=label)
    _format_x(axes, "step")
    axes.set_ylabel("episode return")
    axes.set_title(view.title(config), fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    path = pathlib.Path(workdir) / LEARNING_CURVE
    figure.savefig(path, dpi=150)
    return path


def save(figure: "Figure", out: str) -> list[str]:
    """Writes ``out.png`` and ``out.svg``; raises ``ConfigError`` if that is impossible."""
    import matplotlib

    out = out.removesuffix(".png").removesuffix(".svg")
    paths = [f"{out}.png", f"{out}.svg"]
    try:
        pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=200)
        # No date and no random names in it, so that the same runs give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "podracer"}):
            figure.savefig(paths[1], metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"--out={out} is not writable: {error.strerror}") from error
    return paths


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m podracer.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("--out", default="curves", help="writes OUT.png and OUT.svg")
    parser.add_argument("--metric", default=RETURN, help=f"as {EVALUATION}; default: {RETURN}")
    parser.add_argument("--x", default="both", choices=X, help="default: both")
    parser.add_argument(
        "--smooth", type=int, default=1, help="rows of a run to average over; default: 1, none"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws and tabulates as a command line says.

    Args:
      argv: without the program's name; None takes ``sys.argv``.

    Returns:
      The exit code: 0, or 2 for what can't be drawn.
    """
    args = _parse(argv)
    try:
        if args.smooth < 1:
            raise ConfigError(f"--smooth must be at least 1, got {args.smooth}")
        groups = group_runs([read_run(workdir, args.metric) for workdir in args.runs])
        figure = draw(groups, args.metric, X[args.x], args.smooth)
        paths = save(figure, args.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_CONFIG
    console = Console(highlight=False)
    console.print(tabulate(groups, args.metric, args.smooth))
    for line in (*_notes(groups, args.metric), f"written: {' and '.join(paths)}"):
        console.print(line, markup=False, soft_wrap=True)
    return OK


if __name__ == "__main__":
    sys.exit(main())
