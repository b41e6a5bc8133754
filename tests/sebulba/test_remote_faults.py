"""Faults of remote environments: slow and killed workers, killed learners, and strangers."""

import collections
import contextlib
import datetime
import hashlib
import ipaddress
import math
import os
import pathlib
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import jax
import numpy as np
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from podracer import worker as worker_command
from podracer.errors import ConfigError, ExitCode, PreemptedError
from podracer.remote import access, server, worker
from podracer.remote.worker import WorkerOptions
from podracer.sebulba.learner import Learner
from podracer.types import Trajectory
from tests.distributed.jobs import flags, free_port, read_rows, saved_updates
from tests.helpers import ROOT
from tests.sebulba import runs
from tests.sebulba.remote_runs import (
    BAD,
    REMOTE,
    Lost,
    Remote,
    Stranger,
    check_sequences,
    hello,
    quiet,
    remote,
    steps,
    wait_until,
)
from tests.sebulba.runs import join_parts, sebulba_config

# Long episodes, so that hardly any ends where a worker does.
LONG = {"env_kwargs": {"length": 60, "vary": 7}}
TWELVE = {**LONG, "remote__num_envs": 12, "remote__batch": 12}


class Delayed:
    """Makes workers of this process step slowly, and counts their steps.

    Attributes:
      steps: by the number of the connection and of the pool in it.
      seconds: ``(connection, pool) -> seconds`` of a step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]):
        self.steps: Counter[tuple[int, int]] = Counter()
        self.seconds, self._connections = seconds, 0
        self._make, self._lock = worker.make_environment, threading.Lock()
        monkeypatch.setattr(worker, "make_environment", self._make_environment)

    def _make_environment(self, *arguments: Any) -> Any:
        env = self._make(*arguments)
        with self._lock:
            connection, self._connections = self._connections, self._connections + 1
        # The worker makes a pool in each of its threads, all of which are of one size here.
        first: list[int] = []

        def make_pool(seeds: list[int], threads: int) -> Any:
            pool = env.make_pool(seeds, threads)
            first.append(seeds[0])
            step = pool.step

            def slowly(action: np.ndarray) -> Any:
                key = connection, sorted(first).index(seeds[0])
                time.sleep(self.seconds(*key))
                self.steps[key] += len(seeds)
                return step(action)

            pool.step = slowly
            return pool

        return env._replace(make_pool=make_pool)

    def of(self, connections: set[int]) -> int:
        """Steps of these connections."""
        return sum(
            x for (connection, _), x in list(self.steps.items()) if connection in connections
        )


@contextlib.contextmanager
def taking(run: Remote, take: Callable[[Trajectory], None] = lambda _: None) -> Iterator[None]:
    """Takes trajectories, as a learner does that is never in the way."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            take(join_parts(run.outputs(1)[0]))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def rate(count: Callable[[], int], seconds: float) -> float:
    """Counts a second."""
    before, start = count(), time.monotonic()
    time.sleep(seconds)
    return (count() - before) / (time.monotonic() - start)


@pytest.mark.slow
def test_a_slow_environment_in_ten_costs_the_others_a_tenth_at_most(monkeypatch):
    slow = threading.Event()
    delayed = Delayed(monkeypatch, lambda _, pool: 0.2 if pool == 0 and slow.is_set() else 0.002)

    def fast_steps() -> int:
        return sum(x for (_, pool), x in list(delayed.steps.items()) if pool > 0)

    def measure(slows: bool) -> float:
        (slow.set if slows else slow.clear)()
        # Until a slow step that has begun is over, the environment is still slow.
        time.sleep(0.25)
        return rate(fast_steps, 0.4)

    ratios: list[float] = []
    with remote(**TWELVE) as run, taking(run):
        run.work(10, num_pools=10)
        wait_until(lambda: fast_steps() > 200)
        # By turns and again, because a busy machine is not equally busy at all times.
        while len(ratios) < 6 or (np.median(ratios) < 0.9 and len(ratios) < 10):
            before, *during, after = map(measure, (False, True, True, False))
            ratios.append(sum(during) / (before + after))
    assert np.median(ratios) >= 0.9, ratios


def sequences_of(trajectory: Trajectory) -> Trajectory:
    """What ``check_sequences`` reads, as numpy arrays of their own."""
    step = jax.tree.map(np.array, trajectory.timestep)
    return trajectory.replace(
        carry=(), action=(), extras=(), timestep=step, env_id=np.array(trajectory.env_id)
    )


def listens(address: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


class Process:
    """A worker in a process of its own.

    Attributes:
      log: what it has printed.
    """

    def __init__(self, address: str, num_envs: int, log: pathlib.Path, *more: str):
        command = [sys.executable, "-m", "podracer.worker", f"--connect={address}"]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, f"--num_envs={num_envs}", *more],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def joins(self) -> int:
        """How often it has been admitted."""
        return self.log.read_text().count(" steps ")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Killer:
    """Kills workers of a run in this process at random moments, and starts others.

    Attributes:
      started: number of workers that it has started.
      ended: set once the run is over.
    """

    def __init__(self, start: Callable[[int], Any], address: str, updates: list[float]):
        """Does nothing yet.

        Args:
          start: starts the worker of this number.
          address: where the learner listens.
          updates: times of the learner's updates, which the learner adds to.
        """
        self._start, self._address, self._updates = start, address, updates
        self.started, self.ended = 0, threading.Event()

    def run(self, period: float, seconds: float) -> None:
        """Kills a worker in each period, and then ends the run with SIGTERM."""
        rng = random.Random(0)
        with contextlib.ExitStack() as stack:
            # Also if this thread fails.
            stack.callback(self._end)
            self._wait(lambda: listens(self._address))
            workers = [self._next() for _ in range(3)]
            stack.callback(lambda: [x.kill() for x in workers])
            self._wait(lambda: len(self._updates) > 5)
            self._updates.clear()
            for _ in range(round(seconds / period)):
                moment = rng.uniform(0, period)
                self.ended.wait(moment)
                # On a busy machine it may take longer than a period until a worker has joined.
                self._wait(lambda: sum(x.joins() > 0 for x in workers) > 1)
                workers.pop(rng.randrange(len(workers))).kill()
                workers.append(self._next())
                self.ended.wait(period - moment)
            # While workers work.
            self._end()

    def _next(self) -> Any:
        self.started += 1
        return self._start(self.started)

    def _wait(self, condition: Callable[[], bool]) -> None:
        wait_until(lambda: condition() or self.ended.is_set(), 120)

    def _end(self) -> None:
        if not self.ended.is_set() and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
            self.ended.wait(60)


@pytest.mark.parametrize(
    ("processes", "period", "seconds"),
    [
        pytest.param(False, 0.3, 3.0, marks=pytest.mark.slow),
        pytest.param(True, 10.0, 60.0, marks=(pytest.mark.weekly, pytest.mark.timeout(1800))),
    ],
)
def test_workers_are_killed_and_the_learner_goes_on_and_mixes_no_two(
    processes, period, seconds, tmp_path, monkeypatch
):
    address, taken, updates = f"127.0.0.1:{free_port()}", [], []
    learn = Learner._learn

    def record(self: Learner, state: Any, outputs: Any) -> Any:
        taken.extend(sequences_of(join_parts(x)) for x in outputs)
        updates.append(time.monotonic())
        return learn(self, state, outputs)

    def start(number: int) -> Lost | Process:
        return Process(address, 4, tmp_path / f"{number}") if processes else Lost(address, 4)

    monkeypatch.setattr(Learner, "_learn", record)
    killer = Killer(start, address, updates)
    thread = threading.Thread(target=killer.run, args=(period, seconds))
    thread.start()
    config = {**REMOTE, **TWELVE, "anneal": False, "remote__listen": address}
    try:
        with pytest.raises(PreemptedError):
            runs.train(sebulba_config(**config, total_steps=10**8), workdir=tmp_path / "run")
    finally:
        killer.ended.set()
        thread.join()
    kills = round(seconds / period)
    assert killer.started == 3 + kills
    # Most of them had begun an unroll.
    assert check_sequences(taken) >= 0.5 * kills
    # There is always a worker that works.
    assert max(np.diff(updates)) < max(5.0, 2 * period)


@pytest.mark.slow
def test_half_of_the_workers_are_killed_and_the_others_keep_their_rate(monkeypatch):
    delayed = Delayed(monkeypatch, lambda *_: 0.02)
    seen: Counter[int] = Counter()

    def unrolls(envs: range) -> int:
        return sum(seen[env] for env in envs)

    with remote(**TWELVE) as run, taking(run, lambda x: seen.update(x.env_id.tolist())):
        workers = [Lost(run.address, 3) for _ in range(4)]
        wait_until(lambda: run.actors.row()["remote/workers"] == 4 and len(seen) == 12)
        before = rate(lambda: unrolls(range(12)), 1.5)
        for killed in workers[:2]:
            killed.kill()
        wait_until(lambda: run.actors.row()["remote/losses"] == 2)
        seen.clear()
        after = rate(lambda: unrolls(range(12)), 1.5)
        left = {env for env, count in seen.items() if count > 1}
        # The rate of half of the environments, which lost no step.
        assert after > 0.75 * before / 2
        assert len(left) == 6
        joined = time.monotonic()
        run.work(6)
        wait_until(lambda: run.actors.row()["remote/workers"] == 3)
        wait_until(lambda: len(seen) == 12, joined + 5 - time.monotonic())
        for alive in workers[2:]:
            alive.kill()
    assert delayed.steps


@pytest.mark.slow
def test_a_new_worker_process_contributes_soon(tmp_path, record_property):
    seen: Counter[int] = Counter()
    with remote(**TWELVE) as run, taking(run, lambda x: seen.update(x.env_id.tolist())):
        run.work(6)
        wait_until(lambda: len(seen) == 6)
        started = time.monotonic()
        process = Process(run.address, 6, tmp_path / "log")
        wait_until(lambda: run.actors.row()["remote/joins"] == 2, 120)
        joined = time.monotonic()
        wait_until(lambda: len(seen) == 12)
        contributed = time.monotonic()
        process.kill()
    record_property("seconds from start", contributed - started)
    record_property("seconds from joining", contributed - joined)
    assert contributed - joined < 5


def learner_command(workdir: pathlib.Path, port: int) -> list[str]:
    changes = {
        "agent": "vtrace",
        "num_envs": 8,
        "unroll_length": 8,
        "cpu_devices": 1,
        "total_steps": 800 * 64,
        "env_kwargs.length": 60,
        "env_kwargs.vary": 7,
        "checkpoint.every": 100,
        "updates_per_call": 20,
        "remote.num_envs": 8,
        "remote.listen": f"127.0.0.1:{port}",
    }
    return [sys.executable, "-m", "podracer.sebulba", *flags("sebulba", workdir, **changes)]


@contextlib.contextmanager
def learner(workdir: pathlib.Path, port: int) -> Iterator[subprocess.Popen]:
    command = learner_command(workdir, port)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def run_until(workdir: pathlib.Path, port: int, workers: list[Process], number: int | None) -> int:
    """Runs the learner until it is over, or until it is sent this signal; returns its exit code."""
    before, rows = [x.joins() for x in workers], len(read_rows(workdir))
    with learner(workdir, port) as process:
        wait_until(lambda: listens(f"127.0.0.1:{port}") or process.poll() is not None, 120)
        # All workers are back within ten seconds.
        wait_until(lambda: all(x.joins() > n for x, n in zip(workers, before, strict=True)), 10)
        if number:
            wait_until(lambda: len(read_rows(workdir)) > rows + 8, 120)
            process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    assert process.returncode in (0, -signal.SIGKILL, ExitCode.PREEMPTED), errors
    return process.returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_learner_goes_on_where_it_was_and_its_workers_return(tmp_path):
    port, workdir, saved = free_port(), tmp_path / "run", [0]
    # They are started before the learner.
    workers = [Process(f"127.0.0.1:{port}", 4, tmp_path / f"{i}.log") for i in range(2)]
    try:
        wait_until(lambda: all("tries again" in x.log.read_text() for x in workers), 120)
        for number, code in (
            (signal.SIGKILL, -signal.SIGKILL),
            (signal.SIGTERM, ExitCode.PREEMPTED),
            (None, ExitCode.OK),
        ):
            assert run_until(workdir, port, workers, number) == code
            rows = read_rows(workdir)
            steps = [row["step"] for row in rows]
            # It goes on from its checkpoint: no step is shown twice.
            assert steps == sorted(set(steps))
            assert rows[-1]["remote/workers"] == 2
            saved.append(saved_updates(workdir)[-1])
        assert saved == sorted(set(saved))
        assert saved[-1] == 800
        for each in workers:
            assert each.process.wait(30) == ExitCode.OK
            assert "the run is over" in each.log.read_text()
    finally:
        for each in workers:
            each.kill()


@pytest.fixture
def command(monkeypatch):
    """``(*arguments) -> exit code`` of the command in this process, which a thread may call."""
    # It would be this process's, and only its main thread may set it.
    monkeypatch.setattr(worker_command, "end_on_sigterm", lambda: None)
    return lambda *arguments: worker_command.main(["worker", *arguments])


def test_exit_codes_of_workers(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PODRACER_TOKEN", "right")
    token = tmp_path / "token"
    token.write_text("wrong")
    counting = runs.envs.make_host_environment("dummy:counting", {}, {})
    with remote(counting, env="gymnasium:evil_module:Evil-v0") as run:
        options = [f"--connect={run.address}", "--num_envs=8"]
        assert command(*options) == ExitCode.CONFIG
        error = capsys.readouterr().err
        assert "imports the module 'evil_module'" in error
        assert "add --allow_env=gymnasium:evil_module:Evil-v0" in error
        assert command(*options, f"--token_file={token}") == ExitCode.CONFIG
        assert "wrong or missing token" in capsys.readouterr().err
        # Permitted, but not installed.
        assert command(*options, "--allow_env=gymnasium:evil_module:Evil-v0") == ExitCode.CONFIG
        assert "evil_module" in capsys.readouterr().err
    assert not any("evil_module" in name for name in sys.modules)


def test_a_worker_waits_for_its_server_and_ends_with_the_run(command, monkeypatch):
    address, codes, lines = f"127.0.0.1:{free_port()}", queue.SimpleQueue(), []
    monkeypatch.setattr(worker_command, "print_line", lines.append)
    thread = threading.Thread(
        target=lambda: codes.put(command(f"--connect={address}", "--num_envs=8")), daemon=True
    )
    thread.start()
    wait_until(lambda: "tries again until it succeeds" in "".join(lines))
    with remote(remote__listen=address) as run:
        run.outputs(1)
        assert codes.empty()
    assert codes.get(timeout=20) == ExitCode.OK
    assert lines[-1] == "the run is over"


@pytest.mark.slow
def test_exit_codes_of_worker_processes(tmp_path, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    early = Process(address, 4, tmp_path / "early")
    wait_until(lambda: "tries again" in early.log.read_text(), 120)
    monkeypatch.setenv("PODRACER_TOKEN", "other")
    stranger = Process(address, 4, tmp_path / "stranger")
    monkeypatch.setenv("PODRACER_TOKEN", "")
    token = tmp_path / "token"
    token.write_text("right")
    early.process.terminate()
    assert early.process.wait(60) == ExitCode.PREEMPTED
    early = Process(address, 4, tmp_path / "early", f"--token_file={token}")
    with remote(remote__listen=address, remote__token_file=str(token)) as run:
        assert stranger.process.wait(120) == ExitCode.CONFIG
        assert "wrong or missing token" in stranger.log.read_text()
        run.outputs(1)
        # While it works, too.
        late = Process(address, 4, tmp_path / "late", f"--token_file={token}")
        wait_until(lambda: run.actors.row()["remote/workers"] == 2 and run.outputs(1), 120)
        late.process.terminate()
        assert late.process.wait(60) == ExitCode.PREEMPTED
    assert early.process.wait(60) == ExitCode.OK
    assert "the run is over" in early.log.read_text()


class Authority:
    """Signs certificates of this machine, which it writes to files.

    Attributes:
      file: its own certificate.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = name
        self.file, _ = self.sign("authority", self._key)

    def sign(self, name: str, key: Any = None) -> tuple[str, str]:
        """The files of a certificate and its key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject, issuer = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{self._name} {x}")])
            for x in (name, "authority")
        )
        now = datetime.datetime.now(datetime.UTC)
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder(issuer, subject, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(subject == issuer, None), critical=True)
            .add_extension(here, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = [self._folder / f"{self._name}-{name}.{x}" for x in ("crt", "key")]
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(files[0]), str(files[1])


def tls(folder: pathlib.Path, *, mutual: bool) -> tuple[dict[str, str], Authority]:
    """Settings of a server with a token and a certificate, and who has signed it."""
    authority = Authority(folder, "right")
    certificate, key = authority.sign("server")
    token = folder / "token"
    token.write_text("right")
    settings = {
        "remote__tls_cert": certificate,
        "remote__tls_key": key,
        "remote__tls_clients": authority.file if mutual else "",
        "remote__token_file": str(token),
    }
    return settings, authority


@pytest.mark.parametrize("mutual", [False, True])
def test_only_workers_with_certificates_and_token_are_admitted(mutual, tmp_path):
    settings, authority = tls(tmp_path, mutual=mutual)
    other = Authority(tmp_path, "other")
    token = settings["remote__token_file"]
    right = dict(zip(("tls_cert", "tls_key"), authority.sign("worker"), strict=True))
    wrong = [{"token_file": token}, {"token_file": token, "tls_ca": other.file, **right}]
    if mutual:
        forged = dict(zip(("tls_cert", "tls_key"), other.sign("worker"), strict=True))
        wrong += [{"tls_ca": authority.file, "token_file": token, **x} for x in ({}, forged)]
    with remote(**settings) as run:
        for options in wrong:
            with pytest.raises(SaidError, match="unavailable"):
                worker.work(WorkerOptions([run.address], 8, **options), raise_said)
        with pytest.raises(ConfigError, match="wrong or missing token"):
            worker.work(WorkerOptions([run.address], 8, tls_ca=authority.file, **right), quiet)
        assert run.actors.row()["remote/joins"] == 0
        needed = right if mutual else {}
        run.work(8, tls_ca=authority.file, token_file=token, **needed)
        run.outputs(1)


class SaidError(Exception):
    """What a worker has printed."""


def raise_said(text: str) -> None:
    raise SaidError(text)


class Strangers:
    """Sends to a server what no worker should, all of it chosen by ``rng``.

    Attributes:
      sent: number of malformed messages and connections of each kind.
    """

    def __init__(self, run: Remote, authority: Authority, other: Authority, rng: random.Random):
        self._run, self._rng, self.sent = run, rng, Counter[str]()
        self._metadata = (("authorization", "Bearer right"),)
        self._files = (authority.file, *authority.sign("stranger"))
        self._forged = (authority.file, *other.sign("stranger"))
        self._channel = self._open(self._files)
        self._idle: collections.deque[Any] = collections.deque()
        most = run.actors._server._most_bytes
        self._large = {"too large": bytes(most + 1), "too large for gRPC": bytes(4 * most + 1)}

    def _open(self, files: tuple[str, str, str], *options: Any) -> Any:
        authority, certificate, key = files
        credentials = access.channel_credentials(authority, certificate, key)
        return grpc.secure_channel(self._run.address, credentials, options=options)

    def _talk(self, messages: list[bytes], metadata: Any = None, **options: Any) -> None:
        metadata = self._metadata if metadata is None else metadata
        stranger = Stranger("", metadata, self._channel, **options)
        for message in messages:
            stranger.send(message)
        stranger.end()
        with contextlib.suppress(grpc.RpcError):
            collections.deque(stranger.responses, 0)

    def _keep(self, item: Any, most: int) -> None:
        """Leaves something open until others of its type have followed."""
        self._idle.append(item)
        same = [x for x in self._idle if type(x) is type(item)]
        if len(same) > most:
            self._idle.remove(same[0])
            same[0].close()

    def bad(self) -> None:
        self._talk(self._rng.choice(list(BAD.values()))[0])

    def damaged(self) -> None:
        messages = [hello(), steps(1), steps(2)]
        number = self._rng.randrange(len(messages))
        message = bytearray(messages[number])
        for _ in range(self._rng.randint(1, 4)):
            message[self._rng.randrange(len(message))] = self._rng.randrange(256)
        cut = self._rng.randint(0, len(message)) if self._rng.random() < 0.5 else None
        self._talk([*messages[:number], bytes(message[:cut])])

    def large(self) -> None:
        self._talk([hello(), self._large[self._rng.choice(list(self._large))]])

    def unknown(self) -> None:
        self._talk([hello()], self._rng.choice([(), (("authorization", "Bearer wrong"),)]))

    def replayed(self) -> None:
        number = self._rng.randrange(1 << 40, 1 << 48)
        for _ in range(2):
            self._talk([hello(1)], number=number)

    def forged(self) -> None:
        with self._open(self._forged) as channel, contextlib.suppress(grpc.RpcError):
            list(channel.stream_stream(server.METHOD)(iter([hello()]), metadata=self._metadata))

    def raw(self) -> None:
        client = socket.create_connection(("127.0.0.1", self._run.actors.port))
        # Nothing, half a preface of HTTP/2 without TLS, and the beginning of TLS.
        client.send(self._rng.choice([b"", b"PRI * HTTP/2.0", b"\x16\x03\x01\x02\x00\x01"]))
        self._keep(client, 30)

    def silent(self) -> None:
        stranger = Stranger("", self._metadata, self._channel)
        stranger.send(hello(1))
        self._keep(stranger, 2)

    def deaf(self) -> None:
        """Steps without reading a single action."""
        options = ("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)
        channel = self._open(self._files, *options, ("grpc.use_local_subchannel_pool", 1))
        stranger = Stranger("", self._metadata, channel)
        stranger.send(hello())
        wait_until(lambda: self._stream(stranger) or stranger.responses.done())
        stream = self._stream(stranger)
        number = 0
        while stream.left_at == math.inf:
            # After each answer, so that only what it does not read is wrong.
            if stream._sent > number:
                number += 1
                stranger.send(steps(number))
            time.sleep(0.001)
        stranger.end()
        # A stream that nobody holds would be cancelled.
        stack = contextlib.ExitStack()
        stack.callback(channel.close)
        stack.callback(stranger.close)
        self._keep(stack, 3)

    def _stream(self, stranger: Stranger) -> Any:
        streams = [*self._run.actors._server._streams]
        return next((x for x in streams if x.start >> 16 == stranger.number and x._sent), None)

    def attack(self, count: int) -> None:
        kinds = {self.bad: 10, self.damaged: 10, self.large: 1, self.unknown: 5, self.replayed: 3,
                 self.forged: 2, self.raw: 8, self.silent: 1, self.deaf: 0.3}  # fmt: skip
        for kind in self._rng.choices(list(kinds), list(kinds.values()), k=count):
            kind()
            self.sent[kind.__name__] += 1

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._channel.close()


def digest(trajectory: Trajectory) -> str:
    """A hash of every bit of a trajectory."""
    hashed = hashlib.sha256()
    for x in jax.tree.leaves(trajectory):
        hashed.update(np.ascontiguousarray(x).tobytes())
    return hashed.hexdigest()


def count_threads() -> int:
    """Threads of this process, besides those that the server keeps for the next streams."""
    return sum(not thread.name.startswith("streams") for thread in threading.enumerate())


def resident_mb() -> float:
    """Megabytes of memory of this process."""
    return psutil.Process().memory_info().rss / 1e6


REJECTED = {
    "NaN or an infinite number",
    "a HELLO of another connection",
    "a HELLO that does not come first",
    "a HELLO without its number of environments or of restarts",
    "a body of the wrong size",
    "a call without the token",
    "a message of another version of podracer",
    "a message of unknown kind",
    "a message out of its order, or of another connection",
    "a message shorter than its header",
    "a message that is too large",
    "a message that only servers send",
    "a worker that said nothing for 3 seconds",
    "bytes that are no message",
    "steps of environments that it does not have",
    "steps without taking the actions of others",
}


@pytest.mark.parametrize(
    "attacks",
    [
        pytest.param(2_000, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.weekly),
    ],
)
@pytest.mark.timeout(900)
def test_strangers_change_no_bit_of_what_a_worker_collects(attacks, tmp_path, monkeypatch):
    """Nor does the server keep memory or threads of strangers that have left."""
    settings, authority = tls(tmp_path, mutual=True)
    certificate, key = authority.sign("worker")
    honest = {"tls_ca": authority.file, "tls_cert": certificate, "tls_key": key,
              "token_file": settings["remote__token_file"]}  # fmt: skip
    # An actor thread whose places all belong to the worker, and another one for strangers.
    settings |= {**LONG, "sebulba__threads": 2, "remote__num_envs": 16, "remote__timeout_s": 3.0,
                 "remote__start_timeout_s": 3.0}  # fmt: skip
    pause = [0.02]
    Delayed(monkeypatch, lambda *_: pause[0])

    def collect(found: list[str], trajectory: Trajectory) -> None:
        if not (trajectory.env_id % 2).any():
            found.append(digest(trajectory))

    found, expected = [], []
    other = Authority(tmp_path, "other")
    with (
        remote(**settings) as run,
        taking(run, partial(collect, found)),
        contextlib.closing(Strangers(run, authority, other, random.Random(0))) as strangers,
    ):
        run.work(8, **honest)
        wait_until(lambda: found)
        strangers.attack(attacks // 5)
        threads, memory = count_threads(), resident_mb()
        strangers.attack(attacks - attacks // 5)
        # Those that still say or read nothing are dropped.
        wait_until(lambda: run.actors.row()["remote/workers"] == 1)
        wait_until(lambda: len(run.actors._server._streams) == 1)
        strangers.close()
        wait_until(lambda: count_threads() <= threads)
        grown = resident_mb() - memory
        rejected, warnings = run.actors._server.traffic.rejected, run.warnings
        during = len(found)
        wait_until(lambda: len(found) > during)
    pause[0] = 0.0
    with remote(**settings) as run, taking(run, partial(collect, expected)):
        run.work(8, **honest)
        wait_until(lambda: len(expected) >= len(found), 120)
    assert found == expected[: len(found)]
    assert grown < 50, "megabytes"
    # Each kind is counted, and named once.
    assert set(rejected) >= REJECTED
    assert rejected.total() >= sum(strangers.sent[x] for x in ("bad", "unknown", "replayed"))
    named = [text.removeprefix("rejected ").partition(";")[0] for text in warnings]
    assert sorted(named) == sorted(rejected)
    assert strangers.sent.total() == attacks
