"""An actor thread: steps a pool of environments, and chooses their actions on an actor device.

https://arxiv.org/abs/2104.06272, section "Sebulba": several threads share an actor device, each
with a batch of environments of its own, so that one thread steps its environments while the
actions of another are computed.
"""

from typing import NamedTuple

import jax
import numpy as np

from podracer.acting.host_unroll import ActorState, HostUnroll
from podracer.monitoring.metrics import Clock
from podracer.sebulba.pipeline import (
    ActorOutput,
    ParameterServer,
    PauseTimer,
    TrajectoryQueue,
    wait_for_learner,
)
from podracer.sebulba.pool import RestartingPool
from podracer.sebulba.setup import Actor
from podracer.sebulba.threads import Supervisor
from podracer.sebulba.timing import ENVIRONMENT, INFERENCE, TRANSFER
from podracer.types import Array, HostStep, TimeStep, Trajectory, Weights


class Schedule(NamedTuple):
    """Which unrolls an actor thread does, and with which weights.

    Unroll n supplies the data of update n; both are numbered from the beginning of the run.

    Attributes:
      first: number of the first unroll, and of updates done before it.
      end: number of the last unroll plus 1.
      length: steps of an unroll (T).
      lag: unroll n acts with the weights after max(first, n - lag) updates, whatever the timing;
        None acts with the newest weights.
      whole_episodes: whether each unroll begins new episodes.
    """

    first: int
    end: int
    length: int
    lag: int | None
    whole_episodes: bool = False

    def version(self, n: int) -> int | None:
        """The version of the weights that unroll n acts with; None is the newest one."""
        return None if self.lag is None else max(self.first, n - self.lag)


class ActorThread:
    """An actor thread, whose body is ``run``."""

    def __init__(
        self,
        actor: Actor,
        pool: RestartingPool,
        functions: HostUnroll,
        schedule: Schedule,
        parameters: ParameterServer,
        trajectories: TrajectoryQueue,
        pauses: PauseTimer,
        supervisor: Supervisor,
    ):
        """Starts nothing yet.

        Args:
          actor: the thread's device and environments.
          pool: the pool of these environments.
          functions: acting, compiled for the device (see ``program.make_actor_functions``).
          schedule: which unrolls to do.
          parameters: server that the weights come from.
          trajectories: queue that the trajectories are put into.
          pauses: measures the learner's pauses.
          supervisor: watches the thread.
        """
        self._actor, self._pool, self._functions = actor, pool, functions
        self._schedule, self._parameters, self._trajectories = schedule, parameters, trajectories
        self._pauses, self._supervisor = pauses, supervisor
        self._clock = Clock()

    def run(self) -> None:
        """Acts until the last unroll is done or the run stops."""
        try:
            state = self._start(self._pool.reset())
            for n in range(self._schedule.first, self._schedule.end):
                if self._schedule.whole_episodes and n > self._schedule.first:
                    state = self._start(self._pool.restart_episodes())
                version, weights = self._get_weights(n)
                state, parts = self._unroll(weights, state, n)
                self._put_trajectory(parts, version)
                # Frees device memory that the learner no longer needs.
                del weights, parts
        finally:
            self._pool.close()

    def _start(self, step: HostStep) -> ActorState:
        return self._functions.start(self._actor.env_ids, step.timestep)

    def _get_weights(self, n: int) -> tuple[int, Weights]:
        """Waits for the weights of unroll n, and returns their version with them."""
        with wait_for_learner(self._clock, self._pauses):
            return self._parameters.get(self._actor.device, self._schedule.version(n))

    def _unroll(
        self, weights: Weights, state: ActorState, n: int
    ) -> tuple[ActorState, tuple[Trajectory, ...]]:
        """Acts for T steps, and transfers the trajectory to the learner devices."""
        self._supervisor.beat("acting", on_device=True)
        with self._clock.measure(INFERENCE):
            unroll, action = self._functions.begin(weights, state, np.int32(n))
        for _ in range(self._schedule.length - 1):
            arrival = self._step(action)
            self._supervisor.beat("acting", on_device=True)
            with self._clock.measure(INFERENCE):
                # Takes numpy arrays: a separate transfer would cost as much as the call itself.
                unroll, action = self._functions.act(weights, unroll, arrival)
        arrival = self._step(action)
        self._supervisor.beat("sending its trajectory", on_device=True)
        with self._clock.measure(TRANSFER):
            state, parts = self._functions.close(unroll, arrival)
            parts = tuple(map(jax.device_put, parts, self._actor.learners))
            return state, jax.block_until_ready(parts)

    def _step(self, action: Array) -> TimeStep:
        """Waits for the actions, and steps the environments with them."""
        self._supervisor.beat("waiting for its actions", on_device=True)
        with self._clock.measure(INFERENCE):
            chosen = np.asarray(action)
        with self._clock.measure(ENVIRONMENT):
            return self._pool.step(chosen).timestep

    def _put_trajectory(self, parts: tuple[Trajectory, ...], version: int) -> None:
        """Hands a trajectory to the learner, and waits until the queue has room for it."""
        pool, seconds = self._pool, self._clock.take()
        versions = np.full((1, 2), version)
        output = ActorOutput(parts, versions, pool.take_finished(), pool.restarts, seconds)
        with wait_for_learner(self._clock, self._pauses):
            self._trajectories.put(output)
