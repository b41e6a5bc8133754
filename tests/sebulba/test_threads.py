"""Threads are watched by limits that fit what they do, and none waits forever."""

import threading

import pytest

from podracer.errors import ActorError
from podracer.sebulba.pipeline import ParameterServer, TrajectoryQueue
from podracer.sebulba.threads import HangLimits, Stopped, Supervisor, WorkerThread
from tests.sebulba.runs import FakeClock, make_supervisor


def test_work_on_devices_is_limited_by_the_longest_update():
    limits = HangLimits(120.0, 1800.0)
    assert limits.on_host()[::2] == (120.0, "sebulba.timeout_s")
    assert limits.on_device()[::2] == (1800.0, "sebulba.first_update_timeout_s")
    limits.add_update(2.0)
    assert limits.on_device() == limits.on_host()
    limits.add_update(133.0)
    limits.add_update(90.0)
    seconds, reason, setting = limits.on_device()
    assert (seconds, setting) == (1330.0, "sebulba.timeout_s")
    assert reason == ", 10 times the longest update so far"
    assert limits.on_host().seconds == 120.0
    # The first update has the longer one of both limits.
    assert HangLimits(3600.0, 1800.0).on_device().seconds == 3600.0


def test_among_processes_the_watchdog_limits_work_on_devices():
    limits = HangLimits(120.0, 1800.0, shared=True)
    limits.add_update(1.0)
    assert limits.on_device().seconds == float("inf")
    assert limits.on_host().seconds == 120.0


@pytest.mark.parametrize("on_device", [False, True])
def test_an_activity_hangs_once_its_limit_is_over(on_device):
    now, started, ended = FakeClock(), threading.Event(), threading.Event()

    def body():
        supervisor.beat("working", on_device=on_device)
        started.set()
        ended.wait()

    with Supervisor(HangLimits(120.0, 1800.0), print, now) as supervisor:
        supervisor.start("some thread", body)
        started.wait()
        limit = 1800 if on_device else 120
        now.seconds = limit
        supervisor.check()
        now.seconds = limit + 1
        with pytest.raises(ActorError) as info:
            supervisor.check()
        ended.set()
    setting = "first_update_timeout_s" if on_device else "timeout_s"
    reason = ", and no update has finished yet" if on_device else ""
    message, stack = str(info.value).split("\n", 1)
    assert message == (
        f"thread 'some thread' hangs: working has taken more than {limit} seconds{reason}; "
        f"if it is only slow, set sebulba.{setting} higher"
    )
    assert "ended.wait()" in stack


def test_a_wait_for_another_thread_does_not_count_as_a_hang():
    now = FakeClock()
    with Supervisor(HangLimits(120.0, 1800.0), print, now) as supervisor:
        worker = WorkerThread(supervisor, "worker")
        assert worker.call("adding", lambda: 1 + 1) == 2
        now.seconds = 1e6
        assert worker.call("adding", lambda: 2 + 2) == 4


@pytest.mark.parametrize("wait", ["put", "get"])
def test_waits_end_when_the_run_does(wait):
    waiting, ended = threading.Event(), []

    def body():
        try:
            if wait == "put":
                queue.put(None)  # type: ignore[arg-type]
            waiting.set()
            if wait == "put":
                queue.put(None)  # type: ignore[arg-type]
            else:
                parameters.get(None, 3)  # type: ignore[arg-type]
        except Stopped:
            ended.append(wait)
            raise

    with make_supervisor() as supervisor:
        queue, parameters = TrajectoryQueue(supervisor), ParameterServer(supervisor, keep=1)
        supervisor.start("waiter", body)
        waiting.wait()
        supervisor.check()
    assert ended == [wait]
