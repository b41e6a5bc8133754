"""The gRPC server that workers connect to: one bidirectional stream for each of them.

Streams are read in threads of their own. Whatever a worker sends that it should not ends its
stream, is counted by its kind, and reaches nobody else.
"""

import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from podracer.errors import ConfigError
from podracer.remote import access, wire
from podracer.remote.settings import RemoteConfig
from podracer.remote.wire import Header, Kind, Layout, WireError
from podracer.types import ArrayTree, HostStep

METHOD = "/podracer.Environments/Step"
# Bytes of a message besides its rows.
ROOM = 1 << 17
# Seconds within which a stream that has ended must have been told.
GRACE_S = 2.0
# Connections whose number is remembered, so that nobody can send their messages again.
MOST_STARTS = 1 << 16
# Dead connections are noticed within 20 seconds, whatever the network says about them.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# Connections that never become a stream end, too.
STALLED = [
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
]


class End(NamedTuple):
    """Why a stream ends, the body of an END message.

    Attributes:
      reason: a sentence for the worker's user.
      code: "over", the run is; "unwanted", the worker must not try again; "later", it may.
    """

    reason: str
    code: str


class RefusedError(Exception):
    """A worker can't be admitted; ``args[0]`` is the ``End``."""


class Stream:
    """The stream of a worker that is connected.

    Attributes:
      places: ``[n]``, the numbers of its environments' places on this host; empty until admitted.
      awaited: ``[n]`` bool, which of its environments have been given an action, or have just
        begun, so that a step of theirs may arrive.
      heard_at: when its last message arrived.
      left_at: when reading its messages has ended; infinite before.
      sent_at: ``[n]``, when the last action was sent; 0 before the first.
    """

    def __init__(self, now: float):
        self.places, self.awaited = np.zeros(0, np.int32), np.zeros(0, bool)
        self.heard_at, self.left_at, self.sent_at = now, math.inf, np.zeros(0)
        self.start, self._received, self._sent = 0, 0, 0
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def take_places(self, places: np.ndarray) -> None:
        """The worker's environments have these places from now on."""
        self.places, self.awaited = places, np.ones(len(places), bool)
        self.sent_at = np.zeros(len(places))

    @property
    def begun(self) -> bool:
        """Whether all of its environments have begun and been given an action."""
        return len(self.places) > 0 and bool(self.sent_at.all())

    def check(self, header: Header) -> None:
        """Raises ``WireError`` if a message is not the next one of this connection."""
        known = not self._received or header.start == self.start
        if not known or header.sequence != self._received % 2**32:
            raise WireError("a message out of its order, or of another connection")
        if (header.kind is Kind.HELLO) != (self._received == 0):
            raise WireError("a HELLO that does not come first")
        self.start, self._received = header.start, self._received + 1

    def send(self, make: Callable[[Header], bytes], kind: Kind) -> None:
        """Sends a message."""
        with self._lock:
            self._outbox.put(make(Header(kind, self.start, self._sent)))
            self._sent += 1

    def unread(self) -> int:
        """How many messages the worker has not taken yet."""
        return self._outbox.qsize()

    def close(self) -> None:
        """Ends the stream after what was sent before."""
        self._outbox.put(None)

    def messages(self) -> Iterator[bytes]:
        """What is sent to the worker, until the stream ends."""
        while (message := self._outbox.get()) is not None:
            yield message


class Handler(Protocol):
    """Who admits workers and answers them; called from the threads of all streams.

    Attributes:
      steps: the layout of what workers send.
      actions: the layout of what they receive.
    """

    steps: Layout
    actions: Layout

    def admit(self, stream: Stream, num_envs: int, restarts: int) -> dict[str, Any]:
        """Gives a worker places for its environments, as many as are free, and returns the body of
        its WELCOME; ``restarts`` is how often it has been admitted before.

        Raises:
          RefusedError: it can't be admitted.
        """
        ...

    def arrive(self, stream: Stream, index: np.ndarray, step: HostStep, microseconds: int) -> None:
        """Takes steps of some of a worker's environments; they are answered later."""
        ...

    def leave(self, stream: Stream, cause: str) -> None:
        """The worker has disconnected, for this reason; "" if the server has ended the stream."""
        ...


class Server:
    """A gRPC server, which listens from its making until it is closed.

    Attributes:
      port: the port it listens at.
      local_port: the port for local workers.
      traffic: what has crossed the wire.
    """

    def __init__(
        self, options: RemoteConfig, handler: Handler, token: str, warn: Callable[[str], None]
    ):
        """Starts to listen.

        Args:
          options: where, and to whom.
          handler: admits and answers workers.
          token: what workers must show; "" asks for nothing.
          warn: prints a warning; called from any thread.

        Raises:
          ConfigError: the address can't be listened at, or strangers could connect.
        """
        access.check_server(options, token)
        self._options, self._handler, self._token, self._warn = options, handler, token, warn
        self._streams: dict[Stream, Any] = {}
        self._starts: dict[int, None] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._end: End | None = None
        self.traffic = wire.Traffic()
        self._most_bytes = ROOM + options.batch * handler.steps.row_bytes
        self._grpc: Any = access.import_grpc()
        self._server, self.port, self.local_port = self._listen()
        threading.Thread(target=self._drop_silent, name="silent workers", daemon=True).start()

    def _listen(self) -> tuple[Any, int, int]:
        grpc, options = self._grpc, self._options
        call_handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD[1:].split("/")
        server = grpc.server(
            ThreadPoolExecutor(options.max_workers + 8, "streams"),
            handlers=[grpc.method_handlers_generic_handler(service, {method: call_handler})],
            options=[
                *KEEPALIVE,
                *STALLED,
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # gRPC itself ends a stream whose message is larger, and we can't count it.
                ("grpc.max_receive_message_length", 4 * self._most_bytes),
                ("grpc.max_send_message_length", -1),
                # Another process must not share the port.
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=options.max_workers,
        )
        address = options.listen or "127.0.0.1:0"
        credentials = access.server_credentials(options)
        try:
            if credentials:
                port = server.add_secure_port(address, credentials)
            else:
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"remote.listen={address} can't be listened at: {error}") from error
        local_port = port
        if options.listen and options.local_workers:
            # Local workers need no certificate, and nobody else reaches this port.
            local_port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, port, local_port

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """A worker's stream, in a thread of gRPC; a thread of ours reads what the worker sends."""
        if not access.has_token(context.invocation_metadata(), self._token):
            self._reject("a call without the token")
            context.abort(self._grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        stream = Stream(time.monotonic())
        with self._lock:
            self._streams[stream] = context

        def remove() -> None:
            with self._lock:
                self._streams.pop(stream, None)
            # A stream that the network has ended does not wait for anything to be sent.
            stream.close()

        if not context.add_callback(remove):
            remove()
        reading = threading.Thread(target=self._read, args=(stream, requests), daemon=True)
        reading.start()
        for message in stream.messages():
            self.traffic.add(sent=len(message))
            yield message

    def _read(self, stream: Stream, requests: Iterator[bytes]) -> None:
        cause = ""
        try:
            for message in requests:
                stream.heard_at = time.monotonic()
                self.traffic.add(received=len(message))
                self._handle(stream, message)
            cause = "it has disconnected"
        except RefusedError as refused:
            self._send_end(stream, refused.args[0])
        except WireError as error:
            cause = f"it sent {error}"
            self._reject(str(error))
            self._send_end(stream, End(f"this worker sent {error}", "unwanted"))
        except self._grpc.RpcError:
            cause = "it has disconnected"
        except Exception:
            # A fault of ours must not reach other workers.
            cause = "the server failed to read what it sent"
            if self.traffic.reject(cause):
                self._warn(f"a worker is dropped:\n{traceback.format_exc().rstrip()}")
        finally:
            stream.left_at = time.monotonic()
            self._handler.leave(stream, "" if self._closing.is_set() else cause)
            stream.close()

    def _handle(self, stream: Stream, message: bytes) -> None:
        if len(message) > self._most_bytes:
            raise WireError("a message that is too large")
        header, body = wire.decode(message)
        stream.check(header)
        if header.kind is Kind.HELLO:
            self._welcome(stream, wire.decode_json(body))
        elif header.kind is Kind.STEP:
            self._arrive(stream, header, body)
        elif header.kind is not Kind.ALIVE:
            raise WireError("a message that only servers send")

    def _welcome(self, stream: Stream, hello: dict[str, Any]) -> None:
        if self._end:
            raise RefusedError(self._end)
        self._check_start(stream.start)
        num_envs, restarts = _count(hello, "num_envs", 1), _count(hello, "restarts", 0)
        welcome = self._handler.admit(stream, num_envs, restarts)
        stream.send(lambda header: wire.encode_json(header, welcome), Kind.WELCOME)

    def _check_start(self, start: int) -> None:
        """Raises ``WireError`` if another connection has had this number."""
        with self._lock:
            if start in self._starts:
                raise WireError("a HELLO of another connection")
            self._starts[start] = None
            if len(self._starts) > MOST_STARTS:
                del self._starts[next(iter(self._starts))]

    def _arrive(self, stream: Stream, header: Header, body: memoryview) -> None:
        index, step = self._handler.steps.decode(header, body)
        if index.max() >= len(stream.places) or len(np.unique(index)) < len(index):
            raise WireError("steps of environments that it does not have")
        if not stream.awaited[index].all():
            raise WireError("steps of environments that were given no action")
        # Each step follows an action that was read, so others have at most one each.
        if stream.unread() > len(stream.places):
            raise WireError("steps without taking the actions of others")
        _check_step(step, stream.sent_at[index] == 0)
        stream.awaited[index] = False
        self._handler.arrive(stream, index, step, header.microseconds)

    def answer(self, stream: Stream, index: np.ndarray, actions: ArrayTree) -> None:
        """Sends actions to some of a worker's environments."""
        stream.awaited[index] = True
        stream.sent_at[index] = time.monotonic()
        stream.send(
            lambda header: self._handler.actions.encode(header, index, actions), Kind.ACTIONS
        )

    def _send_end(self, stream: Stream, end: End) -> None:
        stream.send(lambda header: wire.encode_json(header, end._asdict()), Kind.END)

    def _reject(self, kind: str) -> None:
        if self.traffic.reject(kind):
            self._warn(f"rejected {kind}; from now on this is only counted, as remote/rejected")

    def _drop_silent(self) -> None:
        options = self._options
        while not self._closing.wait(min(1.0, options.timeout_s / 4)):
            now = time.monotonic()
            with self._lock:
                streams = list(self._streams.items())
            for stream, context in streams:
                limit = options.timeout_s if stream.begun else options.start_timeout_s
                if stream.left_at < now - GRACE_S:
                    # It does not take what was sent at its end.
                    context.cancel()
                elif stream.left_at == math.inf and stream.heard_at < now - limit:
                    self._reject(f"a worker that said nothing for {limit:g} seconds")
                    stream.left_at = now
                    context.cancel()

    def close(self, end: End | None = None) -> None:
        """Ends all streams, after sending ``end`` to the workers if it is not None."""
        self._closing.set()
        self._end = end
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            if end:
                self._send_end(stream, end)
            stream.close()
        self._server.stop(GRACE_S if end else 0).wait(GRACE_S)


def _check_step(step: HostStep, begins: np.ndarray) -> None:
    """Checks what ``WireError``s of the layout can't know.

    Args:
      step: ``[n, ...]``.
      begins: ``[n]``, whether it is the first step of an environment.

    Raises:
      WireError: it would be joined to the steps of another worker, or has an impossible discount.
    """
    first, discount = step.timestep.first, step.timestep.discount
    if not (first & (discount == 1))[begins].all():
        raise WireError("a first step that begins no episode")
    if ((discount < 0) | (discount > 1)).any():
        raise WireError("a discount outside of [0, 1]")


def _count(hello: dict[str, Any], name: str, least: int) -> int:
    """A number in the body of a HELLO.

    Raises:
      WireError: it is missing, is no whole number, or is too small.
    """
    value = hello.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise WireError("a HELLO without its number of environments or of restarts")
    return value
