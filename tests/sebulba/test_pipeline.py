"""What Sebulba's threads exchange, each piece on its own."""

import jax
import numpy as np
import pytest

from podracer.errors import ActorError
from podracer.sebulba.actor import Schedule
from podracer.sebulba.pipeline import ParameterServer
from podracer.sebulba.program import interleave
from podracer.types import TimeStep, Trajectory
from tests.sebulba.runs import make_supervisor


def test_an_unroll_acts_with_the_weights_that_its_lag_specifies():
    """A run that is resumed after update 3."""
    versions = {lag: [Schedule(3, 9, 8, lag).version(n) for n in (3, 4, 5)] for lag in (0, 1, None)}
    assert versions == {0: [3, 4, 5], 1: [3, 3, 4], None: [None] * 3}


def test_a_failure_in_a_thread_is_raised_with_its_name():
    def fail():
        raise ZeroDivisionError("a mistake of ours")

    with (
        pytest.raises(ActorError, match=r"^thread 'worker' failed: .*a mistake of ours"),
        make_supervisor() as supervisor,
    ):
        supervisor.start("worker", fail)


def test_the_parameter_server_returns_the_requested_version():
    device = jax.devices()[0]
    server = ParameterServer(make_supervisor(), keep=2)
    for version in range(3):
        server.publish(version, {device: f"weights {version}"})
    assert server.get(device, 1) == (1, "weights 1")
    assert server.get(device, None) == (2, "weights 2")


def test_environments_of_all_threads_are_in_the_order_of_their_numbers():
    """Of two threads, the first has the environments 0, 2 and 4."""

    def of_thread(k: int) -> Trajectory:
        numbers = np.arange(k, 6, 2)
        steps = 10 * np.arange(5)[:, None] + numbers
        timestep = TimeStep(steps, steps, steps, steps)
        return Trajectory(timestep, steps[1:], (), carry=numbers, env_id=numbers)

    joined = interleave([of_thread(0), of_thread(1)])
    np.testing.assert_array_equal(joined.carry, np.arange(6))
    np.testing.assert_array_equal(joined.timestep.reward, 10 * np.arange(5)[:, None] + np.arange(6))
