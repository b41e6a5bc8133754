"""Runs as curves: one metric of many runs, grouped by what they differ in, with mean and interval.

Runs that differ only in their seed are one group. Its curve is the mean over seeds with the 95 %
Student-t interval of that mean: where the true mean may be, not where the seeds lie, so that it may
leave a return's bounds. It goes as far as all seeds went, each interpolated linearly between rows.
By wall clock, a point stands at the mean of the times at which the seeds reached its step, counted
from a run's start: compilation and evaluation are in it.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.errors import ConfigError, unknown
from podracer.workdir import METRICS, flatten, read_config, read_rows

INTERVAL = "95 % Student-t interval"
# At most so many points a curve, to keep an SVG small.
POINTS = 200


class Run(NamedTuple):
    """One run as far as one metric goes.

    Attributes:
      workdir: its folder.
      config: its settings but for the seed, by names such as "ppo.clip".
      seed: of the run.
      x: "step" and "wall_time" (seconds) of each row with the metric, ``[N]`` each, increasing.
      value: the metric, ``[N]``, finite.
      missing: rows in which the metric was not a finite number.
      steps: of its last row.
      total_steps: to which it was to go.
      seconds: of its last row.
      steps_per_second: median over its rows.
    """

    workdir: str
    config: dict[str, Any]
    seed: int
    x: dict[str, np.ndarray]
    value: np.ndarray
    missing: int
    steps: int
    total_steps: int
    seconds: float
    steps_per_second: float


class Group(NamedTuple):
    """Runs that differ only in their seed; the label says what sets them apart from the others."""

    label: str
    runs: list[Run]


class Curve(NamedTuple):
    """A group's, ``[N]`` each: N points, by steps and by seconds.

    Attributes:
      x: "step", and "wall_time", the mean over seeds.
      mean: over seeds.
      half: half the width of the mean's interval; None with one seed.
    """

    x: dict[str, np.ndarray]
    mean: np.ndarray
    half: np.ndarray | None


def read_run(workdir: str | os.PathLike[str], metric: str) -> Run:
    """Reads a run, finished or not.

    Raises:
      ConfigError: the folder is no run, is damaged, or no row has the metric.
    """
    content, rows = read_config(workdir), read_rows(workdir)
    known = {name for row in rows for name in row}
    if metric not in known:
        raise ConfigError(f"no row of {workdir} has it: {unknown('metric', metric, known)}")
    having = [row for row in rows if metric in row]
    finite = [row for row in having if np.isfinite(row[metric])]
    if not finite:
        raise ConfigError(f"{metric} of {workdir} is not finite in any of its {len(having)} rows")
    x = {key: np.array([row[key] for row in finite]) for key in ("step", "wall_time")}
    for key, values in x.items():
        if not (np.diff(values) > 0).all():
            raise ConfigError(
                f"{METRICS} of {workdir} is damaged: {key!r} does not always increase"
            )
    config = flatten(content["config"])
    speeds = [row["time/steps_per_second"] for row in rows if "time/steps_per_second" in row]
    return Run(
        workdir=str(workdir),
        seed=config.pop("seed"),
        config=config,
        x=x,
        value=np.array([row[metric] for row in finite]),
        missing=len(having) - len(finite),
        steps=int(rows[-1]["step"]),
        total_steps=content["sizes"]["total_steps"],
        seconds=rows[-1]["wall_time"],
        steps_per_second=float(np.median(speeds)) if speeds else np.nan,
    )


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups runs whose configs are the same but for the seed, in the order they are given.

    Labels name the settings that differ between groups; one that a run does not have (an
    environment's parameter) is "default".

    Raises:
      ConfigError: two runs have the same config and seed, and would count as two seeds.
    """
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        seeds = groups.setdefault(json.dumps(run.config, sort_keys=True), {})
        if run.seed in seeds:
            raise ConfigError(
                f"{seeds[run.seed].workdir} and {run.workdir} have the same config and the same "
                f"seed, {run.seed}, and can't count twice; leave one out"
            )
        seeds[run.seed] = run
    settings = [next(iter(seeds.values())).config for seeds in groups.values()]
    differing = [
        key
        for key in dict.fromkeys(key for one in settings for key in one)
        if any(one.get(key) != settings[0].get(key) for one in settings)
    ] or ["agent"]
    labels = [
        ", ".join(f"{key}={one.get(key, 'default')}" for key in differing) for one in settings
    ]
    return [
        Group(label, list(seeds.values()))
        for label, seeds in zip(labels, groups.values(), strict=True)
    ]


def mean_and_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean of ``values [S, ...]`` over S seeds, and half its 95 % Student-t interval's width."""
    from scipy.special import stdtrit

    seeds, mean = len(values), values.mean(0)
    if seeds == 1:
        return mean, None
    return mean, stdtrit(seeds - 1, 0.975) * values.std(0, ddof=1) / np.sqrt(seeds)


def _smooth(values: np.ndarray, rows: int) -> np.ndarray:
    """Means over windows of so many rows around each; at the ends, over those there are."""
    window = np.ones(min(rows, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def curve(group: Group, smooth: int = 1) -> Curve:
    """A group's mean and interval; ``smooth`` rows of a run are averaged first, 1 does nothing.

    Raises:
      ConfigError: its runs have no steps in common.
    """
    runs = group.runs
    start = max(run.x["step"][0] for run in runs)
    end = min(run.x["step"][-1] for run in runs)
    if start > end:
        names = " and ".join(run.workdir for run in runs)
        raise ConfigError(
            f"{names} differ only in their seed, but share no steps: one begins at {start:,}, "
            f"another one ends at {end:,}; leave it out"
        )
    # Every row's own place where they are few: interpolation then changes nothing on equal steps.
    steps = np.unique(np.concatenate([run.x["step"] for run in runs]))
    steps = steps[(steps >= start) & (steps <= end)]
    if len(steps) > POINTS:
        steps = np.linspace(start, end, POINTS)
    values = [np.interp(steps, run.x["step"], _smooth(run.value, smooth)) for run in runs]
    times = [np.interp(steps, run.x["step"], run.x["wall_time"]) for run in runs]
    x = {"step": steps, "wall_time": np.mean(times, 0)}
    return Curve(x, *mean_and_interval(np.array(values)))
