"""An actor thread for remote environments: acts for those that have arrived, whichever they are.

SEED RL's inference (https://arxiv.org/abs/1910.06591): environments progress independently, the
agent's memory and unfinished unrolls stay on the device, and unrolls that are complete go to the
learner. What waits is acted on together, once it is many enough or has waited long enough.
"""

import queue
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from podracer.acting.independent_unroll import Arrivals, PlacesState
from podracer.acting.statistics import EpisodeSums, HostEpisodes
from podracer.monitoring.metrics import Clock
from podracer.remote.server import Stream
from podracer.sebulba.handover import Handover
from podracer.sebulba.pipeline import ParameterServer
from podracer.sebulba.program import CompiledIndependent
from podracer.sebulba.threads import POLL_S, Supervisor
from podracer.sebulba.timing import ENVIRONMENT, INFERENCE, NETWORK
from podracer.types import Device, HostStep

# Of a row that is not used.
NOWHERE = np.iinfo(np.int32).max


class Arrived(NamedTuple):
    """Steps of some of a worker's environments.

    Attributes:
      stream: the worker.
      envs: ``[n]``, their numbers among the worker's environments.
      row: ``[n]``, their places in this thread.
      step: ``[n, ...]``.
      trip: seconds since their actions were sent; 0 for the first step.
      stepping: seconds that the environments took.
    """

    stream: Stream
    envs: np.ndarray
    row: np.ndarray
    step: HostStep
    trip: float
    stepping: float


class Joined(NamedTuple):
    """A worker has taken places of this thread, ``row [n]``."""

    row: np.ndarray


class Left(NamedTuple):
    """A worker has gone from ``row [n]``; ``done`` is called once nothing of it is left there."""

    row: np.ndarray
    done: Callable[[], None]


class InferenceThread:
    """An actor thread, whose body is ``run``; other threads put what arrives into ``inbox``."""

    def __init__(
        self,
        env_ids: np.ndarray,
        device: Device,
        functions: CompiledIndependent,
        handover: Handover,
        parameters: ParameterServer,
        supervisor: Supervisor,
        *,
        first_unroll: int,
        contiguous: bool,
        wait_s: float,
        answer: Callable[[Stream, np.ndarray, np.ndarray], None],
    ):
        """Starts nothing yet.

        Args:
          env_ids: ``[N]``, the global numbers of its places.
          device: the actor device.
          functions: acting, compiled for this device.
          handover: takes complete unrolls to the learner.
          parameters: server that the weights come from.
          supervisor: watches the thread.
          first_unroll: number of the first unroll of each place.
          contiguous: whether the learner joins an environment's unrolls, as a replay buffer does.
          wait_s: seconds for which the first arrival waits for others.
          answer: ``(stream, envs [n], actions [n, ...])`` sends actions to a worker.
        """
        self._env_ids, self._device, self._functions = env_ids, device, functions
        self._handover, self._parameters, self._supervisor = handover, parameters, supervisor
        self._wait_s, self._answer = wait_s, answer
        places = len(env_ids)
        self.inbox: queue.SimpleQueue[Arrived | Joined | Left] = queue.SimpleQueue()
        self._held: Arrived | Left | None = None
        self._unroll = np.full(places, first_unroll - 1, np.int32)
        self._t = np.zeros(places, np.int32)
        # Whether a place has been taken, and whether its first step has yet to come.
        self._taken, self._starts = np.zeros(places, bool), np.zeros(places, bool)
        # Whether a batch has waited for a place in vain: others don't, until it has arrived.
        self._late = np.zeros(places, bool)
        # Whether an unroll of a place was dropped, and no episode has begun since: the next unroll
        # must begin with one, so that nothing is learned across the gap.
        self._contiguous, self._gap = contiguous, np.zeros(places, bool)
        # The oldest and the newest weights that acted in each unfinished unroll.
        self._versions = np.zeros((places, 2), np.int64)
        self._episodes, self._finished = HostEpisodes(places), np.zeros(3)
        self._clock = Clock()
        # Of all arrivals since the last trajectory: seconds of trips, and of stepping in these.
        self._trip, self._stepping = 0.0, 0.0

    @property
    def most(self) -> int:
        """Most environments that are acted on at once."""
        return self._functions.most

    def run(self) -> None:
        """Acts until the run stops."""
        self._supervisor.beat("beginning", on_device=True)
        state = self._functions.init(self._env_ids)
        while True:
            with self._clock.measure(ENVIRONMENT):
                batch = self._collect()
            version, weights = self._parameters.get(self._device, None)
            self._supervisor.beat("acting", on_device=True)
            with self._clock.measure(INFERENCE):
                arrivals = self._arrivals(batch)
                state, action = self._functions.act[len(arrivals.t)](weights, state, arrivals)
                chosen = np.asarray(action)
            self._send(batch, chosen)
            state = self._advance(state, np.concatenate([x.row for x in batch]), version)

    def _collect(self) -> list[Arrived]:
        """Waits for arrivals, no two of the same place."""
        batch: list[Arrived] = []
        rows, most, deadline = 0, self._functions.most, 0.0
        self._supervisor.begin_wait()
        # There is nothing to wait for once all of these have arrived.
        expected = self._taken & ~self._late
        while not batch or (rows < most and expected.any()):
            item = self._next(deadline - time.monotonic() if batch else POLL_S)
            if item is None and batch:
                self._late |= expected
                break
            if item is None:
                self._supervisor.check_wait()
            elif isinstance(item, Joined):
                self._taken[item.row] = self._starts[item.row] = expected[item.row] = True
                self._gap[item.row] = False
            elif batch and (isinstance(item, Left) or rows + len(item.row) > most):
                # Another worker could take these places within this batch.
                self._held = item
                break
            elif isinstance(item, Left):
                self._forget(item)
                expected[item.row] = False
            else:
                deadline = deadline if batch else time.monotonic() + self._wait_s
                batch.append(item)
                rows += len(item.row)
                self._late[item.row] = expected[item.row] = False
        return batch

    def _next(self, timeout: float) -> Arrived | Joined | Left | None:
        held, self._held = self._held, None
        if held is not None:
            return held
        try:
            return self.inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def _forget(self, left: Left) -> None:
        self._taken[left.row] = self._late[left.row] = False
        self._episodes.abandon(left.row)
        left.done()

    def _arrivals(self, batch: list[Arrived]) -> Arrivals:
        """The arrivals of a batch, filled up to the next of the compiled sizes."""
        row = np.concatenate([x.row for x in batch])
        count, size = len(row), self._functions.size(len(row))
        starts = self._starts[row]
        self._t[row[starts]] = 0
        self._unroll[row[starts]] += 1
        self._starts[row] = False
        for x in batch:
            total, ended = self._episodes.add(x.step, x.row)
            self._finished += ended.sum(), total.ret[ended].sum(), total.length[ended].sum()
            self._trip += x.trip
            self._stepping += min(x.stepping, x.trip)
        gap = self._gap[row]
        # The action at T is the first one of the next unroll. Behind a gap each is, until one is
        # recorded.
        self._unroll[row] += gap | (self._t[row] == self._functions.length)

        def fill(x: np.ndarray, value: int = 0) -> np.ndarray:
            padded = np.full((size, *x.shape[1:]), value, x.dtype)
            padded[:count] = x
            return padded

        def join(*xs: np.ndarray) -> np.ndarray:
            padded = np.zeros((size, *xs[0].shape[1:]), xs[0].dtype)
            np.concatenate(xs, out=padded[:count])
            return padded

        timestep = jax.tree.map(join, *(x.step.timestep for x in batch))
        begins = gap & timestep.first[:count]
        # Behind a gap an end is as unknown as where a worker is replaced.
        timestep.discount[:count][begins] = 1.0
        self._gap[row] = gap & ~begins
        numbers = (fill(row, NOWHERE), fill(self._unroll[row]), fill(self._t[row]), fill(starts))
        return Arrivals(*numbers, timestep)

    def _send(self, batch: list[Arrived], chosen: np.ndarray) -> None:
        begin = 0
        for x in batch:
            end = begin + len(x.row)
            self._answer(x.stream, x.envs, chosen[begin:end])
            begin = end

    def _advance(self, state: PlacesState, row: np.ndarray, version: int) -> PlacesState:
        """Goes to the next step of these places, and hands over the unrolls that are complete."""
        t = self._t[row]
        complete, begins = row[t == self._functions.length], row[t == 0]
        versions = self._versions[complete].copy()
        for new in (complete, begins):
            self._versions[new, 0] = version
        self._versions[row, 1] = version
        self._t[row] = np.where(t == self._functions.length, 1, np.where(self._gap[row], 0, t + 1))
        if len(complete):
            state, dropped = self._handover.add(state, complete, versions, self._take_metrics)
            if self._contiguous:
                self._t[dropped], self._gap[dropped] = 0, True
        return state

    def _take_metrics(self) -> tuple[EpisodeSums, dict[str, float]]:
        """Sums over the games that ended since the last call, and what the time was spent on."""
        finished, self._finished = self._finished, np.zeros(3)
        seconds = self._clock.take()
        waited = seconds.get(ENVIRONMENT, 0.0)
        share = self._stepping / self._trip if self._trip else 1.0
        seconds |= {ENVIRONMENT: waited * share, NETWORK: waited * (1 - share)}
        self._trip = self._stepping = 0.0
        return EpisodeSums(*finished), seconds
