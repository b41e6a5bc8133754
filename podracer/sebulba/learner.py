"""The learner's side: takes an unroll of every actor thread, updates, publishes, keeps the time."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from podracer import mesh as mesh_lib
from podracer.config import Sizes
from podracer.loop import CallMetrics, check_finite
from podracer.metrics import Clock, Row
from podracer.rollout import EpisodeMetrics
from podracer.sebulba import actor as actor_lib
from podracer.sebulba.pipeline import Channel, Publisher, Supervisor, Unroll, Worker
from podracer.sebulba.program import TRAJECTORY_SPECS, State
from podracer.types import Device, Weights

LEARNER_WAIT, UPDATE, PUBLISH = "learner_wait", "learner_update", "learner_publish"


class Learner:
    """Consumes unrolls in the order of the threads, whatever the order they come in.

    Attributes:
      version: updates done by now, whose weights are published.
    """

    def __init__(
        self,
        update: Callable[..., Any],
        mesh: jax.sharding.Mesh,
        actor_devices: Sequence[Device],
        publisher: Publisher,
        channels: Sequence[Channel[Unroll]],
        supervisor: Supervisor,
        sizes: Sizes,
        version: int,
        beat: Callable[[], None],
        *,
        timed: bool,
    ):
        """``beat`` is called with each update, and one that takes too long hangs if it is
        ``timed``; the rest as in ``train.launch``."""
        self._worker, self._beat = Worker(supervisor, "learner", timed=timed), beat
        self._update, self._mesh, self._sizes = update, mesh, sizes
        self._actor_devices, self._publisher, self._channels = actor_devices, publisher, channels
        self._clock = Clock()
        self.version = version

    def publish(self, weights: Weights) -> None:
        """Gives weights to all actor devices, once they are there."""

        def copy() -> dict[Device, Weights]:
            local = mesh_lib.local(weights)
            copies = {device: jax.device_put(local, device) for device in self._actor_devices}
            jax.block_until_ready(list(copies.values()))
            return copies

        self._publisher.publish(self.version, self._worker("publishing weights", copy))

    def _learn(self, state: State, taken: Sequence[Unroll]) -> tuple[State, Weights, Any]:
        """One update, and its metrics on the host."""
        # A guard is its thread's.
        with jax.transfer_guard("disallow"):
            trajectories = tuple(
                mesh_lib.from_parts(unroll.parts, self._mesh, TRAJECTORY_SPECS) for unroll in taken
            )
            state, weights, metrics = self._update(state, trajectories)
            return state, weights, jax.device_get(metrics)

    def step(self, state: State) -> tuple[State, CallMetrics]:
        """``updates_per_call`` updates."""
        self._publisher.resume()
        start = time.monotonic()
        losses: list[Any] = []
        unrolls: list[Unroll] = []
        lags: list[int] = []
        for _ in range(self._sizes.updates_per_call):
            self._beat()
            with self._clock.measure(LEARNER_WAIT):
                taken = [channel.get() for channel in self._channels]
            with self._clock.measure(UPDATE):
                learn = partial(self._learn, state, taken)
                state, weights, metrics = self._worker("updating", learn)
            losses.append(metrics)
            # Before actors get these weights: what they did with them would hide the cause.
            new = {name: x[None] for name, x in losses[-1].items()}
            check_finite(new, self.version, self._sizes)
            lags += [self.version - unroll.version for unroll in taken]
            unrolls += [unroll._replace(parts=()) for unroll in taken]
            # Their trajectories are done with.
            del taken, learn
            self.version += 1
            with self._clock.measure(PUBLISH):
                self.publish(weights)
        row = self._host_row(unrolls, lags)
        # By the time a loop reads metrics one call late, this call is long over.
        steps = self._sizes.updates_per_call * self._sizes.steps_per_update
        row["time/steps_per_second"] = steps / (time.monotonic() - start)
        stacked = jax.tree.map(lambda *x: np.stack(x), *losses)
        # Times and lags are this host's.
        counts = np.array([*_sum_episodes(unrolls), row["actor/restarts"]], np.float64)
        *episodes, restarts = mesh_lib.tell_all(counts, self._mesh)().sum(0)
        row["actor/restarts"] = int(restarts)
        self._publisher.pause()
        return state, CallMetrics(stacked, EpisodeMetrics(*episodes), row)

    def _host_row(self, unrolls: Sequence[Unroll], lags: Sequence[int]) -> Row:
        """Lag, restarts, and seconds by what they went to: means an update, and over actors."""
        threads, updates = len(self._channels), self._sizes.updates_per_call
        seconds = {name: x / updates for name, x in self._clock.take().items()}
        for unroll in unrolls:
            for name, x in unroll.seconds.items():
                name = f"actor_{name}"
                seconds[name] = seconds.get(name, 0.0) + x / updates / threads
        return {
            "actor/restarts": sum(unroll.restarts for unroll in unrolls[-threads:]),
            "lag/min": min(lags),
            "lag/mean": sum(lags) / len(lags),
            "lag/max": max(lags),
            **{f"time/{name}": x for name, x in seconds.items()},
        }


def _sum_episodes(unrolls: Sequence[Unroll]) -> EpisodeMetrics:
    return EpisodeMetrics(*np.sum([unroll.episodes for unroll in unrolls], axis=0))


def report(rows: Sequence[Row], steps_per_update: int) -> dict[str, Any]:
    """What the time of a run went to, all its starts together, and what follows from that.

    Args:
      rows: all of the run's; their seconds are means an update.
      steps_per_update: of environments.
    """
    seconds: dict[str, float] = {}
    before = 0
    for row in rows:
        updates, before = (row["step"] - before) / steps_per_update, row["step"]
        for name, x in row.items():
            if name.startswith(("time/actor_", "time/learner_")):
                name = name.removeprefix("time/")
                seconds[name] = seconds.get(name, 0.0) + x * updates
    return {"breakdown": seconds, "report": describe(seconds)}


def describe(seconds: dict[str, float]) -> str:
    """Where the time went, in a table and one sentence of advice.

    Args:
      seconds: of the run; those of actors are means over their threads.
    """

    def part(prefix: str) -> dict[str, float]:
        return {
            name.removeprefix(prefix): x for name, x in seconds.items() if name.startswith(prefix)
        }

    actor, learner = part("actor_"), part("learner_")
    lines = [
        f"  {who:<9}" + ", ".join(f"{name} {x:.1f} s" for name, x in times.items())
        for who, times in (("actors", actor), ("learner", learner))
    ]
    return "\n".join(["where the time went:", *lines, advice(actor, learner)])


def advice(actor: dict[str, float], learner: dict[str, float]) -> str:
    """Which side waits for the other, and what to change, in one sentence."""
    # What the run spends on judging and saving is no matter of balance.
    acting = sum(actor.values()) - actor.get(actor_lib.PAUSE, 0.0)
    waits = {
        "actors": actor.get(actor_lib.WAIT, 0.0) / max(acting, 1e-9),
        "learner": learner.get("wait", 0.0) / max(sum(learner.values()), 1e-9),
    }
    side, share = max(waits.items(), key=lambda item: item[1])
    if share < 0.1:
        return "Neither side waits for the other for more than a tenth of its time: well balanced."
    if side == "actors":
        return (
            f"Actors wait for the learner {share:.0%} of their time: more learner devices, fewer "
            "epochs, or a smaller network would make the run faster."
        )
    cures = {
        actor_lib.ENVIRONMENT: "more CPU cores or cheaper environments",
        actor_lib.INFERENCE: "more actor devices or more environments to a thread",
        actor_lib.TRANSFER: "fewer or smaller observations",
    }
    slow = max(cures, key=lambda what: actor.get(what, 0.0))
    return (
        f"The learner waits for actors {share:.0%} of its time, which spend most of theirs on "
        f"{slow}: {cures[slow]} would make the run faster."
    )
