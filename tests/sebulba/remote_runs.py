"""Runs with remote environments for tests: workers, strangers, and what trajectories must hold."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import jax
import numpy as np

from podracer.remote import server, wire, worker
from podracer.remote.wire import Header, Kind
from podracer.remote.worker import Connection, WorkerOptions
from podracer.sebulba.pipeline import ActorOutput, ParameterServer, PauseTimer, TrajectoryQueue
from podracer.sebulba.remote import RemoteActors
from podracer.types import Trajectory
from tests.sebulba import runs
from tests.sebulba.runs import SOLO, sebulba_config

REMOTE = {
    **SOLO,
    "agent": "vtrace",
    "num_envs": 8,
    "unroll_length": 12,
    "network__core": "gru",
    "remote__num_envs": 8,
    "remote__listen": "127.0.0.1:0",
    "remote__batch": 8,
}


def quiet(_: str) -> None:
    pass


class Remote:
    """Actor threads of remote environments that act with the initial weights.

    Attributes:
      actors: the actor threads and their server.
      warnings: what the run has warned of.
    """

    def __init__(self, supervisor: Any, config: Any, warnings: list[str], env: Any = None):
        run = runs.make_setup(config, env)
        compiled = runs.compile_programs(run)
        parameters, self._queue = ParameterServer(supervisor, 1), TrajectoryQueue(supervisor)
        weights = jax.device_get(compiled.state.train.weights)
        parameters.publish(0, {d: jax.device_put(weights, d) for d in run.split.actors})
        self.actors = RemoteActors(
            run, compiled.actor_functions, parameters, self._queue, PauseTimer(), supervisor, 0
        )
        supervisor.at_end(self.actors.close)
        self.warnings, self.learners = warnings, len(run.split.learners)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.actors.port}"

    def work(self, num_envs: int, **options: Any) -> threading.Thread:
        """Starts a worker, which works until the run is over."""
        offer = WorkerOptions([self.address], num_envs, **options)
        thread = threading.Thread(target=worker.work, args=(offer, quiet), daemon=True)
        thread.start()
        return thread

    def outputs(self, count: int) -> list[ActorOutput]:
        """The next trajectories."""
        return [self._queue.get() for _ in range(count)]


@contextlib.contextmanager
def remote(named: Any = None, **changes: Any) -> Iterator[Remote]:
    """Remote environments of a config with these changes; ``named`` stands in for the one that the
    config names."""
    warnings: list[str] = []
    with runs.make_supervisor(warn=warnings.append) as supervisor:
        yield Remote(supervisor, sebulba_config(**{**REMOTE, **changes}), warnings, named)


class Lost:
    """A worker whose connection ends without a word."""

    def __init__(self, address: str, num_envs: int):
        self.channel = grpc.insecure_channel(address)
        offer = WorkerOptions([address], num_envs)
        self._connection = Connection(offer, self.channel.stream_stream(server.METHOD), quiet)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            self._connection.run()

    def joins(self) -> int:
        """How often it has been admitted."""
        return int(self._connection.welcomed)

    def kill(self) -> None:
        self.channel.close()
        self._thread.join()


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def check_sequences(trajectories: list[Trajectory]) -> int:
    """Checks that unrolls of an environment follow each other, or begin new episodes, and that
    episodes within an unroll are complete; returns how many begin out of turn."""
    last: dict[int, np.ndarray] = {}
    cuts = 0
    for trajectory in trajectories:
        step = trajectory.timestep
        count, first = step.observation[..., 0], step.first
        np.testing.assert_array_equal(count[1:], (count[:-1] + 1) * ~first[1:])
        over = count[:-1] == step.observation[:-1, :, 1]
        np.testing.assert_array_equal(first[1:], over)
        for column, env in enumerate(trajectory.env_id.tolist()):
            now = step.observation[0, column]
            if env in last and not np.array_equal(now, last[env]):
                assert first[0, column], "an unroll that continues another one"
                cuts += 1
            last[env] = step.observation[-1, column]
    return cuts


class Stranger:
    """A stream that sends whatever a test wants.

    Attributes:
      responses: what the server sends.
      number: see ``__init__``.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, address: str, metadata: Any = (), channel: Any = None, number: int | None = None
    ):
        """Opens the stream.

        Args:
          address: of the server.
          metadata: of the call.
          channel: a channel that others use, too; by default one of its own.
          number: replaces the upper bits of ``start`` in messages, by default by others in each
            stream, because the server remembers the numbers of all connections.
        """
        self._own = None if channel else grpc.insecure_channel(address)
        call: Any = (channel or self._own).stream_stream(server.METHOD)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.number = next(self._numbers) if number is None else number
        # A server that never answers is an error of the test.
        self.responses = call(iter(self._messages.get, None), metadata=metadata, timeout=60)

    def send(self, message: bytes) -> None:
        # ``start`` is in bytes 8 to 15 of the header.
        if message.startswith(wire.MAGIC):
            message = message[:10] + self.number.to_bytes(6, "little") + message[16:]
        self._messages.put(message)

    def end(self) -> None:
        """Sends nothing more."""
        self._messages.put(None)

    def close(self) -> None:
        self.end()
        self.responses.cancel()
        if self._own:
            self._own.close()


def hello(num_envs: object = 2, start: int = 5, restarts: object = 0) -> bytes:
    body = {"num_envs": num_envs, "restarts": restarts}
    return wire.encode_json(Header(Kind.HELLO, start, 0), body)


def steps(sequence: int, start: int = 5, index: Any = (0, 1), **changes: Any) -> bytes:
    env = runs.envs.make_host_environment("dummy:counting", {}, {})
    step = env.make_pool([0] * len(index), 1).reset()
    timestep = step.timestep.replace(**changes)
    header = Header(Kind.STEP, start, sequence)
    return wire.step_layout(env).encode(header, np.array(index), step._replace(timestep=timestep))


BAD = {
    "no message": ([b"GET / HTTP/1.1" * 3], "no message"),
    "no HELLO": ([steps(0)], "does not come first"),
    "two HELLOs": ([hello(), wire.encode_json(Header(Kind.HELLO, 5, 1), {})], "not come first"),
    "no number": ([hello("many")], "without its number"),
    "negative": ([hello(-1)], "without its number"),
    "negative restarts": ([hello(restarts=-1)], "without its number"),
    "another start": ([hello(), steps(1, start=6)], "another connection"),
    "out of order": ([hello(), steps(2)], "out of its order"),
    "not its own": ([hello(), steps(1, index=(0, 2))], "does not have"),
    "twice in one": ([hello(), steps(1, index=(1, 1))], "does not have"),
    "no action": ([hello(), steps(1), steps(2), steps(3)], "given no action|out of its order"),
    "NaN": ([hello(), steps(1, reward=np.full(2, np.nan, np.float32))], "NaN"),
    "no episode": ([hello(), steps(1, first=np.zeros(2, bool))], "begins no episode"),
    "discount": ([hello(), steps(1, discount=np.full(2, 2, np.float32))], "begins no episode"),
    "truncated": ([hello(), steps(1)[:-3]], "wrong size"),
    "a server's": ([hello(), Header(Kind.WELCOME, 5, 1).encode()], "only servers send"),
}
