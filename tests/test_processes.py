"""Runs on several processes: the same learning as on one, one end for all, nobody lost unseen.

Real processes of two CPU devices each, joined over the loopback.
"""

import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from podracer import anakin, checkpoint, cli, drift, errors, mesh, processes, sebulba, watchdog
from podracer import config as config_lib
from podracer.errors import ConfigError, DriftError
from podracer.session import Session
from podracer.watchdog import Limits, State, Store, Watchdog
from tests.helpers import make_config

ROOT = pathlib.Path(__file__).parent.parent
ENVS = {"anakin": "gymnax:CartPole-v1", "sebulba": "dummy:counting"}


@pytest.fixture(autouse=True)
def eight_devices():
    """JAX is in use before a run asks for fewer."""
    assert len(jax.devices()) == 8


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Job:
    """So many processes that run one command; killed at the end, whatever happens."""

    def __init__(self, architecture: str, count: int, workdir, more=(), **changes):
        values = {
            "env": ENVS[architecture],
            "num_envs": 16,
            "unroll_length": 8,
            "updates_per_call": 1,
            "cpu_devices": 2,
            "total_steps": 16 * 8 * 3,
            "network.hidden": "(16,)",
            "num_epochs": 1,
            "num_minibatches": 1,
            "evaluation.episodes": 6,
            **changes,
        }
        command = [
            *(sys.executable, "-m", f"podracer.{architecture}", "--config=configs/cartpole.py"),
            *(f"--config.{key}={value}" for key, value in values.items()),
            *(f"--workdir={workdir}", f"--num_processes={count}"),
            *(f"--coordinator=127.0.0.1:{free_port()}", *more),
        ]
        self.workdir = pathlib.Path(workdir)
        self.processes = [
            subprocess.Popen(
                [*command, f"--process_id={number}"],
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for_rows(self, count: int) -> None:
        deadline = time.monotonic() + 200
        while len(self.rows()) < count:
            assert time.monotonic() < deadline
            ended = [p.communicate()[1] for p in self.processes if p.poll() is not None]
            assert not ended, ended
            time.sleep(0.1)

    def rows(self) -> list[dict]:
        path = self.workdir / "metrics.jsonl"
        return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def finish(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each."""
        ended = [p.communicate(timeout=timeout) for p in self.processes]
        return [(p.returncode, *texts) for p, texts in zip(self.processes, ended, strict=True)]

    def succeed(self) -> None:
        ended = self.finish()
        assert [code for code, *_ in ended] == [0] * len(ended), [errors for *_, errors in ended]


def steps(workdir) -> list[int]:
    """Of the checkpoints."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def last_arrays(workdir) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint, whatever devices saved it."""
    items = (checkpoint.WEIGHTS, checkpoint.REST)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with checkpoint._manager(workdir / checkpoint.FOLDER, writes=False) as manager:
        there = manager.item_metadata(manager.latest_step())
        shapes = {
            item: {
                k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
                for k, x in there[item].items()
            }
            for item in items
        }
        wanted = {item: ocp.args.StandardRestore(x) for item, x in shapes.items()}
        found = manager.restore(manager.latest_step(), args=ocp.args.Composite(**wanted))
    return {f"{item}/{k}": np.asarray(x) for item in items for k, x in found[item].items()}


def check_same(one, many, architecture: str) -> None:
    """Two runs have learned the same, up to float rounding."""
    states = [last_arrays(epath.Path(workdir)) for workdir in (one, many)]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_allclose(states[1][name], x, rtol=1e-3, atol=1e-5, err_msg=name)
    rows = [
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (one, many)
    ]
    for row, other in zip(*rows, strict=True):
        names = [name for name in row if "time" not in name]
        assert row.keys() == other.keys()
        for name in names:
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
    assert rows[0][-1]["train/episodes"] > 0 or architecture == "anakin"


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("architecture", "agent", "count", "one"),
    [
        ("anakin", "ppo", 2, {"cpu_devices": 4}),
        # Two hosts of one actor and one learner.
        pytest.param(
            "sebulba",
            "vtrace",
            2,
            {"cpu_devices": 3, "sebulba__actor_devices": (0,)},
            marks=slow,
        ),
        pytest.param("anakin", "vtrace", 2, {"cpu_devices": 4}, marks=slow),
        pytest.param("anakin", "ppo", 4, {"cpu_devices": 8}, marks=slow),
        pytest.param("anakin", "vtrace", 4, {"cpu_devices": 8}, marks=slow),
        pytest.param(
            "sebulba", "ppo", 2, {"cpu_devices": 3, "sebulba__actor_devices": (0,)}, marks=slow
        ),
        pytest.param(
            "sebulba", "ppo", 4, {"cpu_devices": 5, "sebulba__actor_devices": (0,)}, marks=slow
        ),
        pytest.param(
            "sebulba", "vtrace", 4, {"cpu_devices": 5, "sebulba__actor_devices": (0,)}, marks=slow
        ),
    ],
)
def test_processes_do_what_one_does(architecture, agent, count, one, tmp_path):
    sizes = {"agent": agent, "num_minibatches": 2, "num_envs": 32, "total_steps": 32 * 8 * 3}
    with Job(architecture, count, tmp_path / "many", **sizes) as job:
        train = {"anakin": anakin.train, "sebulba": sebulba.train}[architecture]
        config = make_config(
            env=ENVS[architecture], evaluation__episodes=6, learning_rate=1e-3, **sizes, **one
        )
        train(config, tmp_path / "one", quiet=True)
        job.succeed()
    check_same(tmp_path / "one", tmp_path / "many", architecture)
    # The first process alone has written.
    assert len(list((tmp_path / "many" / "tensorboard").iterdir())) == 1


@slow
@pytest.mark.parametrize("architecture", ["anakin", "sebulba"])
def test_a_signal_to_one_saves_on_all_and_any_number_goes_on(architecture, tmp_path):
    changes = {"total_steps": 16 * 8 * 100_000, "evaluation.episodes": 2}
    with Job(architecture, 2, tmp_path, **changes) as job:
        job.wait_for_rows(3)
        job.processes[1].send_signal(signal.SIGTERM)
        ended = job.finish()
        assert [code for code, *_ in ended] == [cli.PREEMPTED] * 2, ended
        # Whatever the process was told, it is the first that says it.
        assert "stops after update" in ended[0][1]
        assert "stops after update" not in ended[1][1]
    (saved,) = steps(tmp_path)
    assert job.rows()[-1]["step"] == saved * 128
    total = {"total_steps": (saved + 2) * 128}
    # As many learners as both had together.
    alone = {"anakin": {"cpu_devices": 4}, "sebulba": {"cpu_devices": 3}}[architecture]
    with Job(
        architecture, 1, tmp_path, **total, **alone, **{"sebulba.actor_devices": "(0,)"}
    ) as job:
        job.succeed()
    assert [row["step"] for row in job.rows()] == [128 * (i + 1) for i in range(saved + 2)]
    assert steps(tmp_path) == [saved, saved + 2]
    with Job(architecture, 2, tmp_path, total_steps=(saved + 4) * 128) as job:
        job.succeed()
    assert [row["step"] for row in job.rows()] == [128 * (i + 1) for i in range(saved + 4)]


@slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named(how, victim, tmp_path):
    changes = {"total_steps": 24 * 8 * 1_000_000, "hosts.timeout_s": 15.0, "num_envs": 24}
    with Job("anakin", 3, tmp_path, **changes) as job:
        job.wait_for_rows(3)
        # Every tenth of the limit each process tells the others where it is.
        time.sleep(4)
        job.processes[victim].send_signal(how)
        start = time.monotonic()
        others = [p for number, p in enumerate(job.processes) if number != victim]
        for process in others:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == watchdog.LOST, errors
            first = errors[errors.index("error: ") :].splitlines()[0]
            assert f"process {victim} " in first
            assert not any(f"process {i} " in first for i in {0, 1, 2} - {victim})
            # What each had reached, and where this one was.
            assert sum("): step " in line for line in errors.splitlines()) == 3
            assert "podracer/loop.py" in errors
        assert time.monotonic() - start < 60
        if how == signal.SIGSTOP:
            job.processes[victim].send_signal(signal.SIGCONT)
            job.processes[victim].communicate(timeout=60)
            assert job.processes[victim].returncode == watchdog.LOST


@slow
def test_a_failure_of_one_ends_all_with_its_code(tmp_path):
    # Held by another run: only the first process can know.
    (tmp_path / "run").mkdir()
    with Job("anakin", 1, tmp_path / "run", total_steps=10**9) as holder:
        holder.wait_for_rows(1)
        with Job("anakin", 2, tmp_path / "run", **{"hosts.timeout_s": 20.0}) as job:
            ended = job.finish()
    assert [code for code, *_ in ended] == [cli.BAD_CONFIG] * 2
    assert "process 0" in ended[1][2]
    assert "belongs to a run that is going on" in ended[1][2]


@slow
def test_seeds_a_trace_and_the_weights_of_another_run(tmp_path):
    with Job("anakin", 2, tmp_path / "one", num_seeds=2) as job:
        job.succeed()
    more = [f"--init_from={tmp_path / 'one'}", "--profile=1"]
    with Job("anakin", 2, tmp_path / "two", more, num_seeds=2, learning_rate=1e-30) as job:
        job.succeed()
    one, two = (last_arrays(epath.Path(tmp_path / name)) for name in ("one", "two"))
    for name in [name for name in one if name.startswith("weights/")]:
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-20)
    assert list((tmp_path / "two" / "profile").rglob("*.xplane.pb"))


@slow
def test_ctrl_c_to_one_after_the_other_saves_on_all(tmp_path):
    with Job("anakin", 2, tmp_path, total_steps=10**9) as job:
        job.wait_for_rows(2)
        job.processes[1].send_signal(signal.SIGINT)
        # As a scheduler does it: the other one, which has heard by then, saves.
        time.sleep(0.1)
        job.processes[0].send_signal(signal.SIGINT)
        ended = job.finish()
    assert [code for code, *_ in ended] == [cli.INTERRUPTED] * 2, ended
    assert job.rows()[-1]["step"] == steps(tmp_path)[-1] * 128


def test_two_agree_restore_and_fail_together(tmp_path):
    command = [sys.executable, "-m", "tests.pair"]
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        pair = [
            subprocess.Popen(
                [*command, str(index), port, str(tmp_path)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        for process in pair:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        ended = [process.communicate(timeout=120) for process in pair]
    assert all("restored" in out for out, _ in ended), ended
    assert [process.returncode for process in pair] == [cli.UNSAVED] * 2, ended
    why = "process 1 could not write a checkpoint: OSError: [Errno 28] No space left on device"
    assert f"failed: SaveError: {why}" in ended[0][1]
    assert f"error: {why}" in ended[1][1]


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_never_comes_is_waited_for_no_longer_than_is_said(index):
    port = free_port()
    command = f"""
from podracer.processes import Address, HostsConfig, join
join(Address("127.0.0.1:{port}", 2, {index}), HostsConfig(start_timeout_s=0.5))
"""
    ended = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == watchdog.LOST, ended
    said = f"process {index} of 2 at 127.0.0.1:{port}, which waited for the others, has given up"
    assert said in ended.stderr
    assert "after 0.5 s (hosts.start_timeout_s)" in ended.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, cli.PREEMPTED), (signal.SIGINT, cli.INTERRUPTED)]
)
def test_one_that_waits_for_others_can_be_asked_to_end(number, code):
    command = f"""
import signal
from podracer import cli, processes
def initialize(*_, initialization_timeout, **__):
    print("waits", flush=True)
    join(*_, initialization_timeout=initialization_timeout, **__)
join, processes.jax.distributed.initialize = processes.jax.distributed.initialize, initialize
signal.signal(signal.SIGTERM, cli._end)
processes.join(processes.Address("127.0.0.1:{free_port()}", 2, 0), processes.HostsConfig())
"""
    with subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            # Until it does.
            time.sleep(0.5)
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert f"was asked to end by {signal.Signals(number).name}" in errors


# ---- What needs no processes.


LIMITS = Limits(start_s=90.0, run_s=30.0)


class Messages(dict):
    """A store."""

    def store(self) -> Store:
        return Store(self.__setitem__, lambda prefix: dict(self))


def said(index: int, **values) -> tuple[str, str]:
    return f"state/{index}", json.dumps(State(f"host{index}", **{"beat": 1, **values}))


@pytest.fixture
def watch(monkeypatch):
    """Starts the watchdog of process 0 of three, which never ends this process."""
    started = []

    def start(messages: Messages, limits: Limits = LIMITS) -> Watchdog:
        watch = Watchdog(messages.store(), 0, 3, limits, ("127.0.0.1", 1))
        monkeypatch.setattr(watch, "_leave", lambda *_: None)
        started.append(watch)
        wait_until(lambda: watch._heard[0].state.beat > 0)
        return watch

    yield start
    for watch in started:
        watch.end()
        watch._let_abort()


def wait_until(true) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def verdict(watch: Watchdog, seconds: float, silent: tuple[int, ...] = ()):
    """What it thinks some time later, when all but these have gone on talking."""
    now = time.monotonic() + seconds
    watch._answered = now
    for index in {0, 1, 2} - {*silent}:
        watch._heard[index] = watch._heard[index]._replace(at=now)
    return watch._verdict(now)


def hears(watch: Watchdog, index: int, **values) -> None:
    """Waits until it has heard this of a process."""
    watch._wake.set()

    def known() -> bool:
        state = watch._heard[index].state
        return all(getattr(state, name) == value for name, value in values.items())

    wait_until(known)


def test_who_is_missing_is_said(watch):
    dog = watch(Messages([said(1, step=128)]))
    dog.reached(128, "training")
    assert verdict(dog, 20, (1, 2)) is None
    # Process 2 was never heard of: it may still have to come.
    code, reason = verdict(dog, 40, (1, 2))
    assert code == watchdog.LOST
    assert "nothing was heard of process 1 (host1) for 30 s (hosts.timeout_s)" in reason
    assert "process 2" not in reason
    code, reason = verdict(dog, 100, (1, 2))
    assert "nothing was heard of process 1 (host1) and process 2 for 90 s" in reason
    report = watchdog.report(dog._heard, time.monotonic())
    assert "process 1 (host1): step 128" in report
    assert "process 2: never heard of" in report


def test_who_has_failed_is_said(watch):
    dog = watch(Messages([said(1, step=128, code=0), said(2, code=3, why="DivergedError: NaN")]))
    assert verdict(dog, 5) is None
    code, reason = verdict(dog, 15)
    assert code == 3
    assert "process 2 (host2) failed: DivergedError: NaN" in reason
    # Where this one ends as well, it is to tidy up.
    dog.ending(3, "DivergedError: NaN")
    assert verdict(dog, 15) is None
    assert "no process has got on" in verdict(dog, 100)[1]


def test_who_is_behind_is_said(watch):
    # At the same step, but one does not save yet.
    messages = Messages([said(1, step=64, moves=1), said(2, step=64, moves=2)])
    dog = watch(messages)
    dog.reached(64, "training")
    dog.reached(64, "saving")
    hears(dog, 0, moves=2)
    assert verdict(dog, 20) is None
    code, reason = verdict(dog, 40)
    assert code == watchdog.LOST
    assert "no process has got on for 30 s (hosts.timeout_s); behind: process 1 (host1)" in reason
    assert "process 2" not in reason
    # One of them goes on, as long as it takes: the others wait for it.
    messages.update([said(1, beat=2, signs=1, step=64, moves=1)])
    hears(dog, 1, signs=1)
    dog._heard[1] = dog._heard[1]._replace(moved=time.monotonic() + 20)
    assert verdict(dog, 40) is None
    assert verdict(dog, 60) is not None
    dog.beat()
    dog._moved += 40
    assert verdict(dog, 60) is None


def test_what_another_thread_says_changes_nothing_else(watch):
    dog = watch(Messages([said(1), said(2)]))
    beats = threading.Thread(target=lambda: [dog.beat() for _ in range(100)])
    beats.start()
    dog.ending(3, "DivergedError: NaN")
    beats.join()
    hears(dog, 0, code=3, signs=101)


def test_a_start_has_a_limit_of_its_own(watch):
    messages = Messages([said(1, moves=1), said(2, step=0, moves=2)])
    dog = watch(messages)
    dog.reached(None, "compiling")
    dog.reached(0, "training")
    hears(dog, 0, moves=2)
    # It trains, but process 1 compiles: that may take longer.
    assert verdict(dog, 40) is None
    assert "for 90 s (hosts.start_timeout_s); behind: process 1" in verdict(dog, 100)[1]
    messages.update([said(1, beat=2, step=0, moves=2)])
    hears(dog, 1, moves=2)
    # From here on the limit is the usual one.
    assert verdict(dog, 120) is None
    assert "none is behind" in verdict(dog, 140)[1]


def test_a_failure_of_jax_waits_for_those_who_live(watch):
    messages = Messages([said(1), said(2)])
    dog = watch(messages, LIMITS._replace(run_s=0.2))
    doubt = threading.Thread(target=dog.doubt, args=("JaxRuntimeError",))
    doubt.start()
    for beat in range(2, 6):
        messages.update([said(1, beat=beat)])
        wait_until(lambda beat=beat: dog._heard[1].state.beat == beat)
    # The other one is not heard of.
    doubt.join(0.3)
    assert doubt.is_alive()
    messages.update([said(2, beat=2, code=0)])
    doubt.join(5)
    assert not doubt.is_alive()


def test_the_end_is_told_at_once_and_what_was_changed_is_put_back(watch):
    handlers = []
    signal_of = ctypes.CDLL(None).signal
    signal_of.restype, signal_of.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handlers.append(signal_of(signal.SIGABRT, None))
    signal_of(signal.SIGABRT, handlers[0])
    messages = Messages([said(1), said(2)])
    dog = watch(messages)
    start = time.monotonic()
    dog.ending(0, "")
    dog.end()
    assert time.monotonic() - start < 1
    assert State(*json.loads(messages["state/0"])).code == 0
    assert not [x for x in threading.enumerate() if x.name.startswith("watchdog")]
    assert not dog.alone
    assert signal_of(signal.SIGABRT, handlers[0]) == handlers[0]


def test_one_that_fails_alone_waits_a_little_for_the_others(watch):
    dog = watch(Messages([said(1), said(2, code=0)]), LIMITS._replace(run_s=0.2))
    dog._grace = 0.1
    dog.ending(1, "ValueError: wrong")
    dog.end()
    assert dog.alone


def test_only_our_own_errors_have_a_code():
    class HttpError(Exception):
        code = 404

    assert errors.code_of(None) == 0
    assert errors.code_of(HttpError()) == 1
    assert errors.code_of(KeyboardInterrupt()) == 130
    assert errors.code_of(DriftError()) == 6


class Told:
    """Stands in for a watchdog, and fails while it doubts."""

    alone = False

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def doubt(self, why):
        self.calls.append(("doubt", why))
        raise KeyboardInterrupt


def test_what_asks_a_run_to_end_is_no_failure_of_jax():
    for error, code in ((KeyboardInterrupt(), 130), (errors.PreemptedError("asked"), 42)):
        joined = processes.Processes(0, 2)
        joined._watchdog = told = Told()
        # As it comes where JAX's store has just been asked in vain.
        error.__context__ = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        joined.end(error)
        assert [(name, *rest[:1]) for name, *rest in told.calls] == [("ending", code), ("end",)]


def test_an_impatient_signal_does_not_keep_the_end_from_the_others():
    joined = processes.Processes(0, 2)
    joined._watchdog = told = Told()
    with pytest.raises(KeyboardInterrupt):
        joined.end(jax.errors.JaxRuntimeError("INTERNAL"))
    assert [name for name, *_ in told.calls] == ["doubt", "ending", "end"]


def test_a_second_signal_ends_a_process_that_waits_in_c():
    command = """
import ctypes, signal, threading
from podracer.signals import StopSignals, ending_at
lock, libc = (ctypes.c_char * 64)(), ctypes.CDLL(None)
before = signal.set_wakeup_fd(-1)
with ending_at(2, lambda number: 128 + number):
    pass
assert signal.set_wakeup_fd(-1) == before
assert threading.active_count() == 1
with ending_at(2, lambda number: 128 + number), StopSignals():
    print("waits", flush=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""
    with subprocess.Popen(
        [sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            # Until it does.
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == cli.INTERRUPTED
        finally:
            process.kill()


def slurm(monkeypatch, tasks: int) -> None:
    """Variables of a job, on the first of its nodes."""
    for name, value in [
        ("JOB_ID", "1"),
        ("STEP_NODELIST", "127.0.0.1"),
        ("NTASKS", str(tasks)),
        ("PROCID", "0"),
        ("LOCALID", "0"),
    ]:
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_a_cluster_is_joined_if_it_is_one(monkeypatch):
    slurm(monkeypatch, 1)
    processes.join(processes.Address(), processes.HostsConfig())
    assert not jax.distributed.is_initialized()
    slurm(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"must be called before .* --num_processes=1 runs this"):
        processes.join(processes.Address(), processes.HostsConfig())
    monkeypatch.setenv("SLURM_NTASKS", "many")
    with pytest.raises(ConfigError, match="can't be joined: invalid literal"):
        processes.join(processes.Address(), processes.HostsConfig())


def test_devices_must_be_those_of_the_processes():
    processes.Processes().check_devices()
    with pytest.raises(ConfigError, match="JAX runs in 1 processes, and this run in 2"):
        processes.Processes(1, 2).check_devices()


def test_hosts_must_be_alike(monkeypatch):
    # Eight devices and seven: as many learners, but other actors.
    devices = [SimpleNamespace(platform="cpu", process_index=int(i > 7)) for i in range(15)]
    monkeypatch.setattr(mesh, "start", lambda *_, **__: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = make_config(env="dummy:counting", sebulba__learners_per_actor=3)
    with pytest.raises(ConfigError, match=r"all hosts .* got 1 \+ 6 and 2 \+ 6"):
        importlib.import_module("podracer.sebulba.train").prepare(config)


def test_the_default_number_of_devices_counts_all_hosts(monkeypatch):
    monkeypatch.setattr(config_lib, "cpu_cores", lambda: 2)
    config = make_config(num_envs=8, unroll_length=256, num_minibatches=2)
    assert config_lib.auto_cpu_devices(config) == 2
    assert config_lib.auto_cpu_devices(config, 4) == 1


def test_an_address_is_read_from_the_environment():
    environment = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4"}
    address = processes.Address(num_processes=2, process_id=1)
    assert processes.from_environment(address, environment) == ("a:1", 2, 1)
    assert processes.from_environment(processes.Address(), environment) == ("a:1", 4, None)
    for wrong in ("host0", "1234", ":1234"):
        with pytest.raises(ConfigError, match=f"coordinator='{wrong}' must be HOST:PORT"):
            processes.from_environment(processes.Address(wrong), {})
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID='x' must be a number"):
        processes.from_environment(address._replace(process_id=None), {"JAX_PROCESS_ID": "x"})


def test_no_cluster_is_one_process_at_once():
    command = """
import time, jax
from podracer import processes
start = time.monotonic()
with processes.joined(processes.Address(), processes.HostsConfig()) as joined:
    assert (joined.index, joined.count, joined.from_first(lambda: 7)) == (0, 1, 7)
    assert joined.from_all(8) == [8]
assert time.monotonic() - start < 1
assert not jax.distributed.is_initialized()
try:
    processes.join(processes.Address("localhost:1"), processes.HostsConfig())
except processes.ConfigError as error:
    assert "Number of processes must be defined" in str(error), error
    assert "all three are needed" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True, timeout=120)


def drifted(copies: int, wrong: list[int]) -> jax.Array:
    """Replicated zeros, but for some devices' copies."""
    devices = jax.devices()[:copies]
    parts = [
        jax.device_put(np.float32([0, 0, 1e-7 if i in wrong else 0]), d)
        for i, d in enumerate(devices)
    ]
    sharding = jax.sharding.NamedSharding(mesh.make_mesh(devices), mesh.REPLICATED)
    return jax.make_array_from_single_device_arrays((3,), sharding, parts)


def test_a_replica_that_drifts_is_named():
    check = drift.make_check(mesh.make_mesh(jax.devices()[:8]))
    check({"w": drifted(8, []), "v": drifted(8, [])}, 7)
    with pytest.raises(DriftError, match=r"update 7 .*: cpu:3 of process 0 differ from 7 of 8"):
        check({"w": drifted(8, []), "v": drifted(8, [3])}, 7)
    with pytest.raises(DriftError, match="nobody can tell"):
        drift.make_check(mesh.make_mesh(jax.devices()[:2]))({"w": drifted(2, [1])}, 7)


def test_drift_stops_a_run(tmp_path, monkeypatch):
    restore = Session.restore

    def drifting(session, state, clock):
        state, progress = restore(session, state, clock)

        def spoil(x):
            parts = [s.data + (1.0 if s.device.id == 2 else 0.0) for s in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

        weights = jax.tree.map(spoil, state.train.weights)
        return state.replace(train=state.train.replace(weights=weights)), progress

    monkeypatch.setattr(Session, "restore", drifting)
    config = make_config(cpu_devices=4, total_steps=64 * 20, hosts__drift_every=3, num_envs=8)
    with pytest.raises(DriftError, match=r"update 3 .*: cpu:2 of process 0 differ from 3 of 4"):
        anakin.train(config, quiet=True)
