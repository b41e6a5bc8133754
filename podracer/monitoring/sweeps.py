"""Figure and table of a sweep: which settings did well, and how good the best agent was by when."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from podracer import config as config_lib
from podracer.config.members import Point
from podracer.errors import ConfigError, unknown
from podracer.monitoring import dashboard, figures
from podracer.monitoring.alone import command_alone
from podracer.monitoring.curves import INTERVAL, mean_and_interval
from podracer.monitoring.formatting import console, mean_and_error, number
from podracer.storage import upgrading
from podracer.storage.workdir import read_config, read_rows, writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From this ratio of its largest to its smallest value on, a setting has a logarithmic axis.
LOGARITHMIC = 10


class PointHistory(NamedTuple):
    """One metric of a point of a sweep: of an agent, or of those that differ in their seed.

    Attributes:
      point: the agents, with the settings that they have at the last row.
      step: environment steps of each row with a finite value of the metric for all of its agents,
        ``[N]``.
      value: the mean of the metric over the agents, ``[N]``.
      half_width: half the width of the last mean's interval; None with one agent.
      remark: what to add to its name if agents have diverged by the last row.
    """

    point: Point
    step: np.ndarray
    value: np.ndarray
    half_width: float | None
    remark: str


def read_sweep(workdir: str | os.PathLike[str], metric: str) -> list[PointHistory]:
    """Reads one metric of all points of a sweep, finished or not; those without a finite value of
    it are left out.

    Raises:
      ConfigError: the folder holds no run or a damaged one, no sweep, or no such metric.
    """
    content = read_config(workdir)
    with upgrading.explained(writer(content)):
        config = config_lib.parse(content["config"])
    if not config.sweep:
        raise ConfigError(f"{workdir} is not a sweep: its config.sweep is empty")
    rows = read_rows(workdir)
    first = config.members[0].name
    known = {name.removeprefix(f"{first}/") for row in rows for name in row if first in name}
    if metric not in known:
        raise ConfigError(f"{workdir}: {unknown('metric', metric, known)}")
    found = []
    for point in config.points:
        keys = [f"{member.name}/{metric}" for member in point.members]
        all_values = np.array([[row.get(key, np.nan) for key in keys] for row in rows])
        finite = np.isfinite(all_values).all(1)
        if not finite.any():
            continue
        step = np.array([row["step"] for row in rows])[finite]
        mean, half_width = mean_and_interval(all_values[finite].T)
        last = None if half_width is None else float(half_width[-1])
        history = PointHistory(point.at(rows[-1]), step, mean, last, point.remark(rows[-1]))
        found.append(history)
    if not found:
        raise ConfigError(f"{metric} of {workdir} is NaN or infinite for all agents")
    return found


def best_so_far(histories: Sequence[PointHistory]) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which any point has a value, ``[N]`` increasing, and the largest value that any
    has had by then, ``[N]``."""
    steps = np.unique(np.concatenate([history.step for history in histories]))
    best = np.full(len(steps), -np.inf)
    for history in histories:
        at = np.searchsorted(steps, history.step)
        np.maximum.at(best, at, history.value)
    return steps, np.maximum.accumulate(best)


def draw(histories: Sequence[PointHistory], metric: str, title: str) -> "Figure":
    """Draws the settings of the points as parallel coordinates, coloured by the metric at the end,
    and the best value so far over the steps.

    Args:
      histories: a metric of the points of a sweep.
      metric: name of the metric.
      title: the title of the figure.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    columns = {
        name: np.array([history.point.settings[name] for history in histories])
        for name in histories[0].point.settings
    }
    last = np.array([history.value[-1] for history in histories])
    figure = Figure(figsize=(9 + 0.8 * len(columns), 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2 + len(columns), 4))
    heights = [
        _axis(left, i, name, values)
        for i, (name, values) in enumerate({**columns, metric: last}.items())
    ]
    colors = colormaps["viridis"](heights[-1])
    # The best ones are drawn last, over the others.
    for i in np.argsort(last):
        line = [height[i] for height in heights]
        left.plot(range(len(line)), line, color=colors[i], linewidth=1.2, alpha=0.8)
        right.plot(histories[i].step, histories[i].value, color=colors[i], linewidth=0.7, alpha=0.6)
    left.set_xlim(-0.3, len(columns) + 0.5)
    left.set_axis_off()
    steps, best = best_so_far(histories)
    right.step(steps, best, where="post", color="black", linewidth=1.8, label="best so far")
    figures.format_x(right, "step")
    seeds = len(histories[0].point.members)
    right.set_ylabel(metric if seeds == 1 else f"{metric}, mean over {seeds} seeds")
    right.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium")
    return figure


def _axis(axes: "Axes", x: int, name: str, values: np.ndarray) -> np.ndarray:
    """Draws the axis of a setting or metric at ``x``, and returns the heights of these values on
    it, from 0 to 1."""
    low, high = values.min(), values.max()
    logarithmic = low > 0 and high >= LOGARITHMIC * low
    scaled, ends = (np.log(values), np.log([low, high])) if logarithmic else (values, (low, high))
    heights = (scaled - ends[0]) / (ends[1] - ends[0]) if high > low else np.full(len(values), 0.5)
    axes.plot([x, x], [0, 1], color="0.4", linewidth=0.8)
    kind = "\n(logarithmic)" if logarithmic else ""
    axes.text(x, -0.13, f"{name}{kind}", ha="center", va="top", fontsize="small")
    for at, text in ((heights.min(), low), (heights.max(), high)):
        axes.text(x + 0.03, at, f"{text:.3g}", va="center", fontsize="small")
    return heights


def tabulate(histories: Sequence[PointHistory], metric: str) -> Table:
    """A table with a row for each point, the best one first: its settings, and the metric at the
    end and at its maximum."""
    settings = list(histories[0].point.settings)
    seeds = len(histories[0].point.members)
    over = f", mean over {seeds} seeds and its {INTERVAL}" * (seeds > 1)
    table = Table(caption=f"{metric}{over}", caption_justify="left")
    for name in ("agent" if seeds == 1 else "agents", *settings, "final", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    for history in sorted(histories, key=lambda x: -x.value[-1]):
        table.add_row(
            Text(f"{history.point.name}{history.remark}"),
            *(f"{history.point.settings[name]:.4g}" for name in settings),
            mean_and_error(history.value[-1], history.half_width),
            number(history.value.max()),
        )
    return table


def plot_sweep(runs: Sequence[str], out: str, metric: str, **others: object) -> None:
    """Draws a sweep into ``out.png`` and ``out.svg``; prints its points and the command that trains
    the best one alone.

    Args:
      runs: the workdir of the sweep.
      out: path of the figure, without suffix.
      metric: name of the metric.
      **others: the other arguments of ``figures.plot_runs``; only their defaults are possible.

    Raises:
      ConfigError: the workdir has no sweep or no such metric, there are several, an argument is not
        possible, or the figure can't be written.
    """
    if len(runs) > 1:
        raise ConfigError(f"--sweep draws one sweep, got {len(runs)} workdirs")
    if others != {"x": "both", "smooth": 1, "label": [], "name": []}:
        raise ConfigError(
            "--x, --smooth, --label and --name have no effect with --sweep; leave them out"
        )
    (workdir,) = runs
    histories, content = read_sweep(workdir, metric), read_config(workdir)
    figure = draw(histories, metric, dashboard.title(content["config"]))
    paths = figures.save(figure, out)
    printer = console()
    printer.print(tabulate(histories, metric))
    best = max(histories, key=lambda x: x.value[-1]).point
    alone = command_alone(content, best, os.fspath(workdir))
    flags = f", trained alone by\n{alone}" if alone else f", {best.text}"
    for line in (f"the best: {best.name}{flags}", f"written: {' and '.join(paths)}"):
        printer.print(line, markup=False, soft_wrap=True)
