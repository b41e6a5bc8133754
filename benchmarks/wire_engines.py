"""What ``wire.py`` compares: the payload, and engines that carry it between two processes."""

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer.remote import server, wire, worker
from podracer.remote.server import Stream
from podracer.remote.settings import RemoteConfig
from podracer.remote.wire import Header, Kind, Layout
from podracer.types import HostStep, TimeStep

try:
    import grpc
    import zmq
except ImportError as error:
    raise SystemExit("this benchmark needs grpcio and pyzmq: pip install grpcio pyzmq") from error

HOST = "127.0.0.1"


class Payload(NamedTuple):
    """What is exchanged.

    Attributes:
      observations: ``[messages, rows, ...]``; clients send them in turn, again and again.
      outstanding: messages of a client that may be without an answer at a time.
    """

    observations: np.ndarray
    outstanding: int

    @property
    def rows(self) -> int:
        """Environment steps of a message."""
        return self.observations.shape[1]

    @property
    def steps(self) -> Layout:
        """The layout of what clients send."""
        return Layout(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.host_steps()[0])
        )

    @property
    def actions(self) -> Layout:
        """The layout of what they receive."""
        return Layout(jax.ShapeDtypeStruct((), np.int32))

    def host_steps(self) -> list[HostStep]:
        """The steps of each message."""
        zero, one = np.zeros(self.rows, np.float32), np.ones(self.rows, np.float32)
        first, over = np.ones(self.rows, bool), np.zeros(self.rows, bool)
        return [HostStep(TimeStep(x, zero, one, first), zero, over) for x in self.observations]

    def messages(self) -> list[bytes]:
        """The same as bytes."""
        header, index, steps = Header(Kind.STEP, 0, 0), np.arange(self.rows), self.steps
        return [steps.encode(header, index, x) for x in self.host_steps()]

    def reply(self) -> bytes:
        """An answer as bytes."""
        header, index = Header(Kind.ACTIONS, 0, 0), np.arange(self.rows)
        return self.actions.encode(header, index, np.zeros(self.rows, np.int32))


class Client(NamedTuple):
    """A connection to a server, whose answers come in the order of the messages.

    Attributes:
      send: sends a message.
      receive: waits for an answer.
    """

    send: Callable[[], Any]
    receive: Callable[[], Any]


class Engine(NamedTuple):
    """A way of exchanging messages.

    Attributes:
      serve: ``(payload) -> port``, answers a client in threads, until the process ends.
      connect: ``(port, payload) -> Client``.
    """

    serve: Callable[[Payload], int]
    connect: Callable[[int, Payload], Client]


def start_thread(function: Callable[[], Any]) -> None:
    """Runs a function in a thread that ends with the process."""
    threading.Thread(target=function, daemon=True).start()


def receive_into(connection: socket.socket, buffer: memoryview) -> bool:
    """Fills a buffer; False if the connection has ended."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def serve_tcp(payload: Payload) -> int:
    """Raw sockets. Both sides know the size of a message, and keep one piece of memory for it, so
    that this is a lower bound."""
    listener, reply = socket.create_server((HOST, 0)), payload.reply()
    buffer = memoryview(bytearray(len(payload.messages()[0])))

    def run() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive_into(connection, buffer):
            connection.sendall(reply)

    start_thread(run)
    return listener.getsockname()[1]


def connect_tcp(port: int, payload: Payload) -> Client:
    """See ``serve_tcp``."""
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    messages = itertools.cycle(payload.messages())
    buffer = memoryview(bytearray(len(payload.reply())))
    return Client(
        lambda: connection.sendall(next(messages)), lambda: receive_into(connection, buffer)
    )


def serve_zmq(payload: Payload) -> int:
    """A ROUTER socket, which could answer many clients."""
    router, reply = zmq.Context.instance().socket(zmq.ROUTER), payload.reply()
    port = router.bind_to_random_port(f"tcp://{HOST}")

    def run() -> None:
        while True:
            sender, _ = router.recv_multipart(copy=False)
            router.send_multipart([sender, reply])

    start_thread(run)
    return port


def connect_zmq(port: int, payload: Payload) -> Client:
    """A DEALER socket."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(f"tcp://{HOST}:{port}")
    messages = itertools.cycle(payload.messages())
    return Client(lambda: dealer.send(next(messages), copy=False), dealer.recv)


def serve_grpc(payload: Payload) -> int:
    """A stream of gRPC and nothing else."""
    reply = payload.reply()

    def answer(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        return (reply for _ in requests)

    service, method = server.METHOD[1:].split("/")
    handler = grpc.stream_stream_rpc_method_handler(answer)
    listener = grpc.server(
        ThreadPoolExecutor(1),
        handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
        options=[*server.KEEPALIVE, ("grpc.max_receive_message_length", -1)],
    )
    port = listener.add_insecure_port(f"{HOST}:0")
    listener.start()
    # The server ends when nothing refers to it.
    start_thread(lambda: listener.wait_for_termination())
    return port


def connect_grpc(port: int, payload: Payload) -> Client:
    """See ``serve_grpc``; the channel is that of a worker."""
    outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    responses = open_stream(port)(iter(outbox.get, None))
    messages = itertools.cycle(payload.messages())
    return Client(lambda: outbox.put(next(messages)), lambda: next(responses))


def open_stream(port: int, *, compression: bool = False) -> Callable[..., Iterator[bytes]]:
    """A worker's stream to a server."""
    options = worker.WorkerOptions([f"{HOST}:{port}"], 1, compression=compression)
    return worker.open_channel(grpc, options.connect[0], options).stream_stream(server.METHOD)


class Counts(NamedTuple):
    """What a handler has answered so far.

    Attributes:
      messages, steps: their numbers.
      trips: seconds from an answer to the step that follows it.
    """

    messages: int
    steps: int
    trips: list[float]


class TrivialHandler:
    """A handler (``server.Handler``) that answers every message at once.

    Attributes:
      port: the port of its server.
    """

    def __init__(self, steps: Layout, actions: Layout, places: int, welcome: Mapping[str, Any]):
        """Listens.

        Args:
          steps, actions: the layouts of messages.
          places: number of environments that may come at most.
          welcome: the rest of the WELCOME message, besides the seeds of the environments.
        """
        self.steps, self.actions, self._welcome = steps, actions, welcome
        # All bytes of an action are 0.
        zeros = memoryview(bytes(places * actions.row_bytes))
        _, self._action = actions.decode(Header(Kind.ACTIONS, 0, 0, places), zeros)
        self._lock, self._counts, self._joined = threading.Lock(), Counts(0, 0, []), 0
        batch = welcome.get("batch", places)
        options = RemoteConfig(places, f"{HOST}:0", batch=batch)
        self._server = server.Server(options, self, "", print)
        self.port = self._server.port

    def admit(self, stream: Stream, num_envs: int, restarts: int) -> dict[str, Any]:
        """See ``server.Handler``."""
        with self._lock:
            places = self._joined + np.arange(num_envs)
            self._joined += num_envs
        stream.take_places(places)
        return {**self._welcome, "seeds": places.tolist()}

    def arrive(self, stream: Stream, index: np.ndarray, step: HostStep, microseconds: int) -> None:
        """See ``server.Handler``."""
        trip = time.monotonic() - float(stream.sent_at[index].max())
        with self._lock:
            messages, steps, trips = self._counts
            trips.append(trip)
            self._counts = Counts(messages + 1, steps + len(index), trips)
        self._server.answer(stream, index, jax.tree.map(lambda x: x[: len(index)], self._action))

    def leave(self, stream: Stream, cause: str) -> None:
        """See ``server.Handler``."""

    def close(self) -> None:
        """Listens no more."""
        self._server.close()

    @property
    def answered(self) -> int:
        """Steps that were answered since the last ``take``."""
        return self._counts.steps

    def take(self) -> Counts:
        """What was answered since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counts(0, 0, [])
        return counts


def serve_podracer(payload: Payload) -> int:
    """podracer's server, with its checks."""
    places = payload.rows * payload.outstanding
    return TrivialHandler(payload.steps, payload.actions, places, {}).port


def connect_podracer(port: int, payload: Payload, *, compression: bool = False) -> Client:
    """Encodes and decodes as a worker does, each message for other environments than those that are
    without an answer."""
    outbox: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    index = np.arange(payload.rows * payload.outstanding).reshape(payload.outstanding, -1)
    turns, steps, actions = itertools.cycle(index), payload.steps, payload.actions

    def requests() -> Iterator[bytes]:
        yield wire.encode_json(Header(Kind.HELLO, 1, 0), {"num_envs": index.size, "restarts": 0})
        for sequence, step in enumerate(itertools.cycle(payload.host_steps()), 1):
            yield steps.encode(Header(Kind.STEP, 1, sequence), outbox.get(), step)

    responses = open_stream(port, compression=compression)(requests())
    # The WELCOME.
    next(responses)
    return Client(
        lambda: outbox.put(next(turns)), lambda: actions.decode(*wire.decode(next(responses)))
    )


ENGINES = {
    "tcp": Engine(serve_tcp, connect_tcp),
    "pyzmq": Engine(serve_zmq, connect_zmq),
    "grpc": Engine(serve_grpc, connect_grpc),
    "podracer": Engine(serve_podracer, connect_podracer),
}
COMPRESSED = {
    "podracer": ENGINES["podracer"],
    "podracer, gzip": Engine(serve_podracer, partial(connect_podracer, compression=True)),
}
