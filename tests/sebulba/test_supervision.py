"""No thread fails or hangs silently, and nothing waits forever."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from podracer import envs
from podracer.distributed import mesh
from podracer.envs import dummy
from podracer.errors import ActorError, DivergedError, ExitCode
from podracer.sebulba import threads, trainer
from podracer.sebulba.evaluation import EvaluationThread
from podracer.sebulba.pool import RestartingPool
from podracer.sebulba.threads import HangLimits, Supervisor
from tests.helpers import ROOT
from tests.sebulba import faulty
from tests.sebulba.runs import SOLO, FakeClock, sebulba_config, train

# Ten updates, on one device with four actor threads.
SIZES = {"num_envs": 48, "total_steps": 10 * 48 * 8, **SOLO, "sebulba__threads": 4}
# The same with one actor thread, and no acting while the learner updates.
ALTERNATING = {**SIZES, "sebulba__threads": 1, "sebulba__lag": 0}


def command(env: str, tmp_path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        *("-m", "podracer.sebulba", "--config=configs/cartpole.py"),
        f"--config.env={env}",
        "--config.num_envs=8",
        "--config.unroll_length=8",
        "--config.evaluation.episodes=8",
        f"--workdir={tmp_path}/run",
        *arguments,
    ]


@pytest.fixture
def now(monkeypatch):
    """A clock for all limits, so that only what a test makes hang takes long; ends those hangs."""
    now = FakeClock()

    def make_supervisor(options, warn):
        limits = HangLimits(options.timeout_s, options.first_update_timeout_s)
        return Supervisor(limits, warn, now)

    monkeypatch.setattr(trainer, "make_supervisor", make_supervisor)
    monkeypatch.setattr(threads, "GRACE_S", 0.1)
    yield now
    faulty.RELEASED.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("actor", "learner", "evaluation")):
            thread.join()
    faulty.RELEASED.clear()


def hang(now, seconds):
    """A function that takes ``seconds`` by that clock, and does not return before the test ends."""

    def function(*_):
        now.seconds += seconds
        faulty.RELEASED.wait()

    return function


@pytest.mark.parametrize(
    "how",
    ["raise", *(pytest.param(how, marks=pytest.mark.slow) for how in ("nan", "shape"))],
)
def test_a_broken_pool_is_rebuilt_and_reported(how, capsys):
    config = sebulba_config(**SIZES, sebulba__max_restarts=100)
    result = train(config, faulty.broken(20, how), quiet=False)
    # Ten unrolls of 8 steps, in four threads: each pool fails at its step 20 and is then new, so
    # that it fails after 20, 40, 60 and 80 steps in total.
    assert [row["actor/restarts"] // 4 for row in result.metrics] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert result.summary["pool_restarts"] == result.metrics[-1]["actor/restarts"]
    assert "were rebuilt" in result.summary["report"]
    assert np.isfinite([row["loss/total"] for row in result.metrics]).all()
    errors = {
        "raise": "OSError: the simulator has crashed at",
        "nan": "PoolError: the pool's .observation is NaN or infinite",
        "shape": "PoolError: the pool's .observation is float32[11, 2], not float32[12, 2]",
    }
    assert capsys.readouterr().out.count(errors[how]) == 1


@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_past_the_cap_the_run_stops_at_once_with_name_and_traceback(how):
    config = sebulba_config(**SIZES, sebulba__max_restarts=2)
    env = faulty.make_environment(
        lambda seeds: faulty.BrokenPool(dummy.CountingPool(seeds), 4, how)
    )
    with pytest.raises(ActorError, match=r"thread 'actor \d.\d' failed") as info:
        train(config, env)
    assert "Traceback" in str(info.value)
    assert "(the pool had already been rebuilt 2 times (sebulba.max_restarts)" in str(info.value)
    what = {
        "raise": "the simulator has crashed",
        "nan": "NaN or infinite",
        "shape": "float32[11, 2], not float32[12, 2]",
    }
    assert what[how] in str(info.value)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("actor")]


def test_a_pool_that_can_not_be_built_is_not_tried_again():
    built = []

    def make_pool(seeds):
        built.append(1)
        raise OSError("no such game")

    with pytest.raises(ActorError, match="no such game"):
        train(sebulba_config(**SIZES), faulty.make_environment(make_pool))
    # At most once in each of the four threads.
    assert 1 <= len(built) <= 4


def test_an_actor_that_fails_anywhere_stops_the_run(monkeypatch):
    def broken(self):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(RestartingPool, "take_finished", broken)
    with pytest.raises(ActorError, match="a mistake of ours"):
        train(sebulba_config(**SIZES))


def test_a_failure_stops_the_run_while_the_learner_is_stuck(monkeypatch, now):
    monkeypatch.setattr(mesh, "from_parts", hang(now, 0))
    # In the second unroll.
    config = sebulba_config(**{**ALTERNATING, "sebulba__lag": 1}, sebulba__max_restarts=0)
    with pytest.raises(ActorError, match=r"thread 'actor 0\.0' failed: .*has crashed"):
        train(config, faulty.broken(12, "raise"))


def test_a_failure_after_the_last_unroll_is_not_lost(monkeypatch):
    def close(self):
        raise OSError("the simulator would not close")

    monkeypatch.setattr(faulty.EchoPool, "close", close)
    with pytest.raises(ActorError, match=r"^thread 'actor 0\.0' failed.*would not close"):
        train(sebulba_config(**ALTERNATING), faulty.make_environment(faulty.EchoPool))


def test_divergence_is_not_blamed_on_the_environment():
    """NaN weights are never acted with: many updates a call, and a pool that checks its actions."""
    config = sebulba_config(
        **SIZES, learning_rate=1e38, max_grad_norm=0.0, updates_per_call=10, optimizer="rmsprop"
    )
    with pytest.raises(DivergedError, match="update"):
        train(config)


def test_a_pool_that_hangs_stops_the_run(now):
    with pytest.raises(ActorError, match=r"^thread 'actor 0\.0' hangs: stepping its pool") as info:
        train(sebulba_config(**ALTERNATING), faulty.broken(4, hang(now, 121)))
    assert "more than 120 seconds; if it is only slow, set sebulba.timeout_s" in str(info.value)
    assert "faulty.RELEASED.wait()" in str(info.value)


def test_a_hang_anywhere_in_an_actor_is_noticed(monkeypatch, now):
    monkeypatch.setattr(RestartingPool, "take_finished", hang(now, 1801))
    with pytest.raises(ActorError, match="hangs: sending its trajectory has taken more than 1800"):
        train(sebulba_config(**ALTERNATING))


def test_slow_updates_do_not_count_as_hangs(monkeypatch, now):
    """Updates take 300 seconds each, while other activities may take 120."""
    check, checks, from_parts = Supervisor.check, [], mesh.from_parts

    def counted_check(self):
        check(self)
        checks.append(now.seconds)

    def slow(*arguments):
        now.seconds += 300
        deadline = time.monotonic() + 60
        while now.seconds not in checks:
            time.sleep(0.001)
            assert time.monotonic() < deadline
        return from_parts(*arguments)

    monkeypatch.setattr(Supervisor, "check", counted_check)
    monkeypatch.setattr(mesh, "from_parts", slow)
    assert len(train(sebulba_config(**ALTERNATING)).metrics) == 10
    assert now.seconds == 3000


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (0, "1800 seconds, and no update has finished yet; .* sebulba.first_update_timeout_s"),
        (3, "3000 seconds, 10 times the longest update so far; .* sebulba.timeout_s"),
    ],
)
def test_an_update_that_hangs_stops_the_run(update, message, monkeypatch, now):
    calls, from_parts = [], mesh.from_parts

    def slow(*arguments):
        calls.append(arguments)
        if len(calls) > update:
            hang(now, 3001)()
        now.seconds += 300
        return from_parts(*arguments)

    monkeypatch.setattr(mesh, "from_parts", slow)
    with pytest.raises(ActorError, match=r"^thread 'learner' hangs: updating has taken") as info:
        train(sebulba_config(**ALTERNATING))
    assert len(calls) == update + 1
    info.match(message)
    assert "mesh_lib.from_parts(" in str(info.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "failed: .*has crashed"),
        ("nan", "failed: .*NaN or infinite"),
        ("hang", "hangs: stepping its pool"),
    ],
)
def test_an_evaluation_that_hangs_or_fails_stops_the_run_and_loses_nothing(
    how, message, now, tmp_path
):
    fail = hang(now, 121) if how == "hang" else how
    pools = []

    def make_pool(seeds):
        pools.append(len(seeds))
        pool = dummy.CountingPool(seeds)
        # Only the evaluation's pool has eight environments; the third one works.
        broken = len(seeds) == 8 and pools.count(8) < 3
        return faulty.BrokenPool(pool, 2, fail) if broken else pool

    config, env = sebulba_config(**ALTERNATING), faulty.make_environment(make_pool)
    for _ in range(2):
        with pytest.raises(ActorError, match=f"^thread 'evaluation' {message}"):
            train(config, env, EvaluationThread, workdir=tmp_path)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["10"]
    result = train(config, env, EvaluationThread, workdir=tmp_path)
    assert pools[-1] == 8
    assert [row["step"] for row in result.metrics] == [48 * 8 * (i + 1) for i in range(10)]
    assert result.summary["eval_episodes"] == 8


def test_ctrl_c_ends_an_evaluation(now):
    """The evaluation would not end by itself."""

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        faulty.RELEASED.wait()

    def make_pool(seeds):
        pool = dummy.CountingPool(seeds)
        return faulty.BrokenPool(pool, 2, interrupt) if len(seeds) == 8 else pool

    config = sebulba_config(**ALTERNATING, evaluation__every=1)
    with pytest.raises(KeyboardInterrupt):
        train(config, faulty.make_environment(make_pool), EvaluationThread)


def running(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_hang_ends_the_process_and_those_of_its_environments(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    run = subprocess.run(
        command(
            "gymnasium:tests.distributed.sleeper:Sleeper-v0",
            tmp_path,
            f"--config.env_kwargs.folder={pids}",
            "--config.sebulba.timeout_s=5.",
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == ExitCode.STALLED, run.stderr
    assert "error: thread 'actor 0." in run.stderr
    # Where the machine is busy, processes may take as long to start.
    assert "hangs: stepping its pool" in run.stderr or "hangs: building its pool" in run.stderr
    deadline = time.monotonic() + 60
    while left := [path.name for path in pids.iterdir() if running(int(path.name))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_a_script_that_trains_when_it_is_imported_is_told_what_to_change(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from podracer import sebulba\n"
        "from podracer.config import default_config\n"
        "config = default_config('ppo')\n"
        "config.env, config.num_envs = 'gymnasium:CartPole-v1', 4\n"
        "sebulba.train(config, quiet=True)\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith('a script must train under if __name__ == "__main__":')
    # The processes print nothing else, such as where they were in the script.
    assert run.stderr.count("script.py") == 1


def test_a_process_that_died_takes_the_others_with_it(tmp_path):
    folder = str(tmp_path)
    env = envs.make_host_environment(
        "gymnasium:tests.distributed.sleeper:Sleeper-v0", {"folder": folder}, {}
    )
    pool = env.make_pool(range(4), 1)
    pool.reset()
    processes = [int(path.name) for path in tmp_path.iterdir() if path.name != str(os.getpid())]
    assert len(processes) == 4
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        pool.step(np.zeros(4, np.int32))
    pool.close()
    assert not [pid for pid in processes if running(pid)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "every", "number", "code"),
    [
        ("gymnasium:CartPole-v1", 0, signal.SIGTERM, ExitCode.PREEMPTED),
        ("gymnasium:CartPole-v1", 0, signal.SIGINT, ExitCode.INTERRUPTED),
        ("envpool:CartPole-v1", 1, signal.SIGINT, ExitCode.INTERRUPTED),
    ],
)
def test_a_signal_to_all_processes_ends_a_run_cleanly(env, every, number, code, tmp_path):
    """A terminal's Ctrl-C and a batch system's SIGTERM, to a run that would last for days."""
    rows = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(
        command(
            env,
            tmp_path,
            f"--config.evaluation.every={every}",
            "--config.total_steps=1_000_000_000",
            "--config.updates_per_call=1",
        ),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        while not (rows.exists() and rows.read_text()):
            assert run.poll() is None
            time.sleep(0.05)
        os.killpg(run.pid, number)
        _, errors = run.communicate(timeout=100)
    assert run.returncode == code
    assert ("SIGTERM" if number == signal.SIGTERM else "interrupted") in errors
    assert "Traceback" not in errors
