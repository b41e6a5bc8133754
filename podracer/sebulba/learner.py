"""The learner: takes a trajectory of every actor thread, updates the weights and publishes them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from podracer.acting.statistics import EpisodeSums
from podracer.distributed import mesh as mesh_lib
from podracer.learning.learner import Metrics
from podracer.monitoring.metrics import Clock
from podracer.sebulba.pipeline import ActorOutput, ParameterServer, PauseTimer, TrajectoryQueue
from podracer.sebulba.program import TRAJECTORY_SPECS, SebulbaState, copy_weights
from podracer.sebulba.setup import SebulbaSetup
from podracer.sebulba.threads import Supervisor, WorkerThread
from podracer.sebulba.timing import LEARNER_WAIT, PUBLISH, UPDATE
from podracer.training.rows import CallMetrics, check_finite
from podracer.types import Device, Row, Weights


class Learner:
    """Takes trajectories in the order of the threads, whatever the order in which they arrive.

    A worker thread does the work on devices, so that the main thread notices if it hangs.

    Attributes:
      version: number of updates done, and version of the published weights.
    """

    def __init__(
        self,
        setup: SebulbaSetup,
        update: Callable[..., Any],
        parameters: ParameterServer,
        queues: Sequence[TrajectoryQueue],
        pauses: PauseTimer,
        supervisor: Supervisor,
        first_update: int,
        heartbeat: Callable[[], None],
        host_row: Callable[[], Row] = dict,
        interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Publishes nothing yet.

        Args:
          setup: setup of the run.
          update: the compiled update.
          parameters: server that publishes the weights.
          queues: the trajectory queue of each actor thread.
          pauses: measures the time between two calls of ``step``.
          supervisor: watches the worker thread.
          first_update: the update at which the run starts or resumes.
          heartbeat: called before each update, and while remote environments are waited for.
          host_row: further metrics of this host.
          interruptible: a context in which a signal may interrupt the wait for a call's first
            trajectories.
        """
        self._host_row, self._interruptible = host_row, interruptible
        self._setup, self._sizes, self._update = setup, setup.sizes, update
        self._parameters, self._queues, self._pauses = parameters, queues, pauses
        self._worker = WorkerThread(supervisor, "learner", on_device=True)
        self._supervisor, self._heartbeat = supervisor, heartbeat
        self._clock = Clock()
        self.version = first_update

    def step(self, state: SebulbaState) -> tuple[SebulbaState, CallMetrics]:
        """Does ``updates_per_call`` updates.

        Args:
          state: the learner's state, which is donated.

        Returns:
          The new state, and the metrics of all updates.
        """
        self._pauses.resume()
        start = time.monotonic()
        updates: list[Metrics] = []
        outputs: list[ActorOutput] = []
        lags: list[np.ndarray] = []
        for i in range(self._sizes.updates_per_call):
            self._heartbeat()
            interruptible = nullcontext if i else self._interruptible
            with self._clock.measure(LEARNER_WAIT), interruptible():
                taken = [queue.get(self._waiting) for queue in self._queues]
            with self._clock.measure(UPDATE):
                learn = partial(self._learn, state, taken)
                state, weights, metrics = self._worker.call("updating", learn)
            updates.append(metrics)
            # Before actors use these weights: the errors that follow would hide the cause.
            losses = {name: x[None] for name, x in metrics.losses.items()}
            check_finite(losses, self.version, self._sizes)
            lags += [self.version - output.versions for output in taken]
            outputs += [output._replace(parts=()) for output in taken]
            # Frees the device memory of the trajectories.
            del taken, learn
            self.version += 1
            with self._clock.measure(PUBLISH):
                self.publish(weights)
        seconds = time.monotonic() - start
        # Episodes and restarts are summed over all hosts; times and lags are this host's.
        counts = np.array([*_sum_episodes(outputs), self._restarts(outputs)], np.float64)
        *episodes, restarts = mesh_lib.process_all_gather(counts, self._setup.mesh)().sum(0)
        row = {
            "actor/restarts": int(restarts),
            **self._host_row(),
            **self._timing_row(outputs, np.concatenate(lags)),
            # The training loop would measure this one call late.
            "time/steps_per_second": len(updates) * self._sizes.steps_per_update / seconds,
        }
        self._pauses.pause()
        stacked = jax.tree.map(lambda *x: np.stack(x), *updates)
        return state, CallMetrics(stacked, EpisodeSums(*episodes), row)

    def _waiting(self) -> None:
        """Called while the learner waits for trajectories."""
        # Remote workers may keep it waiting for ever. Actor threads that hang are noticed here, and
        # not by other processes.
        if self._setup.config.remote.num_envs:
            self._heartbeat()

    def _learn(
        self, state: SebulbaState, taken: Sequence[ActorOutput]
    ) -> tuple[SebulbaState, Weights, Metrics]:
        """Does one update, and copies its metrics to the host."""
        start = self._supervisor.now()
        # The training loop's transfer guard does not apply to this thread.
        with jax.transfer_guard("disallow"):
            trajectories = tuple(
                mesh_lib.from_parts(output.parts, self._setup.mesh, TRAJECTORY_SPECS)
                for output in taken
            )
            state, weights, metrics = self._update(state, trajectories)
            metrics = jax.device_get(metrics)
        # An update without gradient steps says nothing about how long the others take.
        if isinstance(metrics.learned, tuple) or metrics.learned:
            self._supervisor.add_update(self._supervisor.now() - start)
        return state, weights, metrics

    def publish(self, weights: Weights) -> None:
        """Publishes weights once they have arrived on all actor devices."""
        copies = self._worker.call("publishing weights", partial(self._copy_to_actors, weights))
        self._parameters.publish(self.version, copies)

    def publish_again(self, state: SebulbaState) -> None:
        """Publishes the weights of a state in place of those of the last update."""
        self.publish(copy_weights(state.train.weights))

    def _copy_to_actors(self, weights: Weights) -> dict[Device, Weights]:
        local = mesh_lib.local(weights)
        copies = {device: jax.device_put(local, device) for device in self._setup.split.actors}
        jax.block_until_ready(list(copies.values()))
        return copies

    def _restarts(self, outputs: Sequence[ActorOutput]) -> int:
        """How often this host's pools have been rebuilt so far."""
        return sum(output.restarts for output in outputs[-len(self._queues) :])

    def _timing_row(self, outputs: Sequence[ActorOutput], lags: np.ndarray) -> Row:
        """Lags, and what the time was spent on: means per update, and over actor threads."""
        threads, updates = len(self._queues), self._sizes.updates_per_call
        seconds = {name: x / updates for name, x in self._clock.take().items()}
        for output in outputs:
            for name, x in output.seconds.items():
                name = f"actor_{name}"
                seconds[name] = seconds.get(name, 0.0) + x / updates / threads
        return {
            "lag/min": int(lags.min()),
            "lag/mean": float(lags.mean()),
            "lag/max": int(lags.max()),
            **{f"time/{name}": x for name, x in seconds.items()},
        }


def _sum_episodes(outputs: Sequence[ActorOutput]) -> EpisodeSums:
    return EpisodeSums(*np.sum([output.episodes for output in outputs], axis=0))
