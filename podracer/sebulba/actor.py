"""The body of an actor thread: a pool of environments, and inference on one device.

https://arxiv.org/abs/2104.06272, section "Sebulba": several threads share an actor device, each
with a batch of environments of its own, so that one steps while another's actions are computed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from podracer import rollout
from podracer.metrics import Clock
from podracer.rollout import EpisodeMetrics, HostUnroll
from podracer.sebulba.pipeline import Channel, Publisher, Supervisor, Unroll
from podracer.types import Array, Device, HostEnvironment, HostStep, Pool, TimeStep

# What an actor's time goes to. Observations travel with the call that acts on them, which counts as
# inference; "transfer" is that of trajectories to the learners. "wait" is for the learner at work,
# "pause" while the loop around it evaluates or saves.
ENVIRONMENT, INFERENCE, TRANSFER = "environment", "inference", "transfer"
WAIT, PAUSE = "wait", "pause"


class Games:
    """Sums over the running game of each environment, in numpy, and over those that ended."""

    def __init__(self, batch: int):
        self._score = np.zeros(batch, np.float64)
        self._length = np.zeros(batch, np.int64)
        self._ended = np.zeros(3)

    def add(self, step: HostStep) -> None:
        """One arrival; a reset step of an autoreset is no step of a game."""
        self._score += step.score
        self._length += ~step.timestep.first
        if step.over.any():
            over = step.over
            self._ended += over.sum(), self._score[over].sum(), self._length[over].sum()
            self._score[over] = self._length[over] = 0

    def abandon(self) -> None:
        """The running games are lost."""
        self._score[:] = self._length[:] = 0

    def take(self) -> EpisodeMetrics:
        """Sums over the games that ended since they were last taken."""
        ended, self._ended = self._ended, np.zeros(3)
        return EpisodeMetrics(*ended)


class SteadyPool:
    """A pool that is rebuilt when it fails, up to a number of times.

    What a rebuilt pool arrives at opens episodes that nothing has ended, which is just what the one
    rule of ``returns.py`` cuts: no step that was lost teaches anything.

    Attributes:
      restarts: how often it was rebuilt.
      games: sums over its games.
    """

    def __init__(
        self,
        env: HostEnvironment,
        make: Callable[[int], Pool],
        batch: int,
        max_restarts: int,
        beat: Callable[[str], None],
    ):
        """``make(restarts)`` builds a pool of ``batch`` environments; ``beat`` is told so."""
        self._beat = beat
        self.restarts = 0
        self.games = Games(batch)
        self._make, self._max_restarts = make, max_restarts
        self._pool: Pool | None = None
        self._expected = rollout.sent_shapes(env, batch)

    def reset(self) -> HostStep:
        """Builds the pool and resets it. One that can't be built at first is no case for another
        try: errors pass."""
        self._beat("building its pool")
        self.close()
        self._pool = self._make(self.restarts)
        return self._checked(self._pool.reset())

    def step(self, action: np.ndarray) -> HostStep:
        """Steps the pool; where that fails, rebuilds and resets it."""
        assert self._pool is not None, "reset comes first"
        self._beat("stepping its pool")
        try:
            return self._checked(self._pool.step(action))
        except Exception as error:
            failure = error
        while self.restarts < self._max_restarts:
            self.restarts += 1
            self.games.abandon()
            try:
                return self.reset()
            except Exception as error:
                failure = error
        failure.add_note(f"(after {self.restarts} restarts of the pool)")
        raise failure

    def _checked(self, step: HostStep) -> HostStep:
        rollout.check_sent(step.timestep, self._expected)
        self.games.add(step)
        return step

    def close(self) -> None:
        """Lets go of the pool."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class Actor(NamedTuple):
    """Who an actor thread is.

    Attributes:
      name: of the thread.
      device: to act on.
      learners: devices that get a part of its trajectories each.
      env_ids: ``[B]`` int32, global numbers of its environments.
      make_pool: ``(restarts) -> Pool`` of them.
    """

    name: str
    device: Device
    learners: tuple[Device, ...]
    env_ids: np.ndarray
    make_pool: Callable[[int], Pool]


class Schedule(NamedTuple):
    """What an actor does when.

    Attributes:
      first: the number of the first unroll, and of the updates done by then.
      last: the number after the last one's.
      length: steps of each.
      lag: unroll n acts with the weights after max(first, n - lag) updates, whatever the timing;
        None takes the newest there are.
      max_restarts: of a pool.
    """

    first: int
    last: int
    length: int
    lag: int | None
    max_restarts: int


@contextlib.contextmanager
def _waiting(clock: Clock, publisher: Publisher) -> Iterator[None]:
    """Measures a wait for the learner, its pauses apart."""
    with clock.measure(WAIT):
        before = publisher.paused()
        yield
        paused = publisher.paused() - before
    clock.seconds[WAIT] -= paused
    clock.seconds[PAUSE] = clock.seconds.get(PAUSE, 0.0) + paused


def run(
    actor: Actor,
    env: HostEnvironment,
    functions: HostUnroll,
    schedule: Schedule,
    publisher: Publisher,
    channel: Channel[Unroll],
    supervisor: Supervisor,
) -> None:
    """Acts until all unrolls are done or the run stops.

    Args:
      actor: who.
      env: what kind of environment.
      functions: compiled for the actor's device; ``begin`` takes the number of the unroll in place
        of its key.
      schedule: what to do when.
      publisher: where weights come from.
      channel: where unrolls go to.
      supervisor: who watches over it.
    """
    beat, clock = supervisor.beat, Clock()
    pool = SteadyPool(env, actor.make_pool, len(actor.env_ids), schedule.max_restarts, beat)

    def advance(action: Array) -> TimeStep:
        beat("waiting for actions")
        with clock.measure(INFERENCE):
            chosen = np.asarray(action)
        with clock.measure(ENVIRONMENT):
            return pool.step(chosen).timestep

    try:
        first = pool.reset()
        state = functions.start(actor.env_ids, first.timestep)
        for n in range(schedule.first, schedule.last):
            with _waiting(clock, publisher):
                wanted = None if schedule.lag is None else max(schedule.first, n - schedule.lag)
                version, weights = publisher.get(actor.device, wanted)
            beat("acting")
            with clock.measure(INFERENCE):
                recording, action = functions.begin(weights, state, np.int32(n))
            for _ in range(schedule.length - 1):
                sent = advance(action)
                beat("acting")
                with clock.measure(INFERENCE):
                    # Takes what the host sent as it is: a transfer of its own costs as much again.
                    recording, action = functions.act(weights, recording, sent)
            sent = advance(action)
            beat("sending its unroll")
            with clock.measure(TRANSFER):
                state, parts = functions.close(recording, sent)
                parts = tuple(map(jax.device_put, parts, actor.learners))
                jax.block_until_ready(parts)
            unroll = Unroll(parts, version, pool.games.take(), pool.restarts, clock.take())
            # Held by nobody else: what the learner is done with must not stay in memory.
            del recording, parts
            with _waiting(clock, publisher):
                channel.put(unroll)
            del unroll
    finally:
        pool.close()
