"""What actor threads and learner exchange: trajectories one way, weights the other."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from podracer.acting.statistics import EpisodeSums
from podracer.monitoring.metrics import Clock
from podracer.sebulba.threads import POLL_S, SupervisedQueue, Supervisor
from podracer.sebulba.timing import PAUSE, WAIT
from podracer.types import Device, Trajectory, Weights


class ActorOutput(NamedTuple):
    """What an actor thread sends to the learner after an unroll.

    Attributes:
      parts: the trajectory, one part on each of the host's learner devices.
      versions: ``[n, 2]``, versions of the weights that acted: the oldest and the newest one of
        each unroll, or of all if these are the same.
      episodes: numpy sums over the games that ended during the unroll.
      restarts: how often the thread's pool has been rebuilt so far.
      seconds: what the thread's time was spent on, see ``timing``.
    """

    parts: tuple[Trajectory, ...]
    versions: np.ndarray
    episodes: EpisodeSums
    restarts: int
    seconds: dict[str, float]


TrajectoryQueue = SupervisedQueue[ActorOutput]


class ParameterServer:
    """The newest versions of the weights, on every actor device."""

    def __init__(self, supervisor: Supervisor, keep: int):
        """``keep``: how many versions are kept."""
        self._supervisor = supervisor
        self._keep = keep
        self._versions: dict[int, dict[Device, Weights]] = {}
        self._changed = threading.Condition()

    def publish(self, version: int, weights: dict[Device, Weights]) -> None:
        """Adds a version.

        Args:
          version: number of updates that made the weights.
          weights: the weights by actor device, to which their transfer must have ended.
        """
        with self._changed:
            self._versions[version] = weights
            for old in sorted(self._versions)[: -self._keep]:
                del self._versions[old]
            self._changed.notify_all()

    def get(self, device: Device, version: int | None) -> tuple[int, Weights]:
        """Waits for a version; None returns the newest one.

        Returns:
          The version and its weights on the device.
        """
        self._supervisor.begin_wait()
        with self._changed:
            while not self._has(version):
                if not self._changed.wait(POLL_S):
                    self._supervisor.check_wait()
            found = max(self._versions) if version is None else version
            return found, self._versions[found][device]

    def _has(self, version: int | None) -> bool:
        return bool(self._versions) if version is None else version in self._versions


class PauseTimer:
    """Measures the time for which the learner pauses while the training loop evaluates or saves.

    During a pause, actor threads soon have to wait, but a faster learner would not shorten that
    wait. The learner begins with a pause, which ends with its first update.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._finished_s = 0.0
        self._paused_at: float | None = time.monotonic()

    def pause(self) -> None:
        """The learner pauses from now on."""
        with self._lock:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """The learner learns from now on."""
        with self._lock:
            self._finished_s, self._paused_at = self._total(), None

    def seconds(self) -> float:
        """Seconds of all pauses so far."""
        with self._lock:
            return self._total()

    def _total(self) -> float:
        running = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        return self._finished_s + running


@contextlib.contextmanager
def wait_for_learner(clock: Clock, pauses: PauseTimer) -> Iterator[None]:
    """Measures a wait for the learner, and separately the pauses that fall into it."""
    with clock.measure(WAIT):
        before = pauses.seconds()
        yield
        paused = pauses.seconds() - before
    clock.seconds[WAIT] -= paused
    clock.seconds[PAUSE] = clock.seconds.get(PAUSE, 0.0) + paused
