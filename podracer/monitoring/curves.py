"""Learning curves: one metric of many runs, grouped by config, with mean and interval over seeds.

Runs that differ only in their seed form a group. Its curve is the mean over seeds with the 95 %
Student-t interval of that mean: where the true mean is likely to be, not the range of the seeds,
so that it may exceed the bounds of a return. The curve covers the steps that all seeds have
reached; between rows, each seed is interpolated linearly. Against wall-clock time, each point of
the curve is drawn at the mean of the times at which the seeds reached its step. Times count from
the start of a run and include compilation and evaluation.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.errors import ConfigError, unknown
from podracer.storage.compatibility import flatten
from podracer.storage.workdir import METRICS, read_config, read_rows

INTERVAL = "95 % Student-t interval"
# The most points of a curve, which keeps an SVG file small.
MAX_POINTS = 200


class MetricHistory(NamedTuple):
    """One metric of a run.

    Attributes:
      workdir: workdir of the run.
      config: settings without the seed, by dotted name such as "ppo.clip".
      seed: random seed of the run.
      x: "step" and "wall_time" (seconds) of each row with the metric, ``[N]`` each, increasing.
      value: the metric, ``[N]``, finite.
      num_nonfinite: number of rows in which the metric is NaN or infinite; ``value`` excludes them.
      steps: environment steps at the last row.
      total_steps: environment steps of the whole run.
      seconds: wall-clock time at the last row.
      steps_per_second: median training speed over all rows.
    """

    workdir: str
    config: dict[str, Any]
    seed: int
    x: dict[str, np.ndarray]
    value: np.ndarray
    num_nonfinite: int
    steps: int
    total_steps: int
    seconds: float
    steps_per_second: float


class SeedGroup(NamedTuple):
    """Runs that differ only in their seed; the label names what distinguishes them from others."""

    label: str
    runs: list[MetricHistory]


class Curve(NamedTuple):
    """The learning curve of a group at N points.

    Attributes:
      x: "step" and "wall_time" of each point, ``[N]`` each; times are means over seeds.
      mean: mean over seeds, ``[N]``.
      half_width: half the width of the mean's interval, ``[N]``; None with one seed.
    """

    x: dict[str, np.ndarray]
    mean: np.ndarray
    half_width: np.ndarray | None


def read_run(workdir: str | os.PathLike[str], metric: str) -> MetricHistory:
    """Reads one metric of a run, finished or not.

    Raises:
      ConfigError: the folder holds no run or a damaged one, or no row has a finite value of the
        metric.
    """
    content, rows = read_config(workdir), read_rows(workdir)
    known = {name for row in rows for name in row}
    if metric not in known:
        raise ConfigError(f"{workdir}: {unknown('metric', metric, known)}")
    with_metric = [row for row in rows if metric in row]
    finite = [row for row in with_metric if np.isfinite(row[metric])]
    if not finite:
        raise ConfigError(
            f"{metric} of {workdir} is NaN or infinite in all of its {len(with_metric)} rows"
        )
    x = {key: np.array([row[key] for row in finite]) for key in ("step", "wall_time")}
    for key, values in x.items():
        if not (np.diff(values) > 0).all():
            raise ConfigError(
                f"{METRICS} of {workdir} is damaged: {key!r} does not increase from row to row"
            )
    config = flatten(content["config"])
    speeds = [row["time/steps_per_second"] for row in rows if "time/steps_per_second" in row]
    return MetricHistory(
        workdir=str(workdir),
        seed=config.pop("seed"),
        config=config,
        x=x,
        value=np.array([row[metric] for row in finite]),
        num_nonfinite=len(with_metric) - len(finite),
        steps=int(rows[-1]["step"]),
        total_steps=content["sizes"]["total_steps"],
        seconds=rows[-1]["wall_time"],
        steps_per_second=float(np.median(speeds)) if speeds else np.nan,
    )


def read_seeds(workdir: str | os.PathLike[str], metric: str) -> list[MetricHistory]:
    """One metric of each agent of a run with several seeds, as if each were a run of its own; of
    other runs, and where a metric is not one of an agent, the run's.

    Raises:
      ConfigError: as ``read_run`` does, or the run is a sweep, and the metric one of each agent.
    """
    whole = read_run(workdir, metric)
    known = {name for row in read_rows(workdir) for name in row}
    if f"member_0/{metric}" in known:
        raise ConfigError(
            f"{workdir} is a sweep, whose agents have different settings; add --sweep, or choose "
            f"one of them: --metric=member_0/{metric}"
        )
    seeds = [whole.seed + i for i in range(whole.config.get("num_seeds", 1))]
    names = [f"seed_{seed}/{metric}" for seed in seeds]
    if len(seeds) == 1 or names[0] not in known:
        return [whole]
    return [
        run._replace(seed=seed, config={**run.config, "num_seeds": 1})
        for seed, run in zip(seeds, (read_run(workdir, name) for name in names), strict=True)
    ]


def _label(
    config: Mapping[str, Any], settings: Sequence[str], without: Collection[str] = ()
) -> str:
    """These settings of a config, but those in the sections ``without``."""
    kept = [key for key in settings if key.partition(".")[0] not in without]
    return ", ".join(f"{key}={config.get(key, 'default')}" for key in kept)


def group_runs(runs: Sequence[MetricHistory], label: Sequence[str] = ()) -> list[SeedGroup]:
    """Groups runs whose configs differ only in the seed, in the given order.

    A setting that a run doesn't have, such as a parameter of another environment, is "default".

    Args:
      runs: the runs, of any number of groups.
      label: dotted names of the settings in the labels; by default all that differ between groups.

    Raises:
      ConfigError: two runs have the same config and seed, and would count as two seeds; no run has
        a setting of ``label``, or two groups would have the same label.
    """
    groups: dict[str, dict[int, MetricHistory]] = {}
    for run in runs:
        seeds = groups.setdefault(json.dumps(run.config, sort_keys=True), {})
        if run.seed in seeds:
            raise ConfigError(
                f"{seeds[run.seed].workdir} and {run.workdir} have the same config and the same "
                f"seed, {run.seed}, so they count as one sample; leave one of them out"
            )
        seeds[run.seed] = run
    settings = [next(iter(seeds.values())).config for seeds in groups.values()]
    known = list(dict.fromkeys(key for config in settings for key in config))
    for key in label:
        if key not in known:
            raise ConfigError(f"--label: {unknown('setting', key, known)}")
    named = (
        label
        or [
            key
            for key in known
            if any(config.get(key) != settings[0].get(key) for config in settings)
        ]
        or ["agent"]
    )
    agents = {config["agent"] for config in settings}
    # The section of an agent means nothing to the others.
    labels = [
        _label(config, named, () if label else agents - {config["agent"]}) for config in settings
    ]
    if len({*labels}) < len(labels):
        labels = [_label(config, named) for config in settings]
    for same in labels:
        if labels.count(same) > 1:
            raise ConfigError(
                f"--label: {labels.count(same)} curves would be labelled {same!r}; name a setting "
                "that differs between them as well"
            )
    return [
        SeedGroup(label, list(seeds.values()))
        for label, seeds in zip(labels, groups.values(), strict=True)
    ]


def mean_and_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The mean over seeds and half the width of its 95 % Student-t interval.

    Args:
      values: one value or curve of each seed, ``[S, ...]``.

    Returns:
      The mean and half the interval's width, ``[...]`` each; None for the latter if S is 1.
    """
    # The quantile function of Student's t that scipy.stats.t uses. Importing scipy.stats itself
    # would take twice as long.
    from scipy.special import stdtrit

    seeds, mean = len(values), values.mean(0)
    if seeds == 1:
        return mean, None
    return mean, stdtrit(seeds - 1, 0.975) * values.std(0, ddof=1) / np.sqrt(seeds)


def _moving_average(values: np.ndarray, rows: int) -> np.ndarray:
    """Means over ``rows`` rows centred on each row; over fewer rows near both ends."""
    window = np.ones(min(rows, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def mean_curve(group: SeedGroup, smooth: int = 1) -> Curve:
    """The mean of a group with its interval, over the steps that all seeds have reached.

    Args:
      group: the runs.
      smooth: number of consecutive rows of a run to average first; 1 averages none.

    Raises:
      ConfigError: the runs have no steps in common.
    """
    runs = group.runs
    start = max(run.x["step"][0] for run in runs)
    end = min(run.x["step"][-1] for run in runs)
    if start > end:
        names = " and ".join(run.workdir for run in runs)
        raise ConfigError(
            f"{names} differ only in their seed, but have no steps in common: one begins at "
            f"{start:,}, another one ends at {end:,}; leave one of them out"
        )
    # Up to MAX_POINTS, the steps of the rows themselves: seeds that have the same steps are then
    # not interpolated.
    steps = np.unique(np.concatenate([run.x["step"] for run in runs]))
    steps = steps[(steps >= start) & (steps <= end)]
    if len(steps) > MAX_POINTS:
        steps = np.linspace(start, end, MAX_POINTS)
    values = [np.interp(steps, run.x["step"], _moving_average(run.value, smooth)) for run in runs]
    times = [np.interp(steps, run.x["step"], run.x["wall_time"]) for run in runs]
    x = {"step": steps, "wall_time": np.mean(times, 0)}
    return Curve(x, *mean_and_interval(np.array(values)))
