"""A pool of host environments that is rebuilt when it fails."""

import collections
import re
import threading
import traceback
from collections.abc import Callable

import numpy as np

from podracer.acting import host_unroll
from podracer.acting.statistics import EpisodeSums, HostEpisodes
from podracer.config import SebulbaConfig
from podracer.sebulba.threads import Supervisor
from podracer.types import HostEnvironment, HostStep, Pool

# Numbers and addresses, which make messages of the same error differ.
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


class RestartingPool:
    """A pool that is rebuilt when it fails, up to a number of times within a period.

    A rebuilt pool begins episodes although none has ended. Transitions to such a first observation
    are exactly those that ``agents.returns`` cuts, so the lost steps are not learned from.

    Attributes:
      restarts: how often the pool has been rebuilt.
    """

    def __init__(
        self,
        env: HostEnvironment,
        make_pool: Callable[[int], Pool],
        batch: int,
        options: SebulbaConfig,
        supervisor: Supervisor,
    ):
        """Builds nothing yet.

        Args:
          env: the environment.
          make_pool: ``(restarts) -> Pool``.
          batch: number of environments of the pool.
          options: how often the pool may be rebuilt.
          supervisor: watches the thread that steps the pool, and prints the errors after which
            the pool is rebuilt.
        """
        self._make_pool, self._options, self._supervisor = make_pool, options, supervisor
        self.restarts = 0
        self._restarted_at: collections.deque[float] = collections.deque()
        self._episodes, self._finished = HostEpisodes(batch), np.zeros(3)
        self._pool: Pool | None = None
        self._expected = host_unroll.transfer_shapes(env, batch)

    def reset(self) -> HostStep:
        """Builds the pool and resets it.

        An error is not caught: a pool that can't be built at first will not be built later either.
        """
        self._supervisor.beat("building its pool")
        self.close()
        self._pool = self._make_pool(self.restarts)
        return self._checked(self._pool.reset())

    def step(self, action: np.ndarray) -> HostStep:
        """Steps the pool; if that fails, rebuilds and resets it."""
        return self._call("stepping its pool", lambda pool: pool.step(action))

    def restart_episodes(self) -> HostStep:
        """Begins a new episode in every environment; if that fails, rebuilds the pool."""
        self._episodes.abandon()
        return self._call("resetting its pool", lambda pool: pool.reset())

    def _call(self, doing: str, function: Callable[[Pool], HostStep]) -> HostStep:
        assert self._pool is not None, "reset comes first"
        self._supervisor.beat(doing)
        try:
            return self._checked(function(self._pool))
        except Exception as error:
            failure = _without_variables(error)
        while self._may_restart():
            self._warn(failure)
            self._restarted_at.append(self._supervisor.now())
            self.restarts += 1
            self._episodes.abandon()
            try:
                return self.reset()
            except Exception as error:
                failure = _without_variables(error)
        failure.add_note(f"(the pool had already been rebuilt {self._limit()})")
        raise failure

    def _may_restart(self) -> bool:
        earliest = self._supervisor.now() - self._options.restart_window_s
        while self._restarted_at and self._restarted_at[0] <= earliest:
            self._restarted_at.popleft()
        return len(self._restarted_at) < self._options.max_restarts

    def _warn(self, failure: Exception) -> None:
        """Prints an error after which the pool is rebuilt, unless one like it was printed."""
        self._supervisor.warn_once(
            f"{type(failure).__qualname__}: {NUMBER.sub('#', str(failure))}",
            f"thread {threading.current_thread().name!r} rebuilds its pool, at most "
            f"{self._limit()}. From now on this error is only counted, as actor/restarts:\n"
            + "".join(traceback.format_exception(failure)).rstrip(),
        )

    def _limit(self) -> str:
        options = self._options
        return (
            f"{options.max_restarts} times (sebulba.max_restarts) in "
            f"{options.restart_window_s:g} seconds (sebulba.restart_window_s)"
        )

    def _checked(self, step: HostStep) -> HostStep:
        host_unroll.check_transfer(step.timestep, self._expected)
        total, ended = self._episodes.add(step)
        if ended.any():
            self._finished += ended.sum(), total.ret[ended].sum(), total.length[ended].sum()
        return step

    def take_finished(self) -> EpisodeSums:
        """Sums over the games that ended since the last call."""
        finished, self._finished = self._finished, np.zeros(3)
        return EpisodeSums(*finished)

    def close(self) -> None:
        """Closes the pool."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _without_variables(error: Exception) -> Exception:
    """An error without the variables of the functions that it has left.

    Among them may be a half-sent message, which Python's garbage collector can't free without
    printing an error of its own.
    """
    traceback.clear_frames(error.__traceback__)
    return error
