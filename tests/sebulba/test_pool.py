"""A pool that fails is rebuilt, which is reported and limited."""

import dataclasses
import gc
import io
import sys

import numpy as np
import pytest

from podracer.agents import returns
from podracer.config import SebulbaConfig
from podracer.envs import dummy
from podracer.sebulba.pool import RestartingPool
from podracer.sebulba.threads import Stopped
from tests.sebulba import faulty
from tests.sebulba.runs import SOLO, FakeClock, act, join_parts, make_supervisor, sebulba_config


class FailingPool(dummy.CountingPool):
    """A pool of which each step raises the next one of ``errors``, if that is not None."""

    errors: list[Exception | None]

    def step(self, action):
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return super().step(action)


def make_pool(errors, supervisor, kind=FailingPool, **options):
    pool = kind([0, 1])
    pool.errors = errors
    env = faulty.make_environment(lambda seeds: pool)
    settings = dataclasses.replace(SebulbaConfig(), **options)
    restarting = RestartingPool(env, lambda restarts: pool, 2, settings, supervisor)
    restarting.reset()
    return restarting


def test_each_cause_of_a_restart_is_reported_once():
    warnings = []
    with make_supervisor(warn=warnings.append) as supervisor:
        errors = [OSError(f"crashed at {n}.5, 0x{n:x}") for n in range(3)]
        pools = [make_pool([*errors, ValueError("bad action"), None], supervisor) for _ in range(2)]
        for pool in pools:
            for _ in range(5):
                pool.step(np.zeros(2))
    assert [pool.restarts for pool in pools] == [4, 4]
    first, second = warnings
    assert "rebuilds its pool, at most 10 times (sebulba.max_restarts)" in first
    # With where it was raised.
    assert "in step\n" in first
    assert first.endswith("OSError: crashed at 0.5, 0x0")
    assert second.endswith("ValueError: bad action")


def test_restarts_are_counted_over_a_period():
    now = FakeClock()
    with make_supervisor(now=now) as supervisor:
        options = {"max_restarts": 2, "restart_window_s": 100.0}
        pool = make_pool([OSError("crashed")] * 20, supervisor, **options)
        for _ in range(10):
            pool.step(np.zeros(2))
            now.seconds += 50
        assert pool.restarts == 10
        now.seconds -= 1
        with pytest.raises(OSError, match="crashed") as info:
            pool.step(np.zeros(2))
    (note,) = info.value.__notes__
    assert note == (
        "(the pool had already been rebuilt 2 times (sebulba.max_restarts) in 100 seconds "
        "(sebulba.restart_window_s))"
    )


def test_a_half_sent_message_is_freed_without_a_word(monkeypatch):
    """Python prints an error if its garbage collector finds such a buffer in a cycle."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: printed.append(error.exc_value))

    class SendingPool(FailingPool):
        def step(self, action):
            message = io.BytesIO(b"actions").getbuffer()
            raise OSError(f"broken pipe after {message.nbytes} bytes")

    with make_supervisor() as supervisor:
        pool = make_pool([], supervisor, SendingPool, max_restarts=0)
        with pytest.raises(OSError, match="broken pipe after 7 bytes") as info:
            pool.step(np.zeros(2))
        del info
        gc.collect()
    assert not printed


def test_a_pool_is_not_rebuilt_when_the_run_stops():
    warnings = []
    supervisor = make_supervisor(warn=warnings.append)

    class LastPool(FailingPool):
        def step(self, action):
            supervisor.close()
            return super().step(action)

    pool = make_pool([OSError("crashed")], supervisor, LastPool)
    with pytest.raises(Stopped):
        pool.step(np.zeros(2))
    # Only the crash is reported.
    assert len(warnings) == 1
    assert pool.restarts == 1


def test_transitions_that_a_restart_loses_are_cut_as_those_of_an_autoreset():
    env = faulty.make_environment(
        lambda seeds: faulty.BrokenPool(dummy.CountingPool(seeds, length=50), 5, "raise")
    )
    _, _, (output,) = act(sebulba_config(num_envs=4, unroll_length=16, **SOLO), 1, env)
    timestep = join_parts(output).timestep
    # The fifth step of each pool fails.
    assert output.restarts == 3
    assert output.episodes.episodes == 0
    valid = returns.valid(timestep)
    np.testing.assert_array_equal(valid, np.tile(np.arange(1, 17)[:, None] % 5 != 0, (1, 4)))
    assert timestep.first[5::5].all()
    assert (timestep.discount == 1).all()
    np.testing.assert_array_equal(timestep.observation[:, 0, 0], np.arange(17) % 5)


def test_a_restart_abandons_the_running_games():
    """A pool that fails in its third step then plays a game of seven steps and a reset."""

    class FailsOnce(faulty.EchoPool):
        def __init__(self, restarts: int):
            super().__init__([0])
            self._steps_left = np.inf if restarts else 2

        def step(self, action: np.ndarray):
            self._steps_left -= 1
            if self._steps_left < 0:
                raise OSError("the simulator has crashed")
            return super().step(action)

    env = faulty.make_environment(faulty.EchoPool)
    pool = RestartingPool(env, FailsOnce, 1, SebulbaConfig(), make_supervisor())
    pool.reset()
    for _ in range(3 + 8):
        pool.step(np.zeros(1))
    finished = pool.take_finished()
    assert (pool.restarts, finished.episodes, finished.length) == (1, 1, 7)
