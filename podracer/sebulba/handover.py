"""Complete unrolls of remote environments on their way to the learner."""

from collections.abc import Callable

import jax
import numpy as np

from podracer.acting.independent_unroll import PlacesState
from podracer.acting.statistics import EpisodeSums
from podracer.monitoring.metrics import Clock
from podracer.sebulba.pipeline import (
    ActorOutput,
    PauseTimer,
    TrajectoryQueue,
    wait_for_learner,
)
from podracer.sebulba.program import CompiledIndependent
from podracer.sebulba.threads import Supervisor
from podracer.sebulba.timing import TRANSFER
from podracer.types import Device, Trajectory

# Trajectories that may be incomplete at a time. A learner device without environments would let
# them grow without end.
MOST_OPEN = 2

Metrics = Callable[[], tuple[EpisodeSums, dict[str, float]]]


class Filling:
    """A trajectory that is being filled with unrolls, one part for each learner device."""

    def __init__(self, functions: CompiledIndependent, learners: int):
        self.parts: list[Trajectory] = [functions.allocate() for _ in range(learners)]
        self.used, self.versions = [0] * learners, []


class Handover:
    """Collects the unrolls of an actor thread, and hands them to the learner.

    Attributes:
      dropped: unrolls that were lost because other learner devices had none for too long.
    """

    def __init__(
        self,
        functions: CompiledIndependent,
        part_of: np.ndarray,
        learners: tuple[Device, ...],
        trajectories: TrajectoryQueue,
        pauses: PauseTimer,
        supervisor: Supervisor,
    ):
        """Holds nothing yet.

        Args:
          functions: acting, compiled for the thread's device.
          part_of: ``[N]``, the number of the learner device of each of the thread's places.
          learners: the learner devices.
          trajectories: queue that trajectories are put into.
          pauses: measures the learner's pauses.
          supervisor: watches the thread.
        """
        self._supervisor = supervisor
        self._functions, self._part_of, self._learners = functions, part_of, learners
        self._trajectories, self._pauses = trajectories, pauses
        self._open: list[Filling] = []
        self._clock = Clock()
        # What dropped unrolls are copied to, at no position.
        self._unused = functions.allocate()
        self.dropped = 0

    def add(
        self, state: PlacesState, row: np.ndarray, versions: np.ndarray, metrics: Metrics
    ) -> tuple[PlacesState, np.ndarray]:
        """Adds the unrolls of some places, and waits for the learner if a trajectory is full.

        Args:
          state: the places' state after the arrivals at T.
          row: ``[n]``, the places.
          versions: ``[n, 2]``, the oldest and the newest weights that acted in each unroll.
          metrics: called for each trajectory: the thread's episodes and seconds.

        Returns:
          The state in which these places have begun their next unrolls, and those of them whose
          unrolls were dropped.
        """
        dropped = row[:0]
        rest = [np.flatnonzero(self._part_of[row] == part) for part in range(len(self._learners))]
        while any(map(len, rest)):
            placed = False
            for part, index in enumerate(rest):
                filling = self._with_room(part) if len(index) else None
                if filling:
                    now = index[: self._room(filling, part)]
                    state = self._take(state, row[now], filling, part)
                    filling.versions.append(versions[now])
                    rest[part], placed = index[len(now) :], True
            while self._open and all(n == self._functions.unrolls for n in self._open[0].used):
                self._hand_over(self._open.pop(0), metrics)
            if not placed:
                # Other learner devices have none to complete a trajectory with.
                now = np.concatenate(rest)[: self._functions.most]
                state = self._take(state, row[now])
                self.dropped += len(now)
                dropped = np.append(dropped, row[now])
                rest = [np.setdiff1d(index, now) for index in rest]
        return state, dropped

    def _room(self, filling: Filling, part: int) -> int:
        return min(self._functions.most, self._functions.unrolls - filling.used[part])

    def _take(
        self, state: PlacesState, row: np.ndarray, filling: Filling | None = None, part: int = 0
    ) -> PlacesState:
        """Begins the next unrolls of these places, and copies the complete ones to a trajectory."""
        size = self._functions.size(len(row))
        place, position = (np.full(size, np.iinfo(np.int32).max, np.int32) for _ in range(2))
        place[: len(row)] = row
        if filling is None:
            state, self._unused = self._functions.take[size](state, self._unused, place, position)
            return state
        position[: len(row)] = filling.used[part] + np.arange(len(row))
        filling.used[part] += len(row)
        state, filling.parts[part] = self._functions.take[size](
            state, filling.parts[part], place, position
        )
        return state

    def _with_room(self, part: int) -> Filling | None:
        """The first trajectory whose part is not full, a new one if need be."""
        for filling in self._open:
            if filling.used[part] < self._functions.unrolls:
                return filling
        if len(self._open) == MOST_OPEN:
            return None
        self._open.append(Filling(self._functions, len(self._learners)))
        return self._open[-1]

    def _hand_over(self, filling: Filling, metrics: Metrics) -> None:
        self._supervisor.beat("handing a trajectory over", on_device=True)
        with self._clock.measure(TRANSFER):
            parts = tuple(map(jax.device_put, filling.parts, self._learners))
            jax.block_until_ready(parts)
        episodes, seconds = metrics()
        for name, x in self._clock.take().items():
            seconds[name] = seconds.get(name, 0.0) + x
        output = ActorOutput(parts, np.concatenate(filling.versions), episodes, 0, seconds)
        with wait_for_learner(self._clock, self._pauses):
            self._trajectories.put(output)
