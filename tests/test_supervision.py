"""No thread dies silently, and nothing waits for ever."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from podracer import cli, envs, returns
from podracer.envs import dummy
from podracer.errors import ActorError, DivergedError
from podracer.sebulba import actor as actor_lib
from podracer.sebulba.pipeline import Channel, Publisher, Stopped, Supervisor
from tests import faulty
from tests.test_sebulba import SOLO, joined, sebulba_config, train, unrolls

ROOT = pathlib.Path(__file__).parent.parent
# One device and four threads on it.
SIZES = {
    "num_envs": 48,
    "total_steps": 10 * 48 * 8,
    **SOLO,
    "sebulba__threads": 4,
}
COMMAND = """
import runpy, sys
from podracer import envs
from tests import faulty
envs.HOST_SUITES["faulty"] = faulty.make
runpy.run_module("podracer.sebulba", run_name="__main__", alter_sys=True)
"""


def command(env: str, tmp_path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        COMMAND,
        "--config=configs/cartpole.py",
        f"--config.env={env}",
        "--config.num_envs=8",
        "--config.unroll_length=8",
        "--config.evaluation.episodes=8",
        f"--workdir={tmp_path}/run",
        *arguments,
    ]


def finished(arguments: list[str]) -> subprocess.CompletedProcess:
    """A command that has come to its end, with what it said."""
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    "how",
    ["nan", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raise", "shape"))],
)
def test_a_broken_pool_is_rebuilt_and_its_sequence_cut(how):
    env = faulty.host(lambda seeds: faulty.Broken(dummy.CountingPool(seeds), 20, how))
    result = train(sebulba_config(**SIZES, sebulba__max_restarts=100), env)
    # Ten unrolls of 8 steps, in four threads: each pool breaks at its step 20 and is then new, so
    # that it breaks after 20, 40, 60 and 80 steps in all.
    assert [row["actor/restarts"] // 4 for row in result.metrics] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert np.isfinite([row["loss/total"] for row in result.metrics]).all()


def test_what_a_restart_leaves_is_cut_by_the_rule_of_every_autoreset():
    env = faulty.host(lambda seeds: faulty.Broken(dummy.CountingPool(seeds, length=50), 5, "raise"))
    config = sebulba_config(num_envs=4, unroll_length=8, **SOLO)
    _, _, taken = unrolls(config, 1, env, max_restarts=10)
    timestep = joined(taken[0].parts).timestep
    assert taken[0].restarts == 1
    assert taken[0].episodes.episodes == 0
    valid = returns.valid(timestep)
    np.testing.assert_array_equal(valid, np.tile(np.arange(8)[:, None] != 4, (1, 4)))
    assert timestep.first[5].all()
    assert (timestep.discount == 1).all()
    np.testing.assert_array_equal(timestep.observation[:, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3])


@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_past_the_cap_the_run_stops_at_once_with_name_and_traceback(how):
    env = faulty.host(lambda seeds: faulty.Broken(dummy.CountingPool(seeds), 20, how))
    start = time.monotonic()
    with pytest.raises(ActorError, match=r"thread 'actor \d.\d' failed") as info:
        train(sebulba_config(**{**SIZES, "total_steps": 10**8}, sebulba__max_restarts=2), env)
    assert "Traceback" in str(info.value)
    assert "(after 2 restarts of the pool)" in str(info.value)
    what = {
        "raise": "the simulator has crashed",
        "nan": "NaN or infinite",
        "shape": "float32[11, 2], not float32[12, 2]",
    }
    assert what[how] in str(info.value)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("actor")]
    assert time.monotonic() - start < 60


def test_a_pool_that_can_not_be_built_is_no_case_for_another_try():
    built = []

    def make(seeds):
        built.append(1)
        raise OSError("no such game")

    with pytest.raises(ActorError, match="no such game"):
        train(sebulba_config(**SIZES), faulty.host(make))
    # At most once in each of the four threads.
    assert 1 <= len(built) <= 4


def test_an_actor_that_fails_anywhere_stops_the_run(monkeypatch):
    def broken(self):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(actor_lib.Games, "take", broken)
    with pytest.raises(ActorError, match="a mistake of ours"):
        train(sebulba_config(**SIZES))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "failed: .*has crashed"),
        ("nan", "failed: .*NaN or infinite"),
        ("hang", "hangs: stepping its pool"),
    ],
)
def test_an_evaluation_that_hangs_or_fails_stops_the_run(how, message):
    def make(seeds):
        # Evaluation's pool alone is of eight environments.
        pool = dummy.CountingPool(seeds)
        return faulty.Broken(pool, 2, how) if len(seeds) == 8 else pool

    with pytest.raises(ActorError, match=f"^thread 'evaluation' {message}"):
        train(sebulba_config(**SIZES, sebulba__timeout_s=2.0), faulty.host(make))


def test_a_failure_after_the_last_unroll_is_not_lost(monkeypatch):
    def close(self):
        raise OSError("the simulator would not close")

    monkeypatch.setattr(faulty.EchoPool, "close", close)
    config = sebulba_config(**{**SIZES, "sebulba__threads": 1}, evaluation__episodes=1)
    # Evaluation's pool is closed after that.
    with pytest.raises(ActorError, match=r"^thread 'actor 0\.0' failed.*would not close"):
        train(config, faulty.host(faulty.EchoPool))


def test_a_hang_anywhere_in_an_actor_is_noticed(monkeypatch):
    monkeypatch.setattr(actor_lib.Games, "take", lambda self: time.sleep(30))
    with pytest.raises(ActorError, match="hangs: sending its unroll has taken more than"):
        train(sebulba_config(**SIZES, sebulba__timeout_s=2.0))


def test_divergence_is_no_fault_of_the_environment():
    """NaN weights are never acted with: many updates a call, and a pool that minds its actions."""
    config = sebulba_config(
        **SIZES, learning_rate=1e38, max_grad_norm=0.0, updates_per_call=10, optimizer="rmsprop"
    )
    with pytest.raises(DivergedError, match="update"):
        train(config)


def test_a_hang_ends_the_process_with_name_and_traceback(tmp_path):
    run = finished(
        command("faulty:hang", tmp_path, "--config.sebulba.timeout_s=2."),
    )
    assert run.returncode == cli.ACTOR
    assert "hangs: stepping its pool has taken more than sebulba.timeout_s=2 s" in run.stderr
    assert "faulty.py" in run.stderr
    assert "time.sleep(3600)" in run.stderr


def test_a_learner_that_hangs_ends_the_process(tmp_path):
    stuck = "import time, podracer.mesh; podracer.mesh.from_parts = lambda *_: time.sleep(99)"
    run = command("dummy:counting", tmp_path, "--config.sebulba.timeout_s=2.")
    start = time.monotonic()
    ended = finished(
        [*run[:2], f"{stuck}\n{run[2]}", *run[3:]],
    )
    assert ended.returncode == cli.ACTOR
    assert time.monotonic() - start < 90
    assert "error: thread 'learner' hangs: updating has taken" in ended.stderr
    assert "mesh_lib.from_parts(" in ended.stderr


def running(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_hang_leaves_no_process_of_an_environment(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    run = finished(
        command(
            "gymnasium:tests.sleeper:Sleeper-v0",
            tmp_path,
            f"--config.env_kwargs.folder={pids}",
            "--config.sebulba.timeout_s=3.",
        ),
    )
    assert run.returncode == cli.ACTOR
    assert "hangs: stepping its pool" in run.stderr
    # Eight environments, and the one that was made to see its spaces.
    processes = [int(path.name) for path in pids.iterdir()]
    assert len(processes) == 8 + 1
    deadline = time.monotonic() + 10
    while left := [pid for pid in processes if running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_process_that_died_takes_the_others_with_it(tmp_path):
    folder = str(tmp_path)
    env = envs.make_host("gymnasium:tests.sleeper:Sleeper-v0", {"folder": folder}, {})
    pool = env.make(range(4), 1)
    pool.reset()
    processes = [int(path.name) for path in tmp_path.iterdir() if path.name != str(os.getpid())]
    assert len(processes) == 4
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        pool.step(np.zeros(4, np.int32))
    pool.close()
    assert not [pid for pid in processes if running(pid)]


def test_a_failure_ends_the_process_within_ten_seconds(tmp_path):
    # In the second unroll of the only actor, when the learner is at work, and remains so.
    changes = (
        "--config.sebulba.max_restarts=0",
        "--config.unroll_length=16",
        "--config.sebulba.threads=1",
    )
    _, *arguments = command("faulty:raise", tmp_path, *changes)
    slow = "import time, podracer.mesh; podracer.mesh.from_parts = lambda *_: time.sleep(60)"
    arguments[1] = f"{slow}\n{arguments[1]}"
    run = finished([sys.executable, *arguments])
    now = time.time()
    assert run.returncode == cli.ACTOR
    first, _, errors = run.stderr.partition("\n")
    assert "thread 'actor" in first
    failed = re.search(r"OSError: the simulator has crashed at ([\d.]+)", errors)
    assert failed
    assert now - float(failed[1]) < 10


@pytest.mark.parametrize(
    ("env", "every", "number", "code"),
    [
        ("dummy:counting", 1, signal.SIGINT, cli.INTERRUPTED),
        ("gymnasium:CartPole-v1", 0, signal.SIGINT, cli.INTERRUPTED),
        ("gymnasium:CartPole-v1", 0, signal.SIGTERM, cli.PREEMPTED),
        pytest.param(
            "envpool:CartPole-v1", 1, signal.SIGINT, cli.INTERRUPTED, marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_to_all_processes_ends_cleanly(env, every, number, code, tmp_path):
    """A terminal's Ctrl-C, a batch system's SIGTERM. Most of the time of these runs is
    evaluation's where there is one after every update."""
    with subprocess.Popen(
        command(
            env,
            tmp_path,
            f"--config.evaluation.every={every}",
            "--config.total_steps=1_000_000_000",
            "--config.updates_per_call=1",
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        while "a second" not in run.stdout.readline():
            assert run.poll() is None
        os.killpg(run.pid, number)
        start = time.monotonic()
        _, errors = run.communicate(timeout=60)
    assert run.returncode == code
    assert time.monotonic() - start < 10
    assert ("SIGTERM" if number == signal.SIGTERM else "interrupted") in errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_waits_end_when_the_run_does():
    for wait in ("put", "get"):
        with Supervisor(10.0) as supervisor:
            channel, publisher = Channel(supervisor), Publisher(supervisor, keep=1)
            ended = []

            def body(wait=wait, channel=channel, publisher=publisher, ended=ended):
                try:
                    if wait == "get":
                        publisher.get(None, 3)
                    channel.put(None)  # type: ignore[arg-type]
                    channel.put(None)  # type: ignore[arg-type]
                except Stopped:
                    ended.append(wait)
                    raise

            supervisor.start("waiter", body)
            time.sleep(0.3)
            assert not ended
        assert ended == [wait]
