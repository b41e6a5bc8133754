"""A worker: steps environments for a learner on another machine, and holds no weights.

Its environments are in pools, each of which a thread steps on its own, so that a slow environment
delays only those of its pool. What pools have returned is sent together. When the connection ends,
or a pool fails, the worker connects again, and its environments begin new episodes.
"""

import math
import os
import queue
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer import envs as envs_lib
from podracer.envs.permission import needs_permission
from podracer.errors import ConfigError, ExitCode, PreemptedError, TransientError
from podracer.remote import access, server, wire
from podracer.remote.pools import Ended, PoolThread, Stepped
from podracer.remote.wire import Header, Kind, Layout, WireError
from podracer.types import HostEnvironment, HostStep, Pool

# Seconds between two attempts to connect: at first, and at most.
FIRST_WAIT_S, MOST_WAIT_S = 0.2, 2.0
# Seconds in which environments must have been closed.
CLOSE_S = 30.0
# Failures of pools within an hour after which the worker ends.
MOST_FAILURES, WINDOW_S = 10, 3600.0


class WorkerOptions(NamedTuple):
    """How a worker connects and what it offers.

    Attributes:
      connect: HOST:PORT of servers, of which one is drawn at each attempt.
      num_envs: number of environments.
      num_pools: number of pools that they are divided into.
      num_threads: number of threads that step environments, in suites that have threads.
      allow_env: the environment that may import a module or use files that its arguments name.
      token_file: file with the token that the server asks for; "" takes it from PODRACER_TOKEN.
      tls_ca: file with the certificate of the authority that the server's comes from; "" connects
        without TLS.
      tls_cert, tls_key: files with the worker's own certificate and key.
      insecure: whether a token may be sent to other machines without TLS.
      compression: whether messages to the server are compressed, by gzip.
    """

    connect: Sequence[str]
    num_envs: int
    num_pools: int = 1
    num_threads: int = 1
    allow_env: str | None = None
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    compression: bool = False


class Connection:
    """One stream to a server, from HELLO to its end."""

    def __init__(
        self,
        options: WorkerOptions,
        call: Callable[..., Any],
        log: Callable[[str], None],
        token: str = "",
        restarts: int = 0,
    ):
        """Connects when it is ``run``.

        Args:
          options: what the worker offers.
          call: gRPC's stub of the stream.
          log: prints a line.
          token: what the server asks for.
          restarts: how often this worker has been admitted before.
        """
        self._options, self._call, self._log, self._token = options, call, log, token
        self._start, self._sequence, self._restarts = secrets.randbits(64), 0, restarts
        self._outbox: queue.SimpleQueue[Stepped | Ended | None] = queue.SimpleQueue()
        self._pools: list[PoolThread] = []
        self._steps: Layout | None = None
        self._batch, self._alive_s, self._step_timeout_s = 1, 5.0, math.inf
        self.welcomed, self.failure = False, ""

    def run(self) -> server.End | None:
        """Steps environments until the stream ends.

        Returns:
          What the server said at its end; None if it said nothing.

        Raises:
          ConfigError: the environment can't be made here, or is another one than the server's.
          TransientError: environments hang.
          grpc.RpcError: the network or the server has failed.
        """
        metadata = access.token_metadata(self._token)
        responses = self._call(self._requests(), metadata=metadata)
        end = None
        try:
            for message in responses:
                header, body = wire.decode(message)
                if header.kind is Kind.END:
                    end = server.End(**wire.decode_json(body))
                    break
                if header.kind is Kind.WELCOME:
                    self._begin(wire.decode_json(body))
                else:
                    self._act(header, body)
        except WireError as error:
            raise ConfigError(f"the server sent {error}") from None
        finally:
            responses.cancel()
            self._outbox.put(None)
            for pool in self._pools:
                pool.close()
            deadline = time.monotonic() + CLOSE_S
            closed = [pool.join(max(0.0, deadline - time.monotonic())) for pool in self._pools]
        if not all(closed):
            # The hanging threads can't be ended, and their environments would pile up.
            raise TransientError(f"environments could not be closed within {CLOSE_S:g} seconds")
        return end

    def _header(self, kind: Kind, microseconds: int = 0) -> Header:
        self._sequence += 1
        return Header(kind, self._start, self._sequence - 1, microseconds=microseconds)

    def _requests(self) -> Iterator[bytes]:
        """What is sent, in a thread of gRPC."""
        hello = {"num_envs": self._options.num_envs, "restarts": self._restarts}
        yield wire.encode_json(self._header(Kind.HELLO), hello)
        held: Stepped | None = None
        while True:
            items, held = self._collect(held)
            if items is None:
                return
            yield self._message(items)

    def _collect(self, held: Stepped | None) -> tuple[list[Stepped] | None, Stepped | None]:
        """What pools have returned by now, at least one; none if they are still at work, and None
        at the end."""
        items = [held] if held else []
        while True:
            try:
                item = self._outbox.get(timeout=0 if items else self._alive_s)
            except queue.Empty:
                if any(pool.hangs(self._step_timeout_s) for pool in self._pools):
                    self.failure = f"a step has taken more than {self._step_timeout_s:g} seconds"
                    return None, None
                return items, None
            if isinstance(item, Ended) and not item.failure:
                continue
            if not isinstance(item, Stepped):
                self.failure = item.failure if item else ""
                return None, None
            if sum(len(x.envs) for x in items) + len(item.envs) > self._batch:
                return items, item
            items.append(item)

    def _message(self, items: list[Stepped]) -> bytes:
        if not items:
            return self._header(Kind.ALIVE).encode()
        assert self._steps is not None
        slowest = max(x.seconds for x in items)
        index = np.concatenate([x.envs for x in items])
        step = items[0].step
        if len(items) > 1:
            step = jax.tree.map(lambda *x: np.concatenate(x), *(x.step for x in items))
        return self._steps.encode(self._header(Kind.STEP, round(slowest * 1e6)), index, step)

    def _begin(self, welcome: dict[str, Any]) -> None:
        """Makes the environments that the server asks for."""
        env = make_environment(welcome, self._options.allow_env)
        self._steps, self._actions = wire.step_layout(env), wire.action_layout(env)
        for what, layout in (("steps", self._steps), ("actions", self._actions)):
            if layout.describe() != welcome[what]:
                raise ConfigError(
                    f"{welcome['env']} differs from the server's: its {what} are "
                    f"{layout.describe()} here and {welcome[what]} there; install the same versions"
                )
        seeds = np.array(welcome["seeds"])
        self._batch, self._alive_s = welcome["batch"], welcome["timeout_s"] / 4
        self._step_timeout_s = welcome["step_timeout_s"]
        steps = self._steps
        pools = max(min(self._options.num_pools, len(seeds)), -(-len(seeds) // self._batch))
        threads = max(1, self._options.num_threads // pools)
        self._pool_of = np.arange(len(seeds)) * pools // len(seeds)
        for number in range(pools):
            index = np.flatnonzero(self._pool_of == number).astype(np.int32)

            def make(index: np.ndarray = index) -> Pool:
                return env.make_pool(seeds[index].tolist(), threads)

            def check(step: HostStep, count: int = len(index)) -> None:
                steps.check(step, count)

            self._pools.append(PoolThread(index, make, check, self._outbox))
        self.welcomed = True
        self._log(f"steps {len(seeds)} environments {welcome['env']} in {pools} pools")

    def _act(self, header: Header, body: memoryview) -> None:
        if header.kind is not Kind.ACTIONS or not self._pools:
            raise WireError("a message that servers do not send now")
        index, actions = self._actions.decode(header, body)
        for number in np.unique(self._pool_of[index]):
            pool, mine = self._pools[number], self._pool_of[index] == number
            pool.act(index[mine] - pool.envs[0], np.asarray(actions)[mine])


def make_environment(welcome: dict[str, Any], allow_env: str | None) -> HostEnvironment:
    """The environment that a server names.

    Raises:
      ConfigError: it is not installed, or may run code that this worker's user has not permitted.
    """
    env_id, kwargs = welcome["env"], welcome["env_kwargs"]
    reason = needs_permission(env_id, kwargs)
    if reason is not None and env_id != allow_env:
        raise ConfigError(
            f"the server's environment {env_id!r} {reason}; if you trust the server, add "
            f"--allow_env={env_id}"
        )
    return envs_lib.make_host_environment(
        env_id,
        kwargs,
        welcome["env_params"],
        observed=welcome["observed"],
        newest_frame=welcome["newest_frame"],
    )


def work(options: WorkerOptions, log: Callable[[str], None]) -> None:
    """Works until a server says that the run is over.

    Args:
      options: how to connect.
      log: prints a line.

    Raises:
      ConfigError: the worker is not wanted, or can't make the environment.
      TransientError: pools failed too often.
    """
    for address in options.connect:
        access.check_address("--connect", address)
    for name in ("num_envs", "num_pools"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name} must be positive, got {getattr(options, name)}")
    grpc, token = access.import_grpc(), access.read_token(options.token_file)
    access.check_token_hidden(options.connect, token, options.tls_ca, insecure=options.insecure)
    failures: list[float] = []
    wait, said, restarts = FIRST_WAIT_S, "", 0
    while True:
        address = random.choice(options.connect)
        with open_channel(grpc, address, options) as channel:
            call = channel.stream_stream(server.METHOD)
            connection = Connection(options, call, log, token, restarts)
            reason = _reason(grpc, connection)
        restarts += connection.welcomed
        if reason is None:
            log("the run is over")
            return
        if connection.failure:
            failures = _add_failure(failures)
            log(f"its environments have failed, and begin again:\n{connection.failure}")
        wait = FIRST_WAIT_S if connection.welcomed else min(2 * wait, MOST_WAIT_S)
        if reason != said:
            log(f"{address}: {reason}; tries again until it succeeds")
        said = reason
        time.sleep(wait * random.uniform(0.5, 1))


def _add_failure(failures: list[float]) -> list[float]:
    """The times of failures within the last hour, with one more.

    Raises:
      TransientError: there were too many.
    """
    now = time.monotonic()
    failures = [*(x for x in failures if x > now - WINDOW_S), now]
    if len(failures) > MOST_FAILURES:
        raise TransientError(f"environments failed more than {MOST_FAILURES} times within an hour")
    return failures


def open_channel(grpc: Any, address: str, options: WorkerOptions) -> Any:
    """gRPC's channel to a server."""
    settings = {
        "options": [
            *server.KEEPALIVE,
            # A proxy for the web must not stand between workers and learner.
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ],
        "compression": grpc.Compression.Gzip if options.compression else None,
    }
    credentials = access.channel_credentials(options.tls_ca, options.tls_cert, options.tls_key)
    if credentials is None:
        return grpc.insecure_channel(address, **settings)
    return grpc.secure_channel(address, credentials, **settings)


def _reason(grpc: Any, connection: Connection) -> str | None:
    """Works through a connection; returns why the worker must connect again, None if the run is
    over.

    Raises:
      ConfigError: the worker is not wanted, or can't make the environment.
    """
    try:
        end = connection.run()
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(f"the server does not admit this worker: {error.details()}") from None
        return f"{error.code().name.lower()}, {error.details()}"
    if end is None:
        return "the connection has ended"
    if end.code == "unwanted":
        raise ConfigError(f"the server does not admit this worker: {end.reason}")
    return None if end.code == "over" else end.reason


def end_with_stdin() -> None:
    """Ends this process once its standard input is closed, as it is when its parent ends."""

    def wait() -> None:
        # Not through its buffer, whose lock would abort the process if it ends meanwhile.
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(ExitCode.OK)

    threading.Thread(target=wait, daemon=True).start()


def end_on_sigterm() -> None:
    """Closes the environments at SIGTERM, also as the first process of a container, which would
    ignore it."""

    def stop(*_: object) -> None:
        raise PreemptedError("stopped by SIGTERM")

    signal.signal(signal.SIGTERM, stop)


def print_line(text: str) -> None:
    """Prints a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
