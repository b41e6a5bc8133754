"""A run's live view as pure functions: rows of metrics in, a rich renderable or plain lines out.

``View`` is the record of everything that is shown, ``extend`` adds a row of metrics to it, and
``render`` draws it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from podracer.monitoring.formatting import duration, number, size
from podracer.monitoring.series import BLOCKS, SPARK_CELLS, Series, append, sparkline

if TYPE_CHECKING:
    # Importing it imports JAX, which takes a second, and drawing a finished run needs none.
    from podracer.types import Row

# The most cells of a bar of shares.
BAR_CELLS = 40
# A sparkline or a bar that would be narrower is left out.
MIN_CELLS = 8
LABEL_WIDTH, LAST_WIDTH, EXTREMES_WIDTH, LEGEND_WIDTH, QUANTILES_WIDTH = 11, 11, 26, 56, 56
# Replacements on terminals that can show ASCII only.
ASCII = str.maketrans(BLOCKS + "━…", "_.-:=+*#=.")
# The metrics that have lines of their own, by label.
RETURNS = {"return": "train/episode_return", "evaluation": "eval/episode_return"}
# Activities that time is spent on; waiting is red.
COLORS = {
    "training": "green", "environment": "green", "update": "green", "inference": "cyan",
    "compile": "yellow", "evaluation": "magenta", "checkpoint": "cyan", "setup": "blue",
    "transfer": "blue", "publish": "blue", "network": "yellow", "wait": "red",
}  # fmt: skip


class View(NamedTuple):
    """Everything that is shown of a run at one moment.

    Attributes:
      title: title of the frame.
      total_steps: environment steps after which the run is complete.
      first_step: step that this process started from; greater than 0 in a resumed run.
      row: newest row of metrics.
      origin: step and wall time of this process' first row, from which speed is measured.
      returns: mean returns of training episodes.
      evaluations: mean returns of evaluations.
      agents: the newest returns of each of several agents, in increasing order, by label.
      seconds: time of the run so far, by activity.
      memory: bytes in use and bytes available (0: unknown), by owner ("process", "device").
    """

    title: str = ""
    total_steps: int = 0
    first_step: int = 0
    row: Mapping[str, int | float] = MappingProxyType({})
    origin: tuple[float, float] | None = None
    returns: Series = Series()
    evaluations: Series = Series()
    agents: Mapping[str, Sequence[float]] = MappingProxyType({})
    seconds: Mapping[str, float] = MappingProxyType({})
    memory: Mapping[str, tuple[int, int]] = MappingProxyType({})


def extend(
    view: View,
    row: Row,
    seconds: Mapping[str, float],
    memory: Mapping[str, tuple[int, int]],
) -> View:
    """The view after one more row of metrics; see ``View`` for the arguments."""
    returns, evaluations = view.returns, view.evaluations
    if "train/episode_return" in row:
        returns = append(returns, row["train/episode_return"])
    if "eval/episode_return" in row:
        evaluations = append(evaluations, row["eval/episode_return"])
    newest = {label: sorted(of_agents(row, name)) for label, name in RETURNS.items()}
    return view._replace(
        row=row,
        origin=view.origin or (row["step"], row["wall_time"]),
        returns=returns,
        evaluations=evaluations,
        agents={**view.agents, **{label: values for label, values in newest.items() if values}},
        seconds=seconds,
        memory=memory,
    )


def of_agents(row: Mapping[str, int | float], name: str) -> list[float]:
    """The finite values of a metric of each of several agents; none of a run of one."""
    return [x for key, x in row.items() if key.endswith(f"/{name}") and math.isfinite(x)]


def seconds_left(view: View) -> float | None:
    """Estimated seconds from the newest row to the end of the run; None if there is no estimate."""
    if view.origin is None:
        return None
    step, now = view.row["step"], view.row["wall_time"]
    steps, seconds = step - view.origin[0], now - view.origin[1]
    # After a single row only training's own speed is known, which excludes evaluations.
    speed = steps / seconds if seconds > 0 else view.row.get("time/steps_per_second", 0.0)
    return (view.total_steps - step) / speed if speed > 0 and math.isfinite(speed) else None


def _speed(row: Mapping[str, int | float]) -> str:
    return f"{row.get('time/steps_per_second', math.nan):,.0f} steps/s"


def summary_line(row: Row) -> str:
    """The progress, speed, returns and workers of a row in one line."""
    text = f"{row['step']:,} steps, {_speed(row)}"
    if row.get("train/learned") == 0:
        text += f", replay {row['replay/fill']:.0%} full, not learning yet"
    for label, name in RETURNS.items():
        if name in row:
            text += f", {label} {number(row[name])}"
    if "remote/workers" in row:
        text += f", workers: {row['remote/workers']} connected, {row['remote/losses']} lost"
    return text


def group_by_prefix(row: Mapping[str, int | float]) -> dict[str, Row]:
    """A row's values by the part of their names before the slash ("run" without one), in order."""
    grouped: dict[str, Row] = {}
    for name, value in row.items():
        group, slash, rest = name.partition("/")
        grouped.setdefault(group if slash else "run", {})[rest or name] = value
    return grouped


def all_values(row: Row) -> str:
    """A row's summary line, then a line with all values of each group."""
    return "\n".join(
        [
            summary_line(row),
            *(
                f"  {group:<9} " + ", ".join(f"{name} {number(x, 3)}" for name, x in values.items())
                for group, values in group_by_prefix(row).items()
            ),
        ]
    )


class _AsciiFallback(NamedTuple):
    """Replaces block characters where the console can show ASCII only."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.content, options):
            yield Segment(text.translate(ASCII) if options.ascii_only else text, style, control)


def render(view: View, width: int, *, age: float = 0.0, verbose: bool = False) -> RenderableType:
    """Draws a view.

    Args:
      view: what to draw.
      width: width in characters.
      age: seconds since the newest row, or since the start if there is no row yet.
      verbose: show all values of the newest row instead of a selection.
    """
    body = Table.grid(expand=True)
    body.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    body.add_column(ratio=1)
    if view.row:
        for label, content in _rows(view, max(1, width - 4 - LABEL_WIDTH), verbose):
            body.add_row(label, content)
    title = Text(view.title, style="bold", overflow="ellipsis", no_wrap=True)
    content = Group(_progress(view, age), body) if view.row else _progress(view, age)
    return _AsciiFallback(
        Panel(content, title=title, title_align="left", border_style="dim", width=width)
    )


def _progress(view: View, age: float) -> RenderableType:
    """The progress bar, the share of steps that are done, and the time left."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    step, total = view.row.get("step", view.first_step), max(1, view.total_steps)
    left = seconds_left(view)
    text = f"starting, {duration(age)}" if not view.row else f"{min(step / total, 1):4.0%}"
    if view.row and step >= total:
        text += f" in {duration(view.row['wall_time'])}"
    elif left is not None:
        text += f"  {duration(max(0.0, left - age))} left"
    table.add_row(ProgressBar(total, step, pulse=not view.row), text)
    return table


def _rows(view: View, width: int, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    """The labels and contents of the lines below the progress bar."""
    row, grouped = view.row, group_by_prefix(view.row)
    yield "steps", f"{row['step']:,} of {view.total_steps:,}, {_speed(row)}"
    yield from _returns(view, width)
    if verbose:
        yield from ((name, _values(values)) for name, values in grouped.items())
    else:
        yield from _selection(grouped)
    for label, prefix in (("actors", "time/actor_"), ("learner", "time/learner_")):
        shares = {k.removeprefix(prefix): x for k, x in row.items() if k.startswith(prefix)}
        if shares:
            yield label, _shares(shares, width)
    if "lag/mean" in row and not verbose:
        lag = {name: row[f"lag/{name}"] for name in ("min", "mean", "max")}
        yield "lag", _values({**lag, "restarts": row["actor/restarts"]})
    yield "time", _shares(view.seconds, width)
    if view.memory:
        texts = (
            Text(f"{owner} {size(used)}" + (f" of {size(limit)}" if limit else ""))
            for owner, (used, limit) in view.memory.items()
        )
        yield "memory", Columns(texts, padding=(0, 2))


def _returns(view: View, width: int) -> Iterator[tuple[str, RenderableType]]:
    """Lines for returns: means, and quantiles if there are several agents."""
    diverged = of_agents(view.row, "train/diverged")
    if diverged:
        yield "agents", f"{len(diverged):,}, {sum(diverged):,.0f} of them diverged"
    low, high, best = map(number, (view.returns.low, view.returns.high, view.evaluations.high))
    series = {
        "return": _series(view.returns, f"min {low}  max {high}", width),
        "evaluation": _series(view.evaluations, f"best {best}", width),
    }
    for label, content in series.items():
        yield label, content
        if label in view.agents:
            yield "of agents", _quantiles(view.agents[label], width)


def _selection(grouped: Mapping[str, Row]) -> Iterator[tuple[str, RenderableType]]:
    """Lines for some of a row's groups, of those that it has."""
    if "loss" in grouped:
        yield "losses", _values(grouped["loss"])
    if "replay" in grouped:
        yield "replay", _replay(grouped["replay"])
    if "remote" in grouped:
        yield from _remote(grouped["remote"])


def _series(series: Series, extremes: str, width: int) -> RenderableType:
    """The newest value, then the sparkline and the extremes as far as the width allows."""
    if not series.num_values:
        return Text("none yet" if math.isnan(series.last) else number(series.last), style="dim")
    text = Text(f"{number(series.last):<{LAST_WIDTH}}", style="bold", no_wrap=True)
    extremes = f"  {extremes:<{EXTREMES_WIDTH}}"
    cells = min(SPARK_CELLS, width - LAST_WIDTH - len(extremes))
    if cells < MIN_CELLS:
        cells, extremes = width - LAST_WIDTH, ""
    # Padded, so that the extremes don't move while the sparkline grows.
    text.append(f"{sparkline(series.means, cells):<{max(0, cells)}}", style="not bold green")
    return text.append(extremes, style="not bold dim")


def _quantiles(values: Sequence[float], width: int) -> RenderableType:
    """The quartiles of increasing values, then the values themselves as far as the width allows."""
    quartiles = (
        statistics.quantiles(values, n=4, method="inclusive") if values[1:] else [*values] * 3
    )
    names = ("min", "25 %", "median", "75 %", "max")
    text = Text(no_wrap=True)
    for name, x in zip(names, (values[0], *quartiles, values[-1]), strict=True):
        text.append(f"{name} ", style="dim").append(f"{number(x, 3)}  ")
    cells = min(SPARK_CELLS, width - QUANTILES_WIDTH)
    if cells >= MIN_CELLS:
        text.pad_right(QUANTILES_WIDTH - len(text))
        text.append(sparkline(values, cells), style="green")
    return text


def _values(values: Mapping[str, int | float]) -> RenderableType:
    """Names and numbers, in columns whose width doesn't depend on the numbers."""
    texts = (Text.assemble((name, "dim"), f" {number(x, 3):<9}") for name, x in values.items())
    return Columns(texts, padding=(0, 1))


def _replay(values: Mapping[str, int | float]) -> RenderableType:
    """The state of a replay buffer; until learning begins, only how full it is."""
    if values.keys() == {"fill"}:
        return Text(f"{values['fill']:.0%} full, not learning yet")
    names = {
        "fill": "fill",
        "age": "age in updates",
        "priority": "priority",
        "importance": "importance",
    }
    return _values({label: values[name] for name, label in names.items() if name in values})


def _remote(values: Mapping[str, int | float]) -> Iterator[tuple[str, RenderableType]]:
    """Workers and what crosses the wire."""
    names = {
        "workers": "connected",
        "free_places": "free places",
        "joins": "joins",
        "losses": "losses",
        "restarts": "restarts",
        "rejected": "rejected",
    }
    yield "workers", _values({label: values[name] for name, label in names.items()})
    sizes = [f"{name} {size(int(values[f'{name}_mb'] * 1e6))}" for name in ("received", "sent")]
    for name in ("env", "network"):
        delays = [values[f"{name}_ms_{p}"] for p in ("p50", "p99") if f"{name}_ms_{p}" in values]
        sizes += [f"{name} {' to '.join(number(x, 3) for x in delays)} ms"] if delays else []
    yield "wire", Columns(map(Text, sizes), padding=(0, 2))


def _shares(seconds: Mapping[str, float], width: int) -> RenderableType:
    """Shares of time by activity: a bar of colours with its legend."""
    positive = {name: x for name, x in seconds.items() if math.isfinite(x) and x > 0}
    total = sum(positive.values())
    if not total:
        return Text("-", style="dim")
    cells = min(BAR_CELLS, width - LEGEND_WIDTH)
    bar, edge, cumulative = Text(no_wrap=True), 0, 0.0
    for name, x in positive.items():
        cumulative += x
        end = round(cumulative / total * cells)
        bar.append("━" * (end - edge), style=_color(name))
        edge = max(edge, end)
    legend = Columns(
        (
            Text.assemble((name, _color(name)), f" {x / total:<3.0%}")
            for name, x in positive.items()
        ),
        padding=(0, 1),
    )
    if cells < MIN_CELLS:
        return legend
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=cells)
    table.add_column(ratio=1)
    table.add_row(bar, legend)
    return table


def _color(activity: str) -> str:
    return COLORS.get(activity, "white")


def title(config: Mapping[str, Any]) -> str:
    """A run's title from its config as a dictionary: agent, environment and seeds."""
    first, count = config["seed"], config.get("num_seeds", 1)
    seeds = f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"
    swept = ", a sweep" if config.get("sweep") else ""
    return f"{config['agent']} on {config['env']}{swept}, {seeds}"
