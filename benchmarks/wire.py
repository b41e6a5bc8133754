"""Measures what the wire between a learner and its remote workers costs, on one machine.

    pip install -e '.[remote,sebulba]' pyzmq
    python benchmarks/wire.py
    python benchmarks/wire.py --compression
    python benchmarks/wire.py --workers=4 --envs=1200

(pyzmq comes with ipykernel, which the extra "test" installs.)

Without arguments, two processes exchange steps and actions over the loopback interface: by raw TCP
sockets, by pyzmq (DEALER and ROUTER), by gRPC, and by podracer's own server, which adds messages,
checks and threads to gRPC. The first three only carry the bytes that podracer encodes. Engines
alternate in rounds. Prints a JSON line for each payload, with medians over rounds, and one with
what a core of the server can serve, according to a least-squares fit to these numbers. CPU time is
user and system time of both processes.

``--compression`` compresses messages of real Atari frames, and says below which bandwidth that is
faster than sending them as they are. ``--workers`` starts real workers, and measures the server
that answers them at once.
"""

import argparse
import itertools
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import common
import jax
import numpy as np
import scipy.optimize
import zmq
from wire_engines import COMPRESSED, ENGINES, HOST, Client, Counts, Engine, Payload, TrivialHandler

from podracer import envs as envs_lib
from podracer.remote import wire

# Rows, shape and type of the observations of a message.
PAYLOADS = {
    "16 stacks of 4 Atari frames": (16, (4, 84, 84), "uint8"),
    "16 Atari frames": (16, (84, 84), "uint8"),
    "64 Atari frames": (64, (84, 84), "uint8"),
    "64 vectors": (64, (27,), "float32"),
    "1 Football observation": (1, (4, 72, 96), "uint8"),
}
# Seconds within which workers must have made their environments.
START_S = 120
# Steps of a game before its frames are used.
STEPS_BEFORE = 100
# Bytes of an Atari frame, and numbers of them in a message, of which the model speaks.
FRAME, MODEL_ROWS = 84 * 84, (1, 4, 16, 64)


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Exchanged(NamedTuple):
    """What a client has measured.

    Attributes:
      trips: ``[messages]``, seconds from a message to its answer.
      seconds: how long it took.
      cpu: CPU seconds of this process.
    """

    trips: np.ndarray
    seconds: float
    cpu: float


def exchange(client: Client, seconds: float, outstanding: int) -> Exchanged:
    """Exchanges messages for some time."""
    trips, sent = [], deque()
    begin, used = time.perf_counter(), cpu_seconds()
    while True:
        now = time.perf_counter()
        if now < begin + seconds:
            while len(sent) < outstanding:
                sent.append(time.perf_counter())
                client.send()
        if not sent:
            return Exchanged(np.array(trips), now - begin, cpu_seconds() - used)
        client.receive()
        trips.append(time.perf_counter() - sent.popleft())


def run_server(pipe: Any, payload: Payload, engines: Mapping[str, Engine]) -> None:
    """The process of the servers: says their ports, and whenever asked its CPU seconds."""
    pipe.send({name: engine.serve(payload) for name, engine in engines.items()})
    while True:
        pipe.recv()
        pipe.send(cpu_seconds())


def run_client(
    pipe: Any, payload: Payload, engines: Mapping[str, Engine], ports: Mapping[str, int]
) -> None:
    """The process of the clients: exchanges messages whenever asked, and says what it measured."""
    clients = {name: engine.connect(ports[name], payload) for name, engine in engines.items()}
    while True:
        name, seconds = pipe.recv()
        pipe.send(exchange(clients[name], seconds, payload.outstanding))


@contextmanager
def processes() -> Iterator[Callable[..., Any]]:
    """``(function, *arguments) -> pipe`` starts a process, which is killed at the end: its threads
    wait for messages that do not come any more."""
    context, started = multiprocessing.get_context("spawn"), []

    def start(function: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=function, args=(theirs, *arguments), daemon=True))
        started[-1].start()
        # Only the process holds its end, so that reading from one that has failed fails as well.
        theirs.close()
        return ours

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.join()


def measure(
    payload: Payload, engines: Mapping[str, Engine], seconds: float, rounds: int
) -> dict[str, dict[str, float]]:
    """What each engine does, by engine: medians over rounds."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    with processes() as start:
        servers = start(run_server, payload, engines)
        clients = start(run_client, payload, engines, servers.recv())

        def server_cpu() -> float:
            servers.send(None)
            return servers.recv()

        for number, name in itertools.product(range(rounds + 1), engines):
            used = server_cpu()
            clients.send((name, seconds if number else min(seconds, 0.3)))
            client = clients.recv()
            # The first round warms up.
            if number:
                results[name].append(summary(payload, client, server_cpu() - used))
    return {
        name: {key: statistics.median(x[key] for x in found) for key in found[0]}
        for name, found in results.items()
    }


def summary(payload: Payload, client: Exchanged, server_cpu: float) -> dict[str, float]:
    """The metrics of one round."""
    messages = len(client.trips)
    size = len(payload.messages()[0]) + len(payload.reply())
    p50, p99 = np.percentile(client.trips, (50, 99))
    return {
        "messages_per_second": messages / client.seconds,
        "steps_per_second": messages * payload.rows / client.seconds,
        "gigabytes_per_second": 1e-9 * messages * size / client.seconds,
        "cpu_us_per_step": 1e6 * (client.cpu + server_cpu) / messages / payload.rows,
        "cpu_us_per_message": 1e6 * (client.cpu + server_cpu) / messages,
        "server_us_per_message": 1e6 * server_cpu / messages,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
    }


def model(measured: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What one core of the server can serve.

    Args:
      measured: bytes of a message, and the CPU microseconds it cost the server; at least two.

    Returns:
      Microseconds of a message and of a megabyte, and for several numbers of Atari frames in a
      message the frames and gigabytes per second.
    """
    size, cost = np.array(measured, float).T
    # Errors relative to the cost, so that small messages count as much as large ones.
    terms = np.stack([np.ones_like(size), size / 1e6], 1) / cost[:, None]
    (message, megabyte), _ = scipy.optimize.nnls(terms, np.ones_like(cost))
    frames = {rows: 1e6 * rows / (message + megabyte * rows * FRAME / 1e6) for rows in MODEL_ROWS}
    return {
        "us_per_message": message,
        "us_per_megabyte": megabyte,
        "frames_per_second": frames,
        "gigabytes_per_second": {rows: 1e-9 * FRAME * x for rows, x in frames.items()},
    }


def make_payload(rows: int, shape: tuple[int, ...], dtype: str, outstanding: int) -> Payload:
    """A payload of numbers that nothing depends on."""
    return Payload(np.ones((1, rows, *shape), dtype), outstanding)


def compare_engines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each payload, and the model."""
    payloads = PAYLOADS
    if args.shape is not None:
        payloads = {"given": (16, args.shape, args.dtype)}
    costs = []
    for name, (rows, shape, dtype) in payloads.items():
        payload = make_payload(args.rows or rows, shape, dtype, args.outstanding)
        engines = measure(payload, ENGINES, args.seconds, args.rounds)
        size = len(payload.messages()[0])
        costs.append((size, engines["podracer"]["server_us_per_message"]))
        yield {
            "payload": name,
            "rows": payload.rows,
            "message_bytes": size,
            "outstanding": args.outstanding,
            "engines": engines,
        }
    if len(costs) > 1:
        yield {"one_core_of_the_server": model(costs)}


def record_frames(env_id: str, messages: int, rows: int) -> np.ndarray:
    """``[messages, rows, 84, 84]``, the newest frames of Atari games with random actions."""
    # Here, because the processes that exchange messages need no environments.
    from sebulba import random_actions

    env = envs_lib.make_host_environment(env_id, {}, {}, newest_frame=True)
    pool, rng = env.make_pool(list(range(rows)), 1), np.random.default_rng(0)
    pool.reset()

    def step() -> Any:
        return pool.step(random_actions(env.spec, rows, rng))

    # Games begin alike, and differ after some steps.
    for _ in range(STEPS_BEFORE):
        step()
    frames = [step().timestep.observation["frame"] for _ in range(messages)]
    pool.close()
    return np.stack(frames)


def compress(payload: Payload, level: int) -> dict[str, float]:
    """What zlib does with a payload's messages, in the gzip format that gRPC uses too."""
    messages, used = payload.messages(), cpu_seconds()
    packed = []
    for message in messages:
        packer = zlib.compressobj(level, wbits=31)
        packed.append(packer.compress(message) + packer.flush())
    packing, used = cpu_seconds() - used, cpu_seconds()
    for message in packed:
        zlib.decompress(message, wbits=31)
    unpacking = cpu_seconds() - used
    before, after = (sum(map(len, x)) for x in (messages, packed))
    steps = len(messages) * payload.rows
    return {
        "ratio": before / after,
        "compress_us_per_step": 1e6 * packing / steps,
        "decompress_us_per_step": 1e6 * unpacking / steps,
        # Where sending what is saved takes as long as compressing and decompressing.
        "faster_below_mb_per_second": 1e-6 * (before - after) / (packing + unpacking),
    }


def compare_compression(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What compression costs and saves on frames of a game."""
    frames = record_frames(args.env or "envpool:Pong-v5", args.messages, args.rows or 16)
    payload = Payload(frames, args.outstanding)
    yield {
        "env": args.env or "envpool:Pong-v5",
        "rows": payload.rows,
        # gRPC compresses at zlib's default level, which is 6.
        "gzip": {level: compress(payload, level) for level in (1, 6)},
        "engines": measure(payload, COMPRESSED, args.seconds, args.rounds),
    }


def start_workers(args: argparse.Namespace, port: int) -> list[subprocess.Popen[bytes]]:
    """Workers, which end with this process."""
    command = [
        *(sys.executable, "-m", "podracer.worker", f"--connect={HOST}:{port}"),
        *(f"--allow_env={args.env}", "--local", "--quiet", f"--num_pools={args.pools}"),
        f"--num_envs={args.envs // args.workers}",
    ]
    return [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(args.workers)]


def make_handler(args: argparse.Namespace) -> TrivialHandler:
    """The handler of real workers."""
    newest = args.newest_frame
    env = envs_lib.make_host_environment(args.env, {}, {}, newest_frame=newest)
    steps, actions = wire.step_layout(env), wire.action_layout(env)
    welcome = {
        **{"env": args.env, "env_kwargs": {}, "env_params": {}, "observed": []},
        **{"newest_frame": newest, "batch": args.batch},
        **{"timeout_s": START_S, "step_timeout_s": START_S},
        **{"steps": steps.describe(), "actions": actions.describe()},
    }
    return TrivialHandler(steps, actions, args.envs, welcome)


def run_workers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What real workers and their server do, the median of rounds."""
    args.env = args.env or "dummy:counting"
    handler = make_handler(args)
    workers = start_workers(args, handler.port)
    rounds: list[dict[str, float]] = []
    try:
        deadline = time.monotonic() + START_S
        while handler.answered < 2 * args.envs:
            if time.monotonic() > deadline or any(x.poll() is not None for x in workers):
                raise SystemExit(f"the workers have not begun within {START_S} seconds")
            time.sleep(0.1)
        # Pools begin at different times.
        time.sleep(args.seconds)
        for _ in range(args.rounds):
            handler.take()
            begin, used = time.perf_counter(), cpu_seconds()
            time.sleep(args.seconds)
            counts, used = handler.take(), cpu_seconds() - used
            rounds.append(capacity(handler, counts, time.perf_counter() - begin, used))
    finally:
        for process in workers:
            process.kill()
            process.communicate()
        handler.close()
    yield {
        "env": args.env,
        "newest_frame": args.newest_frame,
        "workers": args.workers,
        "envs": args.envs,
        "batch": args.batch,
        **{key: statistics.median(x[key] for x in rounds) for key in rounds[0]},
    }


def capacity(
    handler: TrivialHandler, counts: Counts, seconds: float, cpu: float
) -> dict[str, float]:
    """The metrics of one round."""
    p50, p99 = np.percentile(counts.trips, (50, 99))
    return {
        "steps_per_second": counts.steps / seconds,
        "messages_per_second": counts.messages / seconds,
        "rows_per_message": counts.steps / counts.messages,
        "received_mb_per_second": 1e-6 * counts.steps * handler.steps.row_bytes / seconds,
        "server_cores": cpu / seconds,
        "server_us_per_message": 1e6 * cpu / counts.messages,
        "server_us_per_step": 1e6 * cpu / counts.steps,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
    }


def round_numbers(tree: Any) -> Any:
    """Four digits of each number that is not whole."""
    return jax.tree.map(lambda x: float(f"{x:.4g}") if isinstance(x, float) else x, tree)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="environment steps of a message; default: 16")
    parser.add_argument(
        "--shape",
        type=lambda text: tuple(map(int, text.split(","))),
        help="shape of observations, such as 84,84; default: four kinds of payload",
    )
    parser.add_argument("--dtype", default="uint8", help="type of observations of this shape")
    parser.add_argument(
        "--outstanding", type=int, default=1, help="messages without an answer; default: 1"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a round; default: 2")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; default: 3")
    parser.add_argument("--compression", action="store_true", help="compress frames of a game")
    parser.add_argument("--messages", type=int, default=64, help="messages of these frames")
    parser.add_argument("--workers", type=int, help="start this number of workers")
    parser.add_argument("--envs", type=int, default=1200, help="environments of all workers")
    parser.add_argument(
        "--env",
        help="game whose frames are compressed, or what workers step; default: Pong, counting",
    )
    parser.add_argument("--newest_frame", action="store_true", help="workers send newest frames")
    parser.add_argument("--batch", type=int, default=64, help="steps of a worker's message at most")
    parser.add_argument("--pools", type=int, default=2, help="pools of a worker at least")
    args = parser.parse_args(argv)
    if args.workers is not None and args.envs % args.workers:
        parser.error("--envs must be a multiple of --workers")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    args = parse_arguments(argv)
    part = compare_compression if args.compression else compare_engines
    versions = {**common.versions("podracer", "jax", "grpcio"), "pyzmq": zmq.__version__}
    for result in (run_workers if args.workers else part)(args):
        print(json.dumps({**round_numbers(result), "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
