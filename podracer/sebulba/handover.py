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
    ):
        """Holds nothing yet.

        Args:
          functions: acting, compiled for the thread's device.
          part_of: ``[N]``, the number of the learner device of each of the thread's places.
          learners: the learner devices.
          trajectories: queue that trajectories are put into.
          pauses: measures the learner's pauses.
        """
        self._functions, self._part_of, self._learners = functions, part_of, learners
        self._trajectories, self._pauses = trajectories, pauses
        self._open: list[Filling] = []
        self._clock = Clock()
        self.dropped = 0

    def add(
        self, state: PlacesState, row: np.ndarray, versions: np.ndarray, metrics: Metrics
    ) -> PlacesState:
        """Adds the unrolls of some places, and waits for the learner if a trajectory is full.

        Args:
          state: the places' state after the arrivals at T.
          row: ``[n]``, the places.
          versions: ``[n, 2]``, the oldest and the newest weights that acted in each unroll.
          metrics: called for each trajectory: the thread's episodes and seconds.

        Returns:
          The state in which these places have begun their next unrolls.
        """
        for part in range(len(self._learners)):
            mine = self._part_of[row] == part
            state = self._add_part(state, part, row[mine], versions[mine])
        while self._open and all(n == self._functions.unrolls for n in self._open[0].used):
            self._hand_over(self._open.pop(0), metrics)
        return state

    def _add_part(
        self, state: PlacesState, part: int, row: np.ndarray, versions: np.ndarray
    ) -> PlacesState:
        while len(row):
            filling = self._with_room(part)
            used = filling.used[part] if filling else 0
            count = min(len(row), self._functions.most, self._functions.unrolls - used)
            size = self._functions.size(count)
            place, position = (np.full(size, np.iinfo(np.int32).max, np.int32) for _ in range(2))
            place[:count] = row[:count]
            if filling:
                position[:count] = used + np.arange(count)
                filling.used[part] += count
                filling.versions.append(versions[:count])
                into = filling.parts[part]
            else:
                self.dropped += count
                into = self._functions.allocate()
            state, into = self._functions.take[size](state, into, place, position)
            if filling:
                filling.parts[part] = into
            row, versions = row[count:], versions[count:]
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
        with self._clock.measure(TRANSFER):
            parts = tuple(map(jax.device_put, filling.parts, self._learners))
            jax.block_until_ready(parts)
        episodes, seconds = metrics()
        for name, x in self._clock.take().items():
            seconds[name] = seconds.get(name, 0.0) + x
        output = ActorOutput(parts, np.concatenate(filling.versions), episodes, 0, seconds)
        with wait_for_learner(self._clock, self._pauses):
            self._trajectories.put(output)
