"""Figures and tables of learning curves: of many runs for a paper, and of each run when it ends.

Each group of runs that differ only in their seed is drawn as one curve, the mean over seeds with
the 95 % Student-t interval of that mean (``curves.py``). A single seed is drawn without interval.

matplotlib is imported by the functions that draw, because its import takes a second. pyplot is
never imported: its state is global to the process, which may be a notebook or have threads.
"""

import os
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from podracer.errors import ConfigError
from podracer.monitoring import dashboard
from podracer.monitoring.curves import INTERVAL, SeedGroup, group_runs, mean_curve, read_seeds
from podracer.monitoring.formatting import console, mean_and_error, number
from podracer.storage.workdir import LEARNING_CURVE, read_config, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from podracer.types import Row

RETURN, EVALUATION = "train/episode_return", "eval/episode_return"
# The axes for each value of --x.
X = {"step": ["step"], "time": ["wall_time"], "both": ["step", "wall_time"]}
X_LABELS = {"step": "environment steps", "wall_time": "wall-clock time (s)"}
# The palette of Okabe and Ito, which colour-blind readers can tell apart. Further curves repeat it
# with other dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
# Labels with more characters do not fit into a table of a terminal.
LONG_LABEL = 60


def _new_axes(width: float, height: float, panels: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure of this size in inches, and its panels in one row with a common y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="0.9", linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def format_x(axes: "Axes", x: str) -> None:
    """Labels an x axis and starts it at zero; 1e6 steps are written as 1M."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel(X_LABELS[x])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if x == "step":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw(groups: Sequence[SeedGroup], metric: str, x: Sequence[str], smooth: int = 1) -> "Figure":
    """Draws a curve for each group, with one panel for each x axis.

    Args:
      groups: groups of runs whose ``value`` is this metric.
      metric: name of the metric, the label of the y axis.
      x: the x axes, of "step" and "wall_time".
      smooth: see ``curves.mean_curve``.
    """
    width = 6 if len(x) == 1 else 9
    labels, columns, lines = _legend(groups, width)
    figure, axes = _new_axes(width, 3 + 0.2 * lines, len(x))
    for panel, name in zip(axes, x, strict=True):
        for i, group in enumerate(groups):
            curve = mean_curve(group, smooth)
            style: dict[str, Any] = {
                "color": COLORS[i % len(COLORS)],
                "linestyle": DASHES[i // len(COLORS) % len(DASHES)],
                "label": labels[i],
            }
            at, mean, error = curve.x[name], curve.mean, curve.half_width
            if len(at) == 1:
                panel.errorbar(at, mean, error, fmt="o", capsize=3, **style)
                continue
            panel.plot(at, mean, linewidth=1.5, **style)
            if error is not None:
                low, high = mean - error, mean + error
                panel.fill_between(at, low, high, color=style["color"], alpha=0.2, linewidth=0)
        format_x(panel, name)
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


def _legend(groups: Sequence[SeedGroup], width: int) -> tuple[list[str], int, int]:
    """The labels, and the number of columns and lines of a legend of this width in inches."""
    characters = 12 * width
    labels = []
    for label, runs in groups:
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        labels.append(textwrap.fill(f"{label} ({seeds})", characters))
    # Eight characters for the line sample beside a label and the gap to the next label.
    columns = max(1, characters // (max(map(len, labels)) + 8))
    longest = max(label.count("\n") + 1 for label in labels)
    return labels, columns, -(-len(labels) // columns) * longest


def _caption(groups: Sequence[SeedGroup], smooth: int) -> str:
    several = any(len(group.runs) > 1 for group in groups)
    caption = f"mean over seeds and its {INTERVAL}" if several else "one seed each"
    return caption + (f"; smoothed over {smooth} rows" if smooth > 1 else "")


def tabulate(groups: Sequence[SeedGroup], metric: str, smooth: int = 1) -> Table:
    """A table with a row for each group: the end and the maximum of its curve, and its speed.

    "steps" is the last step that all seeds have reached, "final" the mean at that step with its
    interval, "best" the maximum of the mean; "seconds" and "steps/s" are means over seeds.
    """
    table = Table(caption=f"{metric}: {_caption(groups, smooth)}", caption_justify="left")
    table.add_column("group", overflow="fold")
    for name in ("seeds", "steps", "final", "best", "seconds", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        (label, runs), curve = group, mean_curve(group, smooth)
        table.add_row(
            Text(label),
            str(len(runs)),
            f"{curve.x['step'][-1]:,.0f}",
            mean_and_error(
                curve.mean[-1], None if curve.half_width is None else curve.half_width[-1]
            ),
            number(curve.mean.max()),
            f"{np.mean([run.seconds for run in runs]):,.1f}",
            f"{np.mean([run.steps_per_second for run in runs]):,.0f}",
        )
    return table


def notes(groups: Sequence[SeedGroup], metric: str) -> Iterator[str]:
    """Warnings about unfinished runs, values that are not drawn, and labels too long to read."""
    longest = max((group.label for group in groups), key=len)
    if len(longest) > LONG_LABEL and "=" in longest:
        yield (
            "labels name all settings that differ between groups; choose some of them, as in "
            f"--label={longest.partition('=')[0]}"
        )
    for run in (run for group in groups for run in group.runs):
        if run.steps < run.total_steps:
            yield (
                f"{run.workdir} is unfinished, at {run.steps:,} of {run.total_steps:,} steps; "
                "the curve of its group ends at the last step that all seeds have reached"
            )
        if run.num_nonfinite:
            yield (
                f"{run.workdir}: left out {run.num_nonfinite} row(s) in which {metric} is NaN or "
                "infinite"
            )


def draw_run(workdir: str | os.PathLike[str]) -> pathlib.Path | None:
    """Draws a run's learning curve into its workdir.

    The figure shows the returns of training episodes and the evaluations: of one agent with the
    standard deviation over episodes, of several the means over agents with their interval.

    Args:
      workdir: workdir of the run, a local folder.

    Returns:
      The path of the picture, or None if no episode ended in training.
    """
    content, rows = read_config(workdir), read_rows(workdir)
    train = [(row["step"], row[RETURN]) for row in rows if RETURN in row]
    if not train:
        return None
    config = content["config"]
    figure, (axes,) = _new_axes(6, 3.4)
    marker = "." if len(train) == 1 else None
    axes.plot(*zip(*train, strict=True), marker=marker, color=COLORS[0], label="training")
    band = _with_spread(rows, RETURN, "interval")
    low, high = band.y - band.spread, band.y + band.spread
    axes.fill_between(band.x, low, high, color=COLORS[0], alpha=0.2, linewidth=0)
    several = any(f"{EVALUATION}_interval" in row for row in rows)
    evaluation = _with_spread(rows, EVALUATION, "interval" if several else "std")
    if len(evaluation.x):
        label = f"evaluation ± std over {config['evaluation']['episodes']} episodes"
        if several:
            label = f"evaluation; means over agents and their {INTERVAL}"
        axes.errorbar(*evaluation, fmt="o", ms=4, capsize=3, color=COLORS[1], label=label)
    format_x(axes, "step")
    axes.set_ylabel("episode return")
    axes.set_title(dashboard.title(config), fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    path = pathlib.Path(workdir) / LEARNING_CURVE
    figure.savefig(path, dpi=150)
    return path


class Spread(NamedTuple):
    """A metric at N steps, ``x``, and its spread there, ``[N]`` each."""

    x: np.ndarray
    y: np.ndarray
    spread: np.ndarray


def _with_spread(rows: "Sequence[Row]", metric: str, spread: str) -> Spread:
    """The rows that have a metric and its spread, "std" or "interval"."""
    names = ("step", metric, f"{metric}_{spread}")
    found = [[row[name] for name in names] for row in rows if names[2] in row]
    return Spread(*np.array(found, float).reshape(-1, 3).T)


def save(figure: "Figure", out: str, suffixes: Sequence[str] = (".png", ".svg")) -> list[str]:
    """Writes a file for each of the suffixes, as ``out.png``, and returns their paths. With a path
    that ends in .pdf, writes that alone.

    Raises:
      ConfigError: a file can't be written.
    """
    import matplotlib

    out = out.removesuffix(".png").removesuffix(".svg")
    paths = [out] if out.endswith(".pdf") else [f"{out}{suffix}" for suffix in suffixes]
    try:
        pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            # An SVG without a date and random identifiers: the same runs give the same file.
            # Some venues reject the Type 3 fonts that are matplotlib's default in a PDF.
            with matplotlib.rc_context({"svg.hashsalt": "podracer", "pdf.fonttype": 42}):
                key = {".svg": "Date", ".pdf": "CreationDate"}.get(pathlib.Path(path).suffix)
                metadata = {key: None} if key else None
                figure.savefig(path, dpi=200, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"--out={out} is not writable: {error.strerror}") from error
    return paths


def plot_runs(
    runs: Sequence[str],
    out: str,
    metric: str,
    x: str,
    smooth: int,
    label: Sequence[str],
    name: Sequence[str],
) -> None:
    """Draws runs into ``out.png`` and ``out.svg`` and prints their table.

    Args:
      runs: workdirs of the runs.
      out: path of the figure, without suffix.
      metric: name of the metric.
      x: a key of ``X``: which x axes to draw.
      smooth: number of consecutive rows of a run to average; 1 averages none.
      label: see ``curves.group_runs``.
      name: the names of all curves, in place of their labels; if empty, these stay.

    Raises:
      ConfigError: a workdir has no run or no such metric, there are more or fewer names than
        curves, or the figure can't be written.
    """
    if smooth < 1:
        raise ConfigError(f"--smooth must be at least 1, got {smooth}")
    groups = group_runs([seed for run in runs for seed in read_seeds(run, metric)], label)
    if name:
        if len(name) != len(groups):
            labels = "; ".join(group.label for group in groups)
            raise ConfigError(
                f"--name: {len(name)} names for {len(groups)} curves, which are: {labels}"
            )
        groups = [group._replace(label=x) for group, x in zip(groups, name, strict=True)]
    paths = save(draw(groups, metric, X[x], smooth), out)
    printer = console()
    printer.print(tabulate(groups, metric, smooth))
    for line in (*notes(groups, metric), f"written: {' and '.join(paths)}"):
        printer.print(line, markup=False, soft_wrap=True)
