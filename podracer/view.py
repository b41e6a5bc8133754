"""What there is to see of a run, as pure functions: rows of metrics in, pictures and lines out.

``View`` is a record of all there is to show, ``extend`` adds a row to it, ``render`` draws it.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from podracer.metrics import Row

# The most cells of a sparkline, and of a bar of shares.
SPARK_CELLS, BAR_CELLS = 60, 40
# What is narrower is left out.
FEWEST_CELLS = 8
LABEL_WIDTH, LAST_WIDTH, EXTREMES_WIDTH, LEGEND_WIDTH = 11, 11, 26, 56
BLOCKS = "▁▂▃▄▅▆▇█"
# For terminals that know nothing else.
ASCII = str.maketrans(BLOCKS + "━…", "_.-:=+*#=.")
# Of what time goes to; waiting is red.
COLORS = {
    "training": "green", "environment": "green", "update": "green", "inference": "cyan",
    "compile": "yellow", "evaluation": "magenta", "checkpoint": "cyan", "setup": "blue",
    "transfer": "blue", "publish": "blue", "wait": "red",
}  # fmt: skip


class Curve(NamedTuple):
    """A series of any length, as at most ``2 * SPARK_CELLS`` means of neighbours.

    Attributes:
      means: over ``span`` values each, but for the last, which may be over fewer.
      span: doubles whenever there are too many means.
      seen: finite values so far.
      low: the lowest of them.
      high: the highest of them.
      last: the newest value, finite or not.
    """

    means: tuple[float, ...] = ()
    span: int = 1
    seen: int = 0
    low: float = math.inf
    high: float = -math.inf
    last: float = math.nan


def add(curve: Curve, value: float) -> Curve:
    """The curve with one more value; what is not finite has no place in it."""
    if not math.isfinite(value):
        return curve._replace(last=value)
    means, span, filled = curve.means, curve.span, curve.seen % curve.span
    if filled:
        means = (*means[:-1], means[-1] + (value - means[-1]) / (filled + 1))
    else:
        if len(means) == 2 * SPARK_CELLS:
            means = tuple(map(statistics.fmean, zip(means[::2], means[1::2], strict=True)))
            span *= 2
        means = (*means, value)
    low, high = min(curve.low, value), max(curve.high, value)
    return Curve(means, span, curve.seen + 1, low, high, value)


class View(NamedTuple):
    """What there is to show of a run at one moment.

    Attributes:
      title: above it.
      total_steps: of the run.
      first_step: that this process began with; not 0 where it continues a run.
      row: the newest of metrics.
      origin: step and wall time of the first row of this process, which speed is measured from.
      returns: of training's episodes.
      evaluations: mean return of each.
      seconds: of the run, by what they went to.
      memory: bytes in use and bytes there are (0: unknown), by whose memory it is.
    """

    title: str = ""
    total_steps: int = 0
    first_step: int = 0
    row: Mapping[str, int | float] = MappingProxyType({})
    origin: tuple[float, float] | None = None
    returns: Curve = Curve()
    evaluations: Curve = Curve()
    seconds: Mapping[str, float] = MappingProxyType({})
    memory: Mapping[str, tuple[int, int]] = MappingProxyType({})


def extend(
    view: View,
    row: Row,
    seconds: Mapping[str, float],
    memory: Mapping[str, tuple[int, int]],
) -> View:
    """The view after one more row."""
    returns, evaluations = view.returns, view.evaluations
    if "train/episode_return" in row:
        returns = add(returns, row["train/episode_return"])
    if "eval/episode_return" in row:
        evaluations = add(evaluations, row["eval/episode_return"])
    return view._replace(
        row=row,
        origin=view.origin or (row["step"], row["wall_time"]),
        returns=returns,
        evaluations=evaluations,
        seconds=seconds,
        memory=memory,
    )


def seconds_left(view: View) -> float | None:
    """What the rest of the run takes, counted from the newest row; None before one can tell."""
    if view.origin is None:
        return None
    step, now = view.row["step"], view.row["wall_time"]
    steps, seconds = step - view.origin[0], now - view.origin[1]
    # The first row alone says how fast training is, but not what evaluations will take.
    speed = steps / seconds if seconds > 0 else view.row.get("time/steps_per_second", 0.0)
    return (view.total_steps - step) / speed if speed > 0 and math.isfinite(speed) else None


def number(x: float) -> str:
    """A return, for people."""
    if not math.isfinite(x):
        return f"{x}"
    if abs(x) >= 1e6:
        return f"{x:.3g}"
    return f"{x:,.1f}" if abs(x) >= 10 else f"{x:.2f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:,}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def size(count: int) -> str:
    """Bytes, for people."""
    gib = count / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{count / 2**20:,.0f} MiB"


def line(row: Row) -> str:
    """A row in short."""
    step, speed = row["step"], row.get("time/steps_per_second", math.nan)
    text = f"{step:,} steps, {speed:,.0f} a second"
    for word, name in (("return", "train/episode_return"), ("evaluation", "eval/episode_return")):
        if name in row:
            text += f", {word} {row[name]:,.1f}"
    return text


def groups(row: Mapping[str, int | float]) -> dict[str, Row]:
    """A row's values by the word before the slash, both in the order of the row."""
    grouped: dict[str, Row] = {}
    for name, value in row.items():
        group, slash, rest = name.partition("/")
        grouped.setdefault(group if slash else "run", {})[rest or name] = value
    return grouped


def lines(row: Row) -> str:
    """A row with all its values: its line, then one for each group of them."""
    return "\n".join(
        [
            line(row),
            *(
                f"  {group:<9} " + ", ".join(f"{name} {_short(x)}" for name, x in values.items())
                for group, values in groups(row).items()
            ),
        ]
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` blocks for a series, whose neighbours are taken together to fit."""
    count = min(width, len(values))
    if count <= 0:
        return ""
    edges = [i * len(values) // count for i in range(count + 1)]
    cells = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(cells), max(cells)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((cell - low) * scale)] for cell in cells)


class _Drawn(NamedTuple):
    """What rich draws, in characters that the console knows."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.content, options):
            yield Segment(text.translate(ASCII) if options.ascii_only else text, style, control)


def render(view: View, width: int, *, age: float = 0.0, verbose: bool = False) -> RenderableType:
    """Draws a view.

    Args:
      view: what to draw.
      width: of the screen, in characters.
      age: seconds since the newest row, or since the start where there is none yet.
      verbose: show all values of the newest row, instead of a selection.
    """
    body = Table.grid(expand=True)
    body.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    body.add_column(ratio=1)
    if view.row:
        for label, content in _rows(view, max(1, width - 4 - LABEL_WIDTH), verbose):
            body.add_row(label, content)
    title = Text(view.title, style="bold", overflow="ellipsis", no_wrap=True)
    content = Group(_progress(view, age), body) if view.row else _progress(view, age)
    return _Drawn(Panel(content, title=title, title_align="left", border_style="dim", width=width))


def _progress(view: View, age: float) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    step, total = view.row.get("step", view.first_step), max(1, view.total_steps)
    left = seconds_left(view)
    text = f"starts, {duration(age)}" if not view.row else f"{step / total:4.0%}"
    if view.row and step >= total:
        text += f" in {duration(view.row['wall_time'])}"
    elif left is not None:
        text += f"  {duration(max(0.0, left - age))} left"
    table.add_row(ProgressBar(total, step, pulse=not view.row), text)
    return table


def _rows(view: View, room: int, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    """What the view has below its bar: a label and something to draw, each."""
    row, grouped = view.row, groups(view.row)
    step, speed = row["step"], row.get("time/steps_per_second", math.nan)
    yield "steps", f"{step:,} of {view.total_steps:,}, {speed:,.0f} a second"
    low, high, best = map(number, (view.returns.low, view.returns.high, view.evaluations.high))
    yield "return", _curve(view.returns, f"min {low}  max {high}", room)
    yield "evaluation", _curve(view.evaluations, f"best {best}", room)
    if verbose:
        yield from ((name, _values(values)) for name, values in grouped.items())
    elif "loss" in grouped:
        yield "losses", _values(grouped["loss"])
    for label, prefix in (("actors", "time/actor_"), ("learner", "time/learner_")):
        shares = {k.removeprefix(prefix): x for k, x in row.items() if k.startswith(prefix)}
        if shares:
            yield label, _shares(shares, room)
    if "lag/mean" in row and not verbose:
        lag = {name: row[f"lag/{name}"] for name in ("min", "mean", "max")}
        yield "lag", _values({**lag, "restarts": row["actor/restarts"]})
    yield "time", _shares(view.seconds, room)
    if view.memory:
        texts = (
            Text(f"{name} {size(used)}" + (f" of {size(limit)}" if limit else ""))
            for name, (used, limit) in view.memory.items()
        )
        yield "memory", Columns(texts, padding=(0, 2))


def _curve(curve: Curve, extremes: str, room: int) -> RenderableType:
    """The newest value, the sparkline and the extremes: as much as there is room for."""
    if not curve.seen:
        return Text("none yet" if math.isnan(curve.last) else number(curve.last), style="dim")
    text = Text(f"{number(curve.last):<{LAST_WIDTH}}", style="bold", no_wrap=True)
    extremes = f"  {extremes:<{EXTREMES_WIDTH}}"
    cells = min(SPARK_CELLS, room - LAST_WIDTH - len(extremes))
    if cells < FEWEST_CELLS:
        cells, extremes = room - LAST_WIDTH, ""
    # Filled up: what follows stays where it is.
    text.append(f"{sparkline(curve.means, cells):<{max(0, cells)}}", style="not bold green")
    return text.append(extremes, style="not bold dim")


def _short(x: float) -> str:
    return f"{x:,.0f}" if isinstance(x, int) or abs(x) >= 1000 else f"{x:.3g}"


def _values(values: Mapping[str, int | float]) -> RenderableType:
    """Names and numbers, in columns that keep their width whatever the numbers."""
    texts = (Text.assemble((name, "dim"), f" {_short(x):<9}") for name, x in values.items())
    return Columns(texts, padding=(0, 1))


def _shares(seconds: Mapping[str, float], room: int) -> RenderableType:
    """Shares of time: a bar of many colours, and what they mean."""
    positive = {name: x for name, x in seconds.items() if math.isfinite(x) and x > 0}
    total = sum(positive.values())
    if not total:
        return Text("-", style="dim")
    cells = min(BAR_CELLS, room - LEGEND_WIDTH)
    bar, edge, past = Text(no_wrap=True), 0, 0.0
    for name, x in positive.items():
        past += x
        end = round(past / total * cells)
        bar.append("━" * (end - edge), style=_color(name))
        edge = max(edge, end)
    legend = Columns(
        (
            Text.assemble((name, _color(name)), f" {x / total:<3.0%}")
            for name, x in positive.items()
        ),
        padding=(0, 1),
    )
    if cells < FEWEST_CELLS:
        return legend
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=cells)
    table.add_column(ratio=1)
    table.add_row(bar, legend)
    return table


def _color(name: str) -> str:
    return COLORS.get(name, "white")


def title(config: Mapping[str, Any]) -> str:
    """What a run is called, from the dictionary of its config."""
    first, count = config["seed"], config.get("num_seeds", 1)
    seeds = f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"
    return f"{config['agent']} on {config['env']}, {seeds}"
