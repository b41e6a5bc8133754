"""What a sweep has found: its members, the best of them, and whom that one descends from."""

from collections.abc import Sequence
from typing import Any

from podracer.config import Config
from podracer.config.members import Member
from podracer.types import Row

# Members that are shown.
SHOWN = 5


def make_report(config: Config, rows: Sequence[Row]) -> dict[str, Any]:
    """What the summary of a sweep or a population has in addition: settings and final evaluation of
    each member, the number of the best one, its ancestors if there were selections, and what to
    print.

    Args:
      config: the run's configuration.
      rows: all rows of metrics.
    """
    last, selects = rows[-1], config.selection.every > 0
    if not config.sweep and not selects:
        return {}
    members = [member.at(last) for member in config.members]
    found = [
        {
            "name": member.name,
            "seed": member.seed,
            **member.settings,
            "eval_return_mean": last[f"{member.name}/eval/episode_return"],
            "diverged": last.get(f"{member.name}/train/diverged") == 1,
        }
        for member in members
    ]
    order = sorted(range(len(found)), key=lambda i: -found[i]["eval_return_mean"])
    title = "the best members, each with the flags that train it alone:"
    if selects:
        title = "the best members, each with its settings at the end:"
    lines = [
        f"  {found[i]['eval_return_mean']:>10.4g}  {members[i].name}: "
        f"{members[i].text}{' (diverged)' * found[i]['diverged']}"
        for i in order[:SHOWN]
    ]
    report: dict[str, Any] = {"members": found, "best_member": order[0]}
    if selects:
        report["lineage"] = lineage = find_lineage(order[0], members, rows)
        before = [f"{members[x['member']].name} from step {x['step']:,}" for x in lineage]
        lines.append(f"the best one was {', '.join(before)}")
    return {**report, "report": "\n".join([title, *lines])}


def find_lineage(
    number: int, members: Sequence[Member], rows: Sequence[Row]
) -> list[dict[str, int]]:
    """The members that an agent descends from, in the order of time: each ``member`` with the
    ``step`` from which on it was that one.

    Args:
      number: its number at the end.
      members: the members of the run.
      rows: all rows of metrics.
    """
    found: list[dict[str, int]] = []
    for row in reversed(rows):
        parent = int(row.get(f"{members[number].name}/parent", number))
        if parent != number:
            found.append({"step": int(row["step"]), "member": number})
            number = parent
    return [{"step": 0, "member": number}, *reversed(found)]
