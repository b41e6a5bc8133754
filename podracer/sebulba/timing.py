"""What the time of actor threads and learner is spent on, and what would make a run faster."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from podracer.types import Row

# An actor thread's time. Observations travel with the call that acts on them, which counts as
# inference; "transfer" is the transfer of trajectories to the learner devices. "wait" is time spent
# waiting for the learner to work, "pause" for the training loop to evaluate or save. While it waits
# for remote environments, "network" is what their steps do not account for.
ENVIRONMENT, INFERENCE, TRANSFER = "environment", "inference", "transfer"
NETWORK = "network"
WAIT, PAUSE = "wait", "pause"
# The learner's time.
LEARNER_WAIT, UPDATE, PUBLISH = "learner_wait", "learner_update", "learner_publish"
# A side that waits for less than this share of its time is not worth a change.
SMALL_SHARE = 0.1


def report(rows: Sequence[Row], steps_per_update: int) -> dict[str, Any]:
    """What the time of a run, over all its starts, was spent on, with advice, and how often pools
    of environments were rebuilt.

    Args:
      rows: all of the run's rows of metrics; their seconds are means per update.
      steps_per_update: environment steps of an update.
    """
    seconds: dict[str, float] = {}
    before = 0
    for row in rows:
        updates, before = (row["step"] - before) / steps_per_update, row["step"]
        for name, x in row.items():
            if name.startswith(("time/actor_", "time/learner_")):
                name = name.removeprefix("time/")
                seconds[name] = seconds.get(name, 0.0) + x * updates
    # Each start counts its own.
    counts = [0, *(row["actor/restarts"] for row in rows)]
    restarts = round(sum(new - old if new >= old else new for old, new in pairwise(counts)))
    text = describe(seconds)
    if restarts:
        text += (
            f"\npools of environments were rebuilt {restarts} times after errors of environments; "
            "what they had collected of their unrolls was dropped"
        )
    return {"breakdown": seconds, "pool_restarts": restarts, "report": text}


def describe(seconds: dict[str, float]) -> str:
    """A table of what the time was spent on, and a sentence of advice.

    Args:
      seconds: seconds of the run by name; those of actors are means over their threads.
    """
    actor, learner = _with_prefix(seconds, "actor_"), _with_prefix(seconds, "learner_")
    lines = [
        f"  {side:<9}" + ", ".join(f"{name} {x:.1f} s" for name, x in times.items())
        for side, times in (("actors", actor), ("learner", learner))
    ]
    return "\n".join(["where the time went:", *lines, advice(actor, learner)])


def _with_prefix(seconds: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): x for name, x in seconds.items() if name.startswith(prefix)}


def advice(actor: dict[str, float], learner: dict[str, float]) -> str:
    """Which side waits for the other, and what to change, in a sentence.

    Args:
      actor: mean seconds of an actor thread, by what they were spent on.
      learner: the learner's seconds, by what they were spent on.
    """
    # Pauses for evaluation and checkpoints say nothing about the balance of actors and learner.
    acting = sum(actor.values()) - actor.get(PAUSE, 0.0)
    waits = {
        "actors": actor.get(WAIT, 0.0) / max(acting, 1e-9),
        "learner": learner.get("wait", 0.0) / max(sum(learner.values()), 1e-9),
    }
    side, share = max(waits.items(), key=lambda item: item[1])
    if share < SMALL_SHARE:
        return (
            f"Neither side waits for the other for more than {SMALL_SHARE:.0%} of its time: well "
            "balanced."
        )
    if side == "actors":
        return (
            f"Actors wait for the learner {share:.0%} of their time: more learner devices, fewer "
            "epochs, or a smaller network would make the run faster."
        )
    remote = NETWORK in actor
    remedies = {
        ENVIRONMENT: f"more {'workers' if remote else 'CPU cores'} or cheaper environments",
        NETWORK: "more environments for each worker, a faster network, or smaller observations",
        INFERENCE: "more actor devices or more environments per thread",
        TRANSFER: "fewer or smaller observations",
    }
    slow = max(remedies, key=lambda what: actor.get(what, 0.0))
    return (
        f"The learner waits for actors {share:.0%} of its time, and actors spend most of theirs on "
        f"{slow}: {remedies[slow]} would make the run faster."
    )
