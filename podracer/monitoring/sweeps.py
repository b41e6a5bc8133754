"""Figure and table of a sweep: which settings did well, and how good the best agent was by when."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podracer import config as config_lib
from podracer.config.members import Member
from podracer.errors import ConfigError, unknown
from podracer.monitoring import dashboard, figures
from podracer.monitoring.formatting import number
from podracer.storage import upgrading
from podracer.storage.workdir import read_config, read_rows, writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From this ratio of its largest to its smallest value on, a setting has a logarithmic axis.
LOGARITHMIC = 10


class AgentHistory(NamedTuple):
    """One metric of an agent of a sweep.

    Attributes:
      member: the agent, with the settings that it has at the last row.
      step: environment steps of each row with a finite value of the metric, ``[N]``.
      value: the metric, ``[N]``.
      diverged: whether the agent has diverged by the last row.
    """

    member: Member
    step: np.ndarray
    value: np.ndarray
    diverged: bool


def read_sweep(workdir: str | os.PathLike[str], metric: str) -> list[AgentHistory]:
    """Reads one metric of all agents of a run, finished or not; those without a finite value of it
    are left out.

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
    for member in config.members:
        key = f"{member.name}/{metric}"
        points = [(row["step"], row[key]) for row in rows if np.isfinite(row.get(key, np.nan))]
        diverged = rows[-1].get(f"{member.name}/train/diverged") == 1
        if points:
            step, value = map(np.array, zip(*points, strict=True))
            found.append(AgentHistory(member.at(rows[-1]), step, value, diverged))
    if not found:
        raise ConfigError(f"{metric} of {workdir} is NaN or infinite for all agents")
    return found


def best_so_far(agents: Sequence[AgentHistory]) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which any agent has a value, ``[N]`` increasing, and the largest value that any
    has had by then, ``[N]``."""
    steps = np.unique(np.concatenate([agent.step for agent in agents]))
    best = np.full(len(steps), -np.inf)
    for agent in agents:
        at = np.searchsorted(steps, agent.step)
        np.maximum.at(best, at, agent.value)
    return steps, np.maximum.accumulate(best)


def draw(agents: Sequence[AgentHistory], metric: str, title: str) -> "Figure":
    """Draws the settings of the agents as parallel coordinates, coloured by the metric at the end,
    and the best value so far over the steps.

    Args:
      agents: the agents of a sweep.
      metric: name of the metric.
      title: the title of the figure.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    columns = {
        name: np.array([agent.member.settings[name] for agent in agents])
        for name in agents[0].member.settings
    }
    last = np.array([agent.value[-1] for agent in agents])
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
        right.plot(agents[i].step, agents[i].value, color=colors[i], linewidth=0.7, alpha=0.6)
    left.set_xlim(-0.3, len(columns) + 0.5)
    left.set_axis_off()
    steps, best = best_so_far(agents)
    right.step(steps, best, where="post", color="black", linewidth=1.8, label="best so far")
    figures.format_x(right, "step")
    right.set_ylabel(metric)
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


def tabulate(agents: Sequence[AgentHistory], metric: str) -> Table:
    """A table with a row for each agent, the best one first: its settings, and the metric at the
    end and at its maximum."""
    settings = list(agents[0].member.settings)
    table = Table(caption=metric, caption_justify="left")
    for name in ("agent", "seed", *settings, "final", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    for agent in sorted(agents, key=lambda x: -x.value[-1]):
        member = agent.member
        table.add_row(
            Text(f"{member.name}{' (diverged)' * agent.diverged}"),
            str(member.seed),
            *(f"{member.settings[name]:.4g}" for name in settings),
            number(agent.value[-1]),
            number(agent.value.max()),
        )
    return table


def plot_sweep(
    runs: Sequence[str], out: str, metric: str, x: str, smooth: int, label: Sequence[str]
) -> None:
    """Draws a sweep into ``out.png`` and ``out.svg``; prints its agents and the best one's flags.

    Args:
      runs: the workdir of the sweep.
      out: path of the figure, without suffix.
      metric: name of the metric.
      x, smooth, label: see ``figures.plot_runs``; only their defaults are possible.

    Raises:
      ConfigError: the workdir has no sweep or no such metric, there are several, an argument is not
        possible, or the figure can't be written.
    """
    if len(runs) > 1:
        raise ConfigError(f"--sweep draws one sweep, got {len(runs)} workdirs")
    if (x, smooth, list(label)) != ("both", 1, []):
        raise ConfigError("--x, --smooth and --label have no effect with --sweep; leave them out")
    (workdir,) = runs
    agents = read_sweep(workdir, metric)
    figure = draw(agents, metric, dashboard.title(read_config(workdir)["config"]))
    paths = figures.save(figure, out)
    console = Console(highlight=False)
    console.print(tabulate(agents, metric))
    best = max(agents, key=lambda x: x.value[-1]).member
    for line in (f"the best one: {best.name}, {best.text}", f"written: {' and '.join(paths)}"):
        console.print(line, markup=False, soft_wrap=True)
