"""A worker's pools of environments, each of which a thread steps at its own speed."""

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from podracer.types import HostStep, Pool


class Ended(NamedTuple):
    """A pool's thread has ended.

    Attributes:
      failure: the error of the pool as text; "" if the connection has ended.
    """

    failure: str


class Stepped(NamedTuple):
    """What a pool has returned.

    Attributes:
      envs: ``[n]``, the numbers of its environments among the worker's.
      step: ``[n, ...]``.
      seconds: how long it took.
    """

    envs: np.ndarray
    step: HostStep
    seconds: float


class PoolThread:
    """Steps a pool in a thread, from its reset on."""

    def __init__(
        self,
        envs: np.ndarray,
        make: Callable[[], Pool],
        check: Callable[[HostStep], None],
        outbox: "queue.SimpleQueue[Stepped | Ended | None]",
    ):
        """Starts the thread.

        Args:
          envs: ``[n]``, the numbers of its environments among the worker's.
          make: makes the pool.
          check: raises an error if what the pool returns can't be sent.
          outbox: where what it returns is put.
        """
        self.envs, self._make, self._check, self._outbox = envs, make, check, outbox
        # When the step that is under way began; infinite between steps and until the reset.
        self._stepping_since = math.inf
        self._actions: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        # Actions that have arrived, while others of the pool have not.
        self._partial: np.ndarray | None = None
        self._given = np.zeros(len(envs), bool)
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        self._thread.start()

    def act(self, places: np.ndarray, actions: np.ndarray) -> None:
        """Takes actions of some of the pool's environments, and steps it once it has all."""
        if self._partial is None:
            self._partial = np.zeros((len(self.envs), *actions.shape[1:]), actions.dtype)
        self._partial[places] = actions
        self._given[places] = True
        if self._given.all():
            self._actions.put(self._partial)
            self._partial, self._given = None, np.zeros(len(self.envs), bool)

    def _run(self) -> None:
        pool, failure = None, ""
        try:
            pool = self._make()
            self._put(pool.reset)
            while (actions := self._actions.get()) is not None:
                self._stepping_since = time.monotonic()
                self._put(lambda pool=pool, actions=actions: pool.step(actions))
                self._stepping_since = math.inf
        except BaseException:
            failure = traceback.format_exc().rstrip()
        finally:
            # Closing a pool that has failed may fail or hang.
            self._outbox.put(Ended(failure))
            if pool is not None:
                pool.close()

    def _put(self, step: Callable[[], HostStep]) -> None:
        start = time.monotonic()
        returned = step()
        self._check(returned)
        self._outbox.put(Stepped(self.envs, returned, time.monotonic() - start))

    def close(self) -> None:
        """Ends the thread after its step."""
        self._actions.put(None)

    def hangs(self, seconds: float) -> bool:
        """Whether a step has taken longer than this."""
        return time.monotonic() - self._stepping_since > seconds

    def join(self, seconds: float) -> bool:
        """Waits until the pool is closed, at most so long; returns whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()
