"""Real processes learn together what one process learns alone, and fail together."""

import contextlib
import json

import jax
import numpy as np
import pytest

from podracer import anakin, sebulba
from podracer.errors import ExitCode
from podracer.training import command_line
from tests.distributed.jobs import (
    SHUFFLED,
    Job,
    check_same_learning,
    flags,
    free_port,
    last_arrays,
    start,
)


@pytest.fixture(autouse=True)
def eight_devices():
    """JAX runs before a test asks for fewer devices."""
    assert len(jax.devices()) == 8


def test_two_processes_agree_train_and_fail_together(tmp_path):
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        pair = [
            start("-m", "tests.distributed.pair", str(index), port, str(tmp_path))
            for index in range(2)
        ]
        for process in pair:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        argv = ["anakin", *flags("anakin", tmp_path / "one", **SHUFFLED, cpu_devices=4), "--quiet"]
        assert command_line.main(anakin.train, argv) == ExitCode.OK
        ended = [process.communicate(timeout=240) for process in pair]
    assert all("trained" in out for out, _ in ended), ended
    check_same_learning(tmp_path / "one", tmp_path / "two")
    # Only process 0 has written.
    assert len(list((tmp_path / "two" / "tensorboard").glob("events*"))) == 1
    # The last save of the pair fails in process 1.
    assert [process.returncode for process in pair] == [ExitCode.NOT_SAVED] * 2, ended
    why = "process 1 could not write a checkpoint: No space left on device"
    assert f"failed: SaveError: {why}" in ended[0][1]
    assert f"error: {why}" in ended[1][1]


OWN = {
    "r2d2": {"network.core": "lstm", "r2d2.burn_in": 4, "r2d2.trace": 8},
    "d4pg": {"env": "dummy:counting", "env_kwargs.continuous": True},
}


# A Sebulba host has one actor and one learner.
SLOW = [
    ("anakin", "dqn", 2, 4),
    ("anakin", "r2d2", 2, 4),
    ("anakin", "vtrace", 4, 8),
    ("sebulba", "d4pg", 2, 2),
    ("sebulba", "ppo", 2, 2),
    ("sebulba", "vtrace", 4, 4),
]
WEEKLY = [
    ("anakin", "d4pg", 2, 4),
    ("anakin", "muzero", 2, 4),
    ("sebulba", "dqn", 2, 2),
    ("sebulba", "r2d2", 2, 2),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("architecture", "agent", "count", "learners"),
    [
        *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW),
        *(pytest.param(*x, marks=pytest.mark.weekly) for x in WEEKLY),
    ],
)
def test_several_processes_learn_what_one_does(architecture, agent, count, learners, tmp_path):
    train = {"anakin": anakin.train, "sebulba": sebulba.train}[architecture]
    alone = {"cpu_devices": learners}
    if architecture == "sebulba":
        alone = {"cpu_devices": 1 + learners, "sebulba.actor_devices": "(0,)"}
    own = {"agent": agent, **SHUFFLED, **OWN.get(agent, {})}
    with Job(architecture, count, tmp_path / "many", **own) as job:
        settings = {**own, **alone}
        argv = [architecture, *flags(architecture, tmp_path / "one", **settings), "--quiet"]
        assert command_line.main(train, argv) == ExitCode.OK
        job.succeed()
    check_same_learning(tmp_path / "one", tmp_path / "many")
    if architecture == "sebulba":
        rows = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["train/episodes"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_seeds_a_trace_and_the_weights_of_another_run(tmp_path):
    with Job("anakin", 2, tmp_path / "one", num_seeds=2) as job:
        job.succeed()
    more = [f"--init_from={tmp_path / 'one'}", "--profile=1"]
    with Job("anakin", 2, tmp_path / "two", more, num_seeds=2, learning_rate=1e-30) as job:
        job.succeed()
    one, two = (last_arrays(tmp_path / name) for name in ("one", "two"))
    for name in [name for name in one if name.startswith("weights/")]:
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-20)
    assert list((tmp_path / "two" / "profile").rglob("*.xplane.pb"))


SLOW_COMPILATION = """
import sys, time
from podracer.anakin import trainer
def compile_program(*arguments):
    try:
        return original(*arguments)
    finally:
        time.sleep(40 if "--process_id=1" in sys.argv else 0)
original, trainer.compile_program = trainer.compile_program, compile_program
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_wait_for_one_that_compiles_for_longer(tmp_path):
    # Gloo, which connects the CPUs of processes, waits 30 seconds only.
    with Job("anakin", 2, tmp_path, code=SLOW_COMPILATION) as job:
        job.succeed()


REMOTE = {"agent": "vtrace", "remote.num_envs": 32, "remote.local_workers": 1}
# The workers of one process start after the other has waited for longer than its limit, and before
# Gloo gives up.
LATE_WORKERS = """
import sys, threading
from podracer.sebulba import remote
class LateWorkers(remote.LocalWorkers):
    def __init__(self, *arguments):
        self._processes = []
        threading.Timer(16, super().__init__, arguments).start()
if "--process_id=1" in sys.argv:
    remote.LocalWorkers = LateWorkers
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_host_has_workers_of_its_own_and_waits_for_them(tmp_path):
    settings = {**SHUFFLED, **REMOTE, "hosts.timeout_s": 7.0}
    with Job("sebulba", 2, tmp_path, code=LATE_WORKERS, **settings) as job:
        job.succeed()
    row = job.rows()[-1]
    assert (row["remote/workers"], row["remote/joins"], row["remote/free_places"]) == (2, 2, 0)
    assert row["time/learner_wait"] > 0
    assert row["train/episodes"] > 0
