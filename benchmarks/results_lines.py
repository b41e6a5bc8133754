"""The lines of docs/results.jsonl: a record of each run that has ended."""

import json
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from podracer.agents import AGENTS
from podracer.monitoring.curves import read_run
from podracer.monitoring.figures import RETURN
from podracer.storage import workdir
from podracer.storage.compatibility import flatten

ROOT = pathlib.Path(__file__).parents[1]
LINES = ROOT / "docs" / "results.jsonl"
# Runs of other programs.
PEERS = ROOT / "docs" / "results_peers.jsonl"
# The most points of a run's learning curve in its line.
POINTS = 50


class Line(NamedTuple):
    """A run that has ended.

    Attributes:
      task: ``Task.name``.
      seed: random seed.
      command: the command that trained it, from the root of the repository.
      config: all settings but those of other agents, by dotted name.
      versions: of Python and of packages.
      hardware: the cores that the run could use.
      steps: environment steps.
      seconds: wall-clock time over all starts.
      steps_per_second: training speed without compilation.
      episode_return: mean return of the final evaluation.
      episodes: number of its episodes.
      curve: "step", "wall_time" (seconds) and "return" (of training, or of evaluations, as the task
        says), ``[POINTS]`` or fewer each.
    """

    task: str
    seed: int
    command: str
    config: dict[str, Any]
    versions: dict[str, str]
    hardware: str
    steps: int
    seconds: float
    steps_per_second: float
    episode_return: float
    episodes: int
    curve: dict[str, list[float]]


def read_lines(path: pathlib.Path) -> list[Line]:
    """All lines; none if there is no file."""
    if not path.exists():
        return []
    return [Line(**json.loads(line)) for line in path.read_text().splitlines()]


def append(line: Line, path: pathlib.Path) -> None:
    """Adds a line to the file."""
    with path.open("a") as file:
        file.write(json.dumps(line._asdict()) + "\n")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config by dotted names, without the sections of agents that it does not train."""
    return flatten({k: v for k, v in config.items() if k not in {*AGENTS} - {config["agent"]}})


def hardware(num_cores: int) -> str:
    """A number of cores of this machine's processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{num_cores} x {models[0] if models else platform.machine()}"


def thin(x: Mapping[str, np.ndarray], returns: np.ndarray) -> dict[str, list[float]]:
    """A learning curve of up to ``POINTS`` points: means over equal spans of steps.

    Args:
      x: "step" and "wall_time" of each return, ``[N]`` each.
      returns: ``[N]``.
    """
    step = x["step"]
    span = (step - 1) * POINTS // step[-1]
    columns = {**x, "return": returns}
    return {
        name: [float(f"{column[span == i].mean():.6g}") for i in np.unique(span)]
        for name, column in columns.items()
    }


def read_line(
    task: str,
    seed: int,
    command: str,
    num_cores: int,
    folder: str | os.PathLike[str],
    metric: str = RETURN,
) -> Line:
    """The line of the run in a workdir, which has ended, with the curve of a metric."""
    summary = json.loads((pathlib.Path(folder) / workdir.SUMMARY).read_text())
    content, history = workdir.read_config(folder), read_run(folder, metric)
    return Line(
        task=task,
        seed=seed,
        command=command,
        config=settings(content["config"]),
        versions=content["versions"],
        hardware=hardware(num_cores),
        steps=summary["env_steps"],
        seconds=round(summary["wall_seconds"], 1),
        steps_per_second=round(summary["steps_per_second"]),
        episode_return=summary["eval_return_mean"],
        episodes=summary["eval_episodes"],
        curve=thin(history.x, history.value),
    )
