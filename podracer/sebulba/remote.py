"""Remote environments on the learner's side: admits workers, and passes steps to actor threads."""

import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from podracer.acting.host_evaluation import pool_seeds
from podracer.config import Config
from podracer.distributed import mesh as mesh_lib
from podracer.errors import FINAL, ExitCode, code_of
from podracer.remote import access, wire
from podracer.remote.server import End, RefusedError, Server, Stream
from podracer.sebulba.handover import Handover
from podracer.sebulba.inference import Arrived, InferenceThread, Joined, Left
from podracer.sebulba.pipeline import ParameterServer, PauseTimer, TrajectoryQueue
from podracer.sebulba.places import Places
from podracer.sebulba.program import CompiledIndependent
from podracer.sebulba.setup import SebulbaSetup
from podracer.sebulba.threads import Supervisor
from podracer.types import Device, HostStep, Row

# Round trips that percentiles are computed from, since the last row.
MOST_TRIPS = 10_000
# Seconds in which a local worker must have ended.
GRACE_S = 5.0


class RemoteActors:
    """The actor threads of a run with remote environments, and the server of their workers."""

    def __init__(
        self,
        setup: SebulbaSetup,
        functions: Mapping[Device, CompiledIndependent],
        parameters: ParameterServer,
        trajectories: TrajectoryQueue,
        pauses: PauseTimer,
        supervisor: Supervisor,
        first_update: int,
    ):
        """Starts the actor threads, and listens for workers.

        Args:
          setup: setup of the run.
          functions: acting, compiled, by actor device.
          parameters: server that the weights come from.
          trajectories: queue that trajectories are put into.
          pauses: measures the learner's pauses.
          supervisor: watches the threads, and prints warnings.
          first_update: the update at which the run starts or resumes.
        """
        options, learners = setup.config.remote, setup.split.learners
        self._setup, self._supervisor, self._first_update = setup, supervisor, first_update
        self.steps, self.actions = wire.step_layout(setup.env), wire.action_layout(setup.env)
        places = options.num_envs // jax.process_count()
        self._first_env = jax.process_index() * places
        self._places = Places(places, setup.num_threads, len(learners))
        self._joins = self._losses = self._restarts = self._workers = 0
        self._lock = threading.Lock()
        self._trips: deque[tuple[float, float]] = deque(maxlen=MOST_TRIPS)
        self._handovers: list[Handover] = []
        self._threads: list[InferenceThread] = []
        # Places may have done more unrolls than there were updates, and keys must not repeat.
        resumed = np.random.SeedSequence([setup.config.seed, first_update]).generate_state(1)[0]
        first_unroll = int(resumed >> 2) if first_update else 0
        for k in range(setup.num_threads):
            number, thread = divmod(k, setup.config.sebulba.threads)
            device = setup.split.actors[number]
            mine = np.arange(k, places, setup.num_threads)
            part_of = mine // (places // len(learners))
            handover = Handover(
                functions[device], part_of, learners, trajectories, pauses, supervisor
            )
            inference = InferenceThread(
                (self._first_env + mine).astype(np.int32),
                device,
                functions[device],
                handover,
                parameters,
                supervisor,
                first_unroll=first_unroll,
                contiguous=setup.components.agent.source.capacity > 0,
                wait_s=options.wait_ms / 1000,
                answer=self._answer,
            )
            supervisor.start(f"actor {number}.{thread}", inference.run)
            self._handovers.append(handover)
            self._threads.append(inference)
        # A stranger on this machine must not join, either.
        local = secrets.token_hex(16) if not options.listen else ""
        token = access.read_token(options.token_file) or local
        self._server = Server(options, self, token, lambda text: supervisor.warn_once(text, text))
        self._local = LocalWorkers(setup.config, self._server.local_port, token, places)

    @property
    def port(self) -> int:
        """The port that workers connect to."""
        return self._server.port

    def admit(self, stream: Stream, num_envs: int, restarts: int) -> dict[str, Any]:
        """See ``server.Handler``."""
        places = self._places.take(min(num_envs, wire.MOST_ROWS))
        if not len(places):
            raise RefusedError(End("all places are taken", "later"))
        stream.take_places(places)
        with self._lock:
            join = self._joins
            self._joins += 1
            self._workers += 1
            self._restarts += restarts > 0
        for thread, mine in self._by_thread(places):
            thread.inbox.put(Joined(self._rows(places[mine])))
        config = self._setup.config
        seeds = pool_seeds(
            config,
            self._first_env + places,
            join,
            self._first_update,
            jax.process_count(),
        )
        return {
            "env": config.env,
            "env_kwargs": dict(config.env_kwargs),
            "env_params": dict(config.env_params),
            "observed": list(config.observed),
            "newest_frame": config.sebulba.newest_frame,
            "seeds": seeds,
            "batch": self._threads[0].most,
            "timeout_s": config.remote.timeout_s,
            "step_timeout_s": config.sebulba.timeout_s,
            "steps": self.steps.describe(),
            "actions": self.actions.describe(),
        }

    def _rows(self, places: np.ndarray) -> np.ndarray:
        """The numbers of places of one thread within this thread."""
        return places // self._setup.num_threads

    def _by_thread(self, places: np.ndarray) -> Iterator[tuple[InferenceThread, np.ndarray]]:
        """The threads of places ``[n]``, each with a mask of those that are its own."""
        numbers = places % self._setup.num_threads
        for k in np.unique(numbers):
            yield self._threads[k], numbers == k

    def arrive(self, stream: Stream, index: np.ndarray, step: HostStep, microseconds: int) -> None:
        """See ``server.Handler``."""
        if len(index) > self._threads[0].most:
            raise wire.WireError("more steps than are acted on at once")
        sent_at, stepping = float(stream.sent_at[index].max()), microseconds / 1e6
        trip = time.monotonic() - sent_at if sent_at else 0.0
        if sent_at:
            self._trips.append((trip, stepping))
        places = stream.places[index]
        for thread, mine in self._by_thread(places):
            # Most often they are all of one thread, and need no copy.
            own = step if mine.all() else jax.tree.map(lambda x, mine=mine: x[mine], step)
            row = self._rows(places[mine])
            thread.inbox.put(Arrived(stream, index[mine], row, own, trip, stepping))

    def leave(self, stream: Stream, cause: str) -> None:
        """See ``server.Handler``."""
        if not len(stream.places):
            return
        with self._lock:
            self._workers -= 1
            self._losses += bool(cause)
        for thread, mine in self._by_thread(stream.places):
            places = stream.places[mine]
            give_back = partial(self._places.give_back, places)
            thread.inbox.put(Left(self._rows(places), give_back))

    def _answer(self, stream: Stream, index: np.ndarray, actions: np.ndarray) -> None:
        self._server.answer(stream, index, actions)

    def row(self) -> Row:
        """Metrics of workers and wire: counts of all hosts since they started, and percentiles of
        this host's latencies since the last call. All processes call it together."""
        traffic = self._server.traffic
        own = {
            "workers": self._workers,
            "free_places": self._places.free(),
            "joins": self._joins,
            "losses": self._losses,
            "restarts": self._restarts,
            "rejected": sum(traffic.rejected.values()),
            "dropped_unrolls": sum(handover.dropped for handover in self._handovers),
            "received_mb": traffic.received / 1e6,
            "sent_mb": traffic.sent / 1e6,
        }
        counts = mesh_lib.process_all_gather(np.array([*own.values()], float), self._setup.mesh)()
        row: Row = {
            f"remote/{name}": float(x) if name.endswith("_mb") else int(x)
            for name, x in zip(own, counts.sum(0), strict=True)
        }
        trips = np.array([self._trips.popleft() for _ in range(len(self._trips))]).reshape(-1, 2)
        if len(trips):
            total, stepping = trips.T
            for name, x in (("env", stepping), ("network", np.maximum(0, total - stepping))):
                median, slow = np.percentile(x, (50, 99))
                row[f"remote/{name}_ms_p50"] = 1000 * float(median)
                row[f"remote/{name}_ms_p99"] = 1000 * float(slow)
        return row

    def close(self, error: BaseException | None) -> None:
        """Ends all streams. Workers end if the run is over, and reconnect otherwise."""
        over = error is None or code_of(error) in FINAL - {ExitCode.INTERRUPTED}
        self._server.close(End("the run is over", "over") if over else None)
        self._local.close()


class LocalWorkers:
    """Workers on the learner's machine, as processes that end with it."""

    def __init__(self, config: Config, port: int, token: str, places: int):
        """Starts them; they share the host's places."""
        count = config.remote.local_workers
        command = [
            *(sys.executable, "-m", "podracer.worker", f"--connect=127.0.0.1:{port}"),
            *(f"--allow_env={config.env}", "--local", "--quiet"),
        ]
        environ = {**os.environ, **({access.TOKEN: token} if token else {})}
        start: Callable[..., Any] = subprocess.Popen
        self._processes: list[Any] = [
            start(
                [*command, f"--num_envs={places // count + (i < places % count)}"],
                env=environ,
                stdin=subprocess.PIPE,
            )
            for i in range(count)
        ]

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
