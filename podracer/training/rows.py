"""The rows of metrics of a run, one for each call of its step, and its summary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer.acting.statistics import Episodes, EpisodeSums, summarize
from podracer.config import Config
from podracer.config.members import Member
from podracer.config.sizes import Sizes
from podracer.errors import DivergedError
from podracer.learning import learner
from podracer.monitoring.curves import mean_and_interval
from podracer.monitoring.metrics import Clock
from podracer.types import Row

# What to do about a run that diverges.
ADVICE = "a lower learning_rate or max_grad_norm, or normalize_observations, may help"


def comparable(returns: Any) -> np.ndarray:
    """Mean returns of agents, among which to find the best: NaN, which an environment may yield, is
    less than all others."""
    return np.where(np.isnan(returns), -np.inf, returns)


class Selected(NamedTuple):
    """What a selection after a call has done, ``[agents]`` each.

    Attributes:
      due: bool, whether there was one.
      parent: int32, the number of the agent whose weights an agent has now.
      settings: its settings, by dotted name.
      mean: the mean of the settings of the best agents before it, the same for all agents.
    """

    due: Any
    parent: Any
    settings: dict[str, Any]
    mean: dict[str, Any]


class CallMetrics(NamedTuple):
    """The metrics of one call of a step, which is K updates; on the device except for ``host``.

    If several agents learn at once, they are the first axis.

    Attributes:
      learner: see ``learning.learner.Metrics``, ``[K]`` each.
      episodes: sums, ``[K]`` each, over the episodes that ended on all devices.
      host: further numbers, by the names under which they are logged.
      alive: ``[K]`` bool, whether an agent has not diverged; ``()`` if there is one only, whose run
        ends then.
      selected: see ``Selected``; ``()`` in runs without selections.
      averages: numbers of each average of groups, by the names under which they are logged.
    """

    learner: learner.Metrics
    episodes: EpisodeSums
    host: Row | tuple[()] = ()
    alive: Any = ()
    selected: Selected | tuple[()] = ()
    averages: Any = ()


def check_alive(alive: np.ndarray, first_update: int, sizes: Sizes) -> None:
    """Raises ``DivergedError`` if each of several agents, ``[agents, K]``, has diverged."""
    if not alive[:, -1].any():
        update = first_update + int(alive.any(0).argmin())
        raise DivergedError(
            f"a loss or gradient of each of the {len(alive)} agents became NaN or infinite, of the "
            f"last one before environment step {(update + 1) * sizes.steps_per_update:,} (update "
            f"{update}); {ADVICE}"
        )


def check_finite(losses: dict[str, Any], first_update: int, sizes: Sizes) -> None:
    """Raises ``DivergedError`` with the steps of the first update that has a NaN or infinity.

    Args:
      losses: losses by name, ``[K]`` each.
      first_update: the number of the first of these K updates.
      sizes: the run's sizes.
    """
    # Any NaN or infinity in learning appears in these two.
    bad = {name: ~np.isfinite(losses[name]) for name in ("total", "grad_norm")}
    worst = np.logical_or.reduce(list(bad.values()))
    if not worst.any():
        return
    update = int(worst.argmax())
    start = (first_update + update) * sizes.steps_per_update
    names = sorted(name for name, x in bad.items() if x[update])
    raise DivergedError(
        f"{', '.join(names)} became NaN or infinite between environment steps {start:,} and "
        f"{start + sizes.steps_per_update:,} (update {first_update + update}); {ADVICE}"
    )


def of_learner(metrics: learner.Metrics) -> Row:
    """Means over updates; those of losses over the updates that had gradient steps."""
    row: Row = {name: float(x.mean()) for name, x in metrics.source.items()}
    learned = 1.0
    if not isinstance(metrics.learned, tuple):
        row["train/learned"] = learned = float(metrics.learned.mean())
    if learned:
        # A name with a slash has its own group, such as "replay/age".
        row |= {
            name if "/" in name else f"loss/{name}": float(x.mean()) / learned
            for name, x in metrics.losses.items()
        }
    return row


def of_training(metrics: CallMetrics) -> Row:
    diverged: Row = {}
    if not isinstance(metrics.alive, tuple):
        diverged["train/diverged"] = float(not metrics.alive[-1])
        if not metrics.alive[-1]:
            return diverged
    episodes, ret, length = (float(x.sum()) for x in metrics.episodes)
    row = {**of_learner(metrics.learner), "train/episodes": round(episodes)}
    if episodes:
        row["train/episode_return"] = ret / episodes
        row["train/episode_length"] = length / episodes
    averages = {name: float(x.mean()) for name, x in dict(metrics.averages).items()}
    return {**row, **diverged, **averages, **dict(metrics.host)}


def of_selection(selected: Selected | tuple[()], members: Sequence[Member]) -> Row:
    """The settings of each agent after a call, and at a selection whose weights it has, beside the
    mean of the best agents' settings before it."""
    if not selected:
        return {}
    row: Row = {}
    if selected.due[0]:
        row |= {f"selection/{name}": float(x[0]) for name, x in selected.mean.items()}
    for i, member in enumerate(members):
        row |= {f"{member.name}/{name}": float(x[i]) for name, x in selected.settings.items()}
        if selected.due[i]:
            row[f"{member.name}/parent"] = int(selected.parent[i])
    return row


def of_evaluation(episodes: Episodes) -> Row:
    statistics = summarize(episodes)
    return {
        "eval/episode_return": statistics["return_mean"],
        "eval/episode_return_std": statistics["return_std"],
        "eval/episode_length": statistics["length_mean"],
        "eval/episodes": statistics["episodes"],
        "eval/complete": statistics["complete"],
    }


def of_agents(make: Callable[[Any], Row], metrics: Any, members: Sequence[Member]) -> Row:
    """The row of an agent's metrics; for several agents, the mean with its confidence interval, and
    the row of each."""
    if len(members) == 1:
        return make(metrics)
    rows = [make(jax.tree.map(lambda x, i=i: x[i], metrics)) for i in range(len(members))]
    row: Row = {}
    for name in dict.fromkeys(name for each in rows for name in each):
        values = np.array([each[name] for each in rows if name in each])
        mean, interval = mean_and_interval(values)
        row[name] = float(mean)
        if name.endswith("episode_return") and interval is not None:
            row[f"{name}_interval"] = float(interval)
    for member, each in zip(members, rows, strict=True):
        row |= {f"{member.name}/{name}": x for name, x in each.items()}
    return row


def summarize_run(last: Row, config: Config, clock: Clock) -> dict[str, Any]:
    """The summary of a run over all its starts; steps are those of one agent."""
    count = len(config.members)
    interval = last.get("eval/episode_return_interval")
    starting = sum(clock.seconds.get(what, 0.0) for what in ("setup", "compile"))
    return {
        "env_steps": last["step"],
        "wall_seconds": clock.total(),
        "compile_seconds": clock.seconds["compile"],
        "steps_per_second": last["step"] * count / (clock.total() - starting),
        "eval_return_mean": last["eval/episode_return"],
        "eval_return_std": last["eval/episode_return_std"],
        **({} if interval is None else {"eval_return_interval": interval}),
        "eval_episodes": round(last["eval/episodes"]),
        "eval_complete": last["eval/complete"],
        "seed": config.seed,
        "num_seeds": config.num_seeds,
        "seconds": {**clock.seconds, "training": clock.training()},
    }
