"""Runs that average through a folder, at any speed and after any preemption."""

import errno
import io
import os
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
import tenacity

from podracer import anakin
from podracer.config.sizes import make_sizes
from podracer.errors import ConfigError, ExitCode, SaveError
from podracer.storage import retry
from podracer.training.exchange import Exchange
from podracer.training.rows import CallMetrics
from podracer.types import TrainState, Weights
from tests.helpers import make_config
from tests.sebulba.runs import sebulba_config, train
from tests.training.resuming import rows_of


class State:
    """A run's state, as far as the exchange knows it."""

    def __init__(self, train):
        self.train = train

    def replace(self, train):
        return State(train)


def state_of(x: float, size: int = 2) -> State:
    full = np.full(size, x, np.float32)
    train = TrainState(Weights({"w": full}, {"mean": np.float32(x)}), {"w": full}, (), np.int32(0))
    return State(jax.device_put(train))


def numbers(state: State) -> list[float]:
    train = jax.device_get(state.train)
    return [float(x.mean()) for x in jax.tree.leaves((train.weights, train.target))]


class Run:
    """A run each of whose calls adds the same to its weights."""

    def __init__(self, folder, seed: int, first: float, step: float, update: int = 0, **changes):
        settings = {"averaging__folder": str(folder), "seed": seed, **changes}
        exchange = Exchange(make_config(**settings), 1)
        self.state = exchange.join(state_of(first), update)
        self._step = exchange.wrap(lambda state: (state_of(numbers(state)[0] + step), metrics))
        nothing: Any = ()
        metrics = CallMetrics(nothing, nothing)

    def call(self) -> dict[str, float]:
        with jax.transfer_guard("disallow"):
            self.state, metrics = self._step(self.state)
        return metrics.averages


def test_runs_go_on_from_the_average_of_what_all_have_written_last(tmp_path):
    a, b = Run(tmp_path, 0, 5.0, 1.0), Run(tmp_path, 1, 7.0, 3.0)
    # Both begin with the weights of the one that came first.
    assert numbers(a.state) == numbers(b.state) == [5.0] * 3
    assert a.call()["averaging/runs"] == 1
    assert numbers(a.state) == [6.0] * 3
    found = b.call()
    assert found["averaging/runs"] == 2
    np.testing.assert_allclose(found["averaging/apart"], np.sqrt(2), rtol=1e-5)
    assert numbers(b.state) == [7.0] * 3
    a.call()
    assert numbers(a.state) == [(7 + 8) / 2] * 3
    # A faster one does not wait.
    a.call()
    assert numbers(a.state) == [(8.5 + 8) / 2] * 3


def test_one_that_has_stopped_counts_no_more_and_rejoins_from_the_others(tmp_path):
    a, b = Run(tmp_path, 0, 0.0, 1.0), Run(tmp_path, 1, 0.0, 5.0)
    b.call()
    long_ago = time.time() - 601
    os.utime(tmp_path / "seed_1.npz", (long_ago, long_ago))
    assert a.call()["averaging/runs"] == 1
    assert numbers(a.state) == [1.0] * 3
    again = Run(tmp_path, 1, 99.0, 5.0, update=7)
    assert numbers(again.state) == [1.0] * 3
    assert again.call()["averaging/runs"] == 2
    # One that is alone goes on from its checkpoint.
    os.utime(tmp_path / "seed_1.npz", (long_ago, long_ago))
    os.utime(tmp_path / "seed_0.npz", (long_ago, long_ago))
    assert numbers(Run(tmp_path, 1, 99.0, 5.0, update=9).state) == [99.0] * 3


def test_outer_momentum_and_what_has_diverged(tmp_path):
    outer = {"averaging__outer_rate": 0.5, "averaging__outer_momentum": 0.5}
    a = Run(tmp_path, 0, 0.0, 1.0, **outer)
    velocity, x = 0.0, 0.0
    for _ in range(2):
        velocity = 0.5 * velocity - 1
        x -= 0.5 * (-1 + 0.5 * velocity)
        a.call()
        assert numbers(a.state)[0] == pytest.approx(x)
    Run(tmp_path, 1, 0.0, np.nan).call()
    assert not (tmp_path / "seed_1.npz").exists()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    Run(tmp_path, 0, 2.0, 1.0).call()
    load, failures = np.load, [OSError(errno.ESTALE, "Stale file handle")]

    def stale(path):
        if failures:
            raise failures.pop()
        return load(path)

    monkeypatch.setattr(retry, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(np, "load", stale)
    assert numbers(Run(tmp_path, 1, 0.0, 1.0).state) == [3.0] * 3
    assert not failures


def test_what_is_no_run_like_this_one_is_rejected(tmp_path):
    Run(tmp_path, 0, 0.0, 1.0).call()
    exchange = Exchange(make_config(averaging__folder=str(tmp_path), seed=1), 1)
    with pytest.raises(ConfigError, match=r"seed_0.npz holds the weights of another network"):
        exchange.join(state_of(0.0, size=3), 0)
    array, other = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(3))
    np.savez(other, weights=np.zeros(3))
    for content in (b"other", b"", array.getvalue(), other.getvalue()):
        (tmp_path / "seed_0.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"seed_0.npz holds no weights"):
            exchange.join(state_of(0.0), 0)
    for folder, count, message in (("gs://b/x", 1, "must be a folder"), ("x", 2, "has 2")):
        with pytest.raises(ConfigError, match=message):
            Exchange(make_config(averaging__folder=folder), count)
    whole = make_config(averaging__folder="x", averaging__every=7, updates_per_call=3)
    assert make_sizes(whole, 1).updates_per_call == 7


def test_two_runs_with_the_same_seed_are_noticed(tmp_path):
    a, b = Run(tmp_path, 0, 0.0, 1.0), Run(tmp_path, 0, 0.0, 1.0)
    a.call()
    b.call()
    with pytest.raises(ConfigError, match="another run with seed=0"):
        a.call()
    b.call()


def test_a_file_system_without_hard_links_is_named(tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(SaveError, match="hard links"):
        Run(tmp_path, 0, 0.0, 1.0)


@pytest.mark.slow
def test_runs_of_both_architectures_average(tmp_path, monkeypatch):
    shared = {"averaging__folder": str(tmp_path), "averaging__every": 2, "total_steps": 8 * 8 * 4}
    with monkeypatch.context() as patch:
        # As one that is still training.
        patch.setattr(Exchange, "leave", lambda self: None)
        first = anakin.train(make_config(env="dummy:counting", **shared), quiet=True)
    assert first.metrics[-1]["averaging/runs"] == 1
    devices = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": (1,)}
    changes = {"learning_rate": 1e-30, "seed": 1, "sebulba__threads": 1, **devices}
    second = train(sebulba_config(**shared, **changes))
    assert second.metrics[-1]["averaging/runs"] == 2
    # It has begun with the average of the others, and learns nothing itself.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        *jax.device_get((first.weights.params, second.weights.params)),
    )
    # What has finished counts no more.
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["first.npz", "seed_0.npz"]


def start_group(folder, number: int) -> subprocess.Popen:
    """A run of Sebulba without an end, which averages after every second update."""
    command = [
        sys.executable, "-m", "podracer.sebulba", "--config=cartpole", "--quiet",
        "--config.env=envpool:CartPole-v1", f"--config.seed={number}",
        f"--workdir={folder / str(number)}", f"--config.averaging.folder={folder / 'shared'}",
        "--config.averaging.every=2", "--config.averaging.timeout_s=4",
        "--config.total_steps=100_000_000", "--config.cpu_devices=1",
        "--config.evaluation.every=0", "--config.checkpoint.every=4",
    ]  # fmt: skip
    return subprocess.Popen(command)


def wait_for_average(folder, number: int, runs: int) -> None:
    """Waits for a new row of a run whose average was over this number of runs."""
    workdir = folder / str(number)
    before = len(rows_of(workdir))
    while all(row["averaging/runs"] != runs for row in rows_of(workdir)[before:]):
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_of_sebulba_that_is_killed_rejoins(tmp_path):
    """While it is away, the other one trains alone; then both average again."""
    processes = [start_group(tmp_path, number) for number in (0, 1)]
    try:
        for number in (0, 1):
            wait_for_average(tmp_path, number, 2)
        processes[1].kill()
        processes[1].wait()
        wait_for_average(tmp_path, 0, 1)
        processes[1] = start_group(tmp_path, 1)
        for number in (1, 0):
            wait_for_average(tmp_path, number, 2)
    finally:
        for each in processes:
            each.terminate()
        codes = [each.wait(60) for each in processes]
    assert codes == [ExitCode.PREEMPTED] * 2
