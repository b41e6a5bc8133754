"""A worker's pools report failures and hangs."""

import queue
import threading
import time

import numpy as np
import pytest

from podracer.remote.pools import Ended, PoolThread, Stepped
from podracer.remote.wire import WireError


class FaultyPool:
    """Returns the actions that it gets, with a fault of this kind."""

    def __init__(self, fault):
        self.fault, self.go_on = fault, threading.Event()

    def reset(self):
        return np.zeros(2)

    def step(self, action):
        if self.fault == "exit":
            raise SystemExit
        if self.fault == "hang":
            self.go_on.wait()
        if self.fault in ("step", "step and close"):
            raise OSError("broken pipe")
        return action

    def close(self):
        if self.fault == "step and close":
            raise OSError("closed before")


def start(fault):
    pool, outbox = FaultyPool(fault), queue.SimpleQueue()

    def check(step):
        if not np.isfinite(step).all():
            raise WireError("NaN")

    thread = PoolThread(np.array([3, 4]), lambda: pool, check, outbox)
    assert isinstance(outbox.get(timeout=10), Stepped)
    return pool, thread, outbox


def act(thread, value=1.0):
    thread.act(np.array([1]), np.array([value]))
    thread.act(np.array([0]), np.array([value]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "told"),
    [("step", "broken pipe"), ("step and close", "broken pipe"), ("exit", "SystemExit")],
)
def test_a_failure_is_told_whatever_closing_does(fault, told):
    _, thread, outbox = start(fault)
    act(thread)
    ended = outbox.get(timeout=10)
    assert isinstance(ended, Ended)
    assert told in ended.failure
    assert thread.join(10)


def test_what_can_not_be_sent_is_a_failure_of_the_pool():
    _, thread, outbox = start("")
    act(thread)
    stepped = outbox.get(timeout=10)
    np.testing.assert_array_equal(stepped.envs, [3, 4])
    np.testing.assert_array_equal(stepped.step, [1, 1])
    act(thread, np.nan)
    assert "NaN" in outbox.get(timeout=10).failure


def test_a_step_that_hangs_is_noticed_and_not_waited_for():
    pool, thread, outbox = start("hang")
    assert not thread.hangs(0.0)
    act(thread)
    deadline = time.monotonic() + 10
    while not thread.hangs(0.01):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not thread.hangs(60.0)
    thread.close()
    assert not thread.join(0.01)
    pool.go_on.set()
    assert thread.join(10)
    assert outbox.get(timeout=10).step is not None
