"""What several agents have found: their returns, the best settings, the ancestors of the best."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from podracer.config import Config
from podracer.config.members import Member
from podracer.monitoring.curves import INTERVAL, mean_and_interval
from podracer.monitoring.figures import EVALUATION
from podracer.monitoring.formatting import mean_and_error
from podracer.training.rows import comparable
from podracer.types import Row

# Points that are shown.
SHOWN = 5


def make_report(config: Config, rows: Sequence[Row]) -> dict[str, Any]:
    """What the summary of several agents has in addition: settings and final evaluation of each; of
    a sweep or a population also the number of the best one, its ancestors if there were selections,
    the mean of each point with several seeds, and what to print.

    Args:
      config: the run's configuration.
      rows: all rows of metrics.
    """
    last, selects = rows[-1], config.selection.every > 0
    if len(config.members) == 1:
        return {}
    points = [point.at(last) for point in config.points]
    members = [member for point in points for member in point.members]
    found = [
        {
            "name": member.name,
            "seed": member.seed,
            **member.settings,
            "eval_return_mean": last.get(f"{member.name}/{EVALUATION}"),
            "diverged": last.get(f"{member.name}/train/diverged") == 1,
        }
        for member in members
    ]
    if not config.sweep and not selects:
        return {"members": found}
    # With Sebulba, a run that has diverged has no final evaluation.
    returns = comparable([last.get(f"{member.name}/{EVALUATION}", -np.inf) for member in members])
    best, returns = int(returns.argmax()), returns.reshape(len(points), -1)
    complete = np.isfinite(returns).all(1)
    points = [points[i] for i in np.flatnonzero(complete)]
    means, half_widths = mean_and_interval(returns[complete].T)
    errors = [None] * len(points) if half_widths is None else half_widths.tolist()
    report: dict[str, Any] = {"members": found, "best_member": best}
    title = "the best members, each with the flags that train it alone:"
    if selects:
        title = "the best members, each with its settings at the end:"
    elif config.num_seeds > 1:
        title = f"the best settings, by the mean over {config.num_seeds} seeds and its {INTERVAL}:"
        report["points"] = [
            {**point.settings, "eval_return_mean": mean, "eval_return_interval": error}
            for point, mean, error in zip(points, means.tolist(), errors, strict=True)
        ]
    lines = [
        f"  {mean_and_error(float(means[i]), errors[i]):>10}  "
        f"{points[i].name}: {points[i].text}{points[i].remark(last)}"
        for i in np.argsort(-means, kind="stable")[:SHOWN]
    ]
    if selects:
        report["lineage"] = lineage = find_lineage(best, config.members, rows)
        before = [f"{members[x['member']].name} from step {x['step']:,}" for x in lineage]
        lines.append(f"the best one was {', '.join(before)}")
    return {**report, "report": "\n".join([title, *lines])}


def find_lineage(
    number: int, members: Sequence[Member], rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """The members that an agent descends from, in the order of time: each ``member`` with the
    ``step`` from which on it was that one, and the settings that it had then.

    Args:
      number: its number at the end.
      members: the members of the run, with their first settings.
      rows: all rows of metrics.
    """
    found: list[dict[str, Any]] = []
    for row in reversed(rows):
        member = members[number]
        parent = int(row.get(f"{member.name}/parent", number))
        if parent != number:
            found.append({"step": int(row["step"]), "member": number, **member.at(row).settings})
            number = parent
    return [{"step": 0, "member": number, **members[number].settings}, *reversed(found)]
