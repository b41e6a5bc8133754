"""The watchdog of process 0 of three: when it ends the process, and which process it names."""

import ctypes
import json
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from podracer.distributed import watchdog
from podracer.distributed.watchdog import Limits, ProcessState, Store, Watchdog
from podracer.errors import ExitCode

LIMITS = Limits(start_s=90.0, run_s=30.0)


def make_watchdog(states: dict[str, str], index: int = 0, limits: Limits = LIMITS) -> Watchdog:
    """A watchdog of three processes, whose states are in ``states`` by their keys."""
    store = Store(states.__setitem__, lambda prefix: dict(states))
    # Nothing listens at this address.
    return Watchdog(store, index, 3, limits, ("127.0.0.1", 1))


def published(index: int, heartbeats: int = 1, **values) -> dict[str, str]:
    """The state of a process in the store."""
    state = ProcessState(f"host{index}", heartbeats, **values)
    return {f"state/{index}": json.dumps(state)}


# ---- Decisions, without threads, by a clock that tests set.


class Group:
    """Three processes, the first of which has the watchdog."""

    def __init__(self, index: int = 0):
        self.now = 1000.0
        self.states: dict[int, ProcessState] = {}
        self.index = index
        self.exits: list[tuple[int, str]] = []

    def start(self) -> None:
        self.dog: Any = make_watchdog({}, self.index)
        self.dog._exit_process = lambda *problem: self.exits.append(problem)

    def send(self, *indices: int, **values) -> None:
        """Processes send a heartbeat, with changes of their states."""
        for index in indices:
            state = self.states.get(index, ProcessState(f"host{index}"))
            heartbeats = state.heartbeats + 1
            if index == self.index:
                state = self.dog._own._replace(progress=self.dog._progress)
            self.states[index] = state._replace(heartbeats=heartbeats, **values)
        found = {f"state/{i}": json.dumps(state) for i, state in self.states.items()}
        self.dog._take(found, self.now)

    def problem_after(self, seconds: float, *alive: int):
        """The problem found after these seconds, in which some processes sent heartbeats."""
        self.now += seconds
        self.send(*alive)
        return self.dog._find_problem(self.now)


@pytest.fixture
def group(monkeypatch):
    group = Group()
    clock = SimpleNamespace(monotonic=lambda: group.now, sleep=time.sleep)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(Watchdog, "_exchange_states", lambda self: None)
    monkeypatch.setattr(Watchdog, "_check_states", lambda self: None)
    group.start()
    yield group
    group.dog._restore_abort()


def test_silent_processes_are_named(group):
    group.send(0, 1, step=128)
    group.dog.begin(128, "training")
    assert group.problem_after(20, 0) is None
    # Process 2 was never heard from: it may still be starting.
    code, reason = group.problem_after(20, 0)
    assert code == ExitCode.STALLED
    assert reason == "nothing was heard from process 1 (host1) for 30 s (hosts.timeout_s)"
    _, reason = group.problem_after(60, 0)
    assert "nothing was heard from process 1 (host1) and process 2 for 90 s" in reason
    text = watchdog.describe_processes(group.dog._seen, group.now)
    assert "process 1 (host1): step 128, starting; last heard from 100 s ago" in text
    assert "process 2: never heard from" in text


def test_a_coordinator_that_does_not_answer_is_named(group):
    group.send(0, 1, 2, step=128)
    group.now += 40
    code, reason = group.dog._find_problem(group.now)
    assert code == ExitCode.STALLED
    assert "the coordinator, has not answered for 30 s (hosts.timeout_s)" in reason


def test_a_process_that_has_failed_is_named(group):
    group.send(1, step=128, exit_code=0)
    group.send(2, exit_code=3, error="DivergedError: NaN")
    assert group.problem_after(5, 0) is None
    code, reason = group.problem_after(10, 0)
    assert code == ExitCode.DIVERGED
    assert reason == "process 2 (host2) failed: DivergedError: NaN"
    # A process that is already ending may finish.
    group.dog.announce_end(3, "DivergedError: NaN")
    assert group.problem_after(0, 0) is None
    assert "no process has made progress" in group.problem_after(85, 0)[1]


def test_the_process_that_is_behind_is_named(group):
    # At the same step, but process 1 does not save yet.
    group.send(1, step=64, stages=1)
    group.send(2, step=64, stages=2)
    group.dog.begin(64, "training")
    group.dog.begin(64, "saving")
    group.send(0)
    assert group.problem_after(20, 0, 1, 2) is None
    code, reason = group.problem_after(20, 0, 1, 2)
    assert code == ExitCode.STALLED
    assert reason == (
        "no process has made progress for 30 s (hosts.timeout_s); behind: process 1 (host1); set "
        "hosts.timeout_s higher if a single call, evaluation or checkpoint takes longer"
    )
    # As long as one of them makes progress, the others may be waiting for it.
    group.send(1, progress=1)
    assert group.problem_after(30, 0, 1, 2) is None
    assert group.problem_after(10, 0, 1, 2) is not None
    group.dog.show_progress()
    assert group.problem_after(30, 0, 1, 2) is None


def test_the_start_has_a_limit_of_its_own(group):
    group.dog.begin(None, "compiling")
    group.dog.begin(0, "training")
    group.send(0)
    group.send(1, stages=1)
    group.send(2, step=0, stages=2)
    # It trains, but process 1 compiles: that may take longer.
    assert group.problem_after(40, 0, 1, 2) is None
    _, reason = group.problem_after(60, 0, 1, 2)
    assert "for 90 s (hosts.start_timeout_s); behind: process 1 (host1); set " in reason
    assert "hosts.start_timeout_s higher if a single compilation takes longer" in reason
    # From the first step of all processes on, it is the usual one.
    group.send(1, step=0, stages=2)
    assert group.problem_after(20, 0, 1, 2) is None
    _, reason = group.problem_after(20, 0, 1, 2)
    assert "for 30 s (hosts.timeout_s); none is behind the others" in reason


def test_an_abort_names_its_cause(group):
    group.index = group.dog._index = 1
    group.send(0, 2)
    group.dog._aborted()
    group.send(0, exit_code=3, error="DivergedError: NaN")
    group.dog._aborted()
    assert group.exits[0] == (ExitCode.STALLED, "process 0 (host0), the coordinator, is gone")
    assert (ExitCode.DIVERGED, "process 0 (host0) failed: DivergedError: NaN") in group.exits


@pytest.mark.parametrize(("open_s", "words"), [(0.3, "the coordinator, is gone"), (5.0, "aborts")])
def test_a_coordinator_that_is_being_killed_is_gone(group, open_s, words):
    group.index = group.dog._index = 1
    group.send(0, 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        group.dog._coordinator = server.getsockname()
        # Its listening socket is closed a little later than its connections.
        closing = threading.Timer(open_s, server.close)
        closing.start()
        group.dog._aborted()
        closing.cancel()
    assert words in group.exits[0][1]


# ---- Its threads.


@pytest.fixture
def watch(monkeypatch):
    """Starts watchdogs that never end this process."""
    started = []

    def start(states: dict[str, str], limits: Limits = LIMITS) -> Watchdog:
        dog = make_watchdog(states, limits=limits)
        monkeypatch.setattr(dog, "_exit_process", lambda *_: None)
        started.append(dog)
        wait_until(lambda: dog._seen[0].state.heartbeats > 0)
        return dog

    yield start
    for dog in started:
        # Success waits for no other process.
        dog.announce_end(ExitCode.OK, "")
        dog.close()
        dog._restore_abort()


def wait_until(true) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_progress_that_another_thread_shows_changes_nothing_else(watch):
    dog = watch(published(1) | published(2))
    worker = threading.Thread(target=lambda: [dog.show_progress() for _ in range(100)])
    worker.start()
    dog.announce_end(3, "DivergedError: NaN")
    worker.join()
    dog._wake.set()
    wait_until(lambda: dog._seen[0].state.progress == 101)
    assert dog._seen[0].state.exit_code == 3


def test_a_failure_of_jax_waits_for_heartbeats_of_the_others(watch):
    states = published(1) | published(2)
    dog = watch(states, LIMITS._replace(run_s=0.2))
    waiting = threading.Thread(target=dog.wait_until_others_are_alive, args=("JaxRuntimeError",))
    waiting.start()
    for heartbeats in range(2, 6):
        states |= published(1, heartbeats)
        wait_until(lambda n=heartbeats: dog._seen[1].state.heartbeats == n)
    # Nothing new is heard from process 2.
    waiting.join(0.3)
    assert waiting.is_alive()
    states |= published(2, 2, exit_code=0)
    waiting.join(60)
    assert not waiting.is_alive()


def abort_handler() -> int | None:
    """The address of this process's handler of SIGABRT."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = set_handler(signal.SIGABRT, None)
    set_handler(signal.SIGABRT, handler)
    return handler


def test_the_end_is_published_at_once_and_everything_restored(watch):
    before = abort_handler()
    states = published(1) | published(2)
    dog = watch(states)
    assert abort_handler() != before
    # The threads wait for an hour from the second time on.
    dog._interval = 3600.0
    dog._wake.set()
    wait_until(lambda: dog._seen[0].state.heartbeats > 1)
    dog.announce_end(ExitCode.OK, "")
    dog.close()
    assert ProcessState(*json.loads(states["state/0"])).exit_code == ExitCode.OK
    assert not [x for x in threading.enumerate() if x.name.startswith("watchdog")]
    assert not dog.failed_alone
    assert abort_handler() == before


def test_a_process_that_fails_alone_waits_a_little_for_the_others(watch):
    dog = watch(published(1) | published(2, exit_code=0), LIMITS._replace(run_s=0.2))
    dog._grace = 0.1
    dog.announce_end(1, "ValueError: wrong")
    dog.close()
    assert dog.failed_alone
