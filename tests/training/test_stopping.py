"""How a run stops: signals, their exit codes, two runs in one workdir, and sudden ends."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from podracer import anakin
from podracer.errors import ExitCode
from tests.training.resuming import Stops, last_arrays, resumable, rows_of, without_times

ROOT = Path(__file__).parents[2]
CARTPOLE = str(ROOT / "configs" / "cartpole.py")


def test_ctrl_c_saves_too(tmp_path, monkeypatch):
    Stops(monkeypatch, 5, by=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="the same command without --restart resumes"):
        anakin.train(resumable(checkpoint__every=0), tmp_path / "run", quiet=True, restart=True)
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert 6 in steps
    # The handlers of signals are restored.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def command(workdir, *arguments):
    return [
        sys.executable, "-m", "podracer.anakin", f"--config={CARTPOLE}", f"--workdir={workdir}",
        "--config.total_steps=400_000", "--config.checkpoint.every=4", *arguments,
    ]  # fmt: skip


ENDLESS = (
    "--config.total_steps=100_000_000", "--config.network.hidden=(8,)", "--config.num_epochs=1",
    "--config.num_minibatches=1", "--config.cpu_devices=1",
)  # fmt: skip


# Full after a tenth of a run of ``command``, in which it is written over again and again.
REPLAY = (
    "--config.replay.capacity=40_000", "--config.replay.begin=5_000", "--config.replay.batch=64",
    "--config.replay.gradient_steps=4", "--config.replay.priority_exponent=0.6",
)  # fmt: skip


# R2D2's replay holds memories as well; D4PG has two optimizers, and targets that move a little.
AGENTS = {
    "ppo": (),
    "dqn": REPLAY,
    "r2d2": (
        *REPLAY, "--config.network.core=lstm", "--config.network.hidden=(16,)",
        "--config.network.core_size=16", "--config.r2d2.burn_in=16", "--config.r2d2.trace=128",
        "--config.replay.batch=8",
    ),
    "d4pg": (
        *REPLAY, "--config.env=gymnax:Pendulum-v1", "--config.d4pg.policy_hidden=(16,)",
        "--config.d4pg.critic_hidden=(16,)",
    ),
}  # fmt: skip


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_row(run, workdir) -> None:
    while not (workdir / "metrics.jsonl").exists() or not rows_of(workdir):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, ExitCode.PREEMPTED, "SIGTERM"),
        pytest.param(signal.SIGINT, ExitCode.INTERRUPTED, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_has_its_exit_code(number, code, words, tmp_path):
    with start(tmp_path / "run", *ENDLESS) as run:
        wait_for_row(run, tmp_path / "run")
        run.send_signal(number)
        _, stderr = run.communicate(timeout=60)
    assert run.returncode == code
    assert words in stderr
    assert "Traceback" not in stderr
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    rows = rows_of(tmp_path / "run")
    # No update whose row was shown has to be repeated.
    assert max(steps) * 4096 == rows[-1]["step"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(second):
    program = """
import time
from podracer.distributed.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while stop.number is None:
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep(100)
"""
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.readline() == "noted\n"
        run.send_signal(second)
        assert run.wait(timeout=10) == -second


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, ExitCode.PREEMPTED, "error: stopped by SIGTERM before the first step"),
        (signal.SIGINT, ExitCode.INTERRUPTED, "interrupted before the first step"),
    ],
)
def test_a_signal_before_the_first_step_is_never_lost(number, code, words):
    """Python drops exceptions that are raised in a finalizer or a callback of a library."""
    program = f"""
import os, sys
from podracer.training import command_line
class Collected:
    def __del__(self):
        os.kill(os.getpid(), {number.value})
        sum(range(1000))
def train(config, **options):
    Collected()
    print("trained")
sys.exit(command_line.main(train, ["anakin", "--config=cartpole"]))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (code, "")
    assert run.stderr.startswith(words)


@pytest.mark.slow
def test_two_runs_in_one_workdir(tmp_path):
    with start(tmp_path / "run", *ENDLESS) as first:
        wait_for_row(first, tmp_path / "run")
        with start(tmp_path / "run") as second:
            _, stderr = second.communicate(timeout=60)
        first.kill()
    assert second.returncode == ExitCode.CONFIG
    assert "belongs to a run that is still running" in stderr


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("agent", "times"), [("ppo", 4), ("dqn", 10), ("r2d2", 4), ("d4pg", 4)])
def test_kills_change_nothing(agent, times, tmp_path):
    """``kill -9`` at random moments, each time resumed by the same command."""
    changes = [f"--config.agent={agent}", *AGENTS[agent]]
    whole_run = command(tmp_path / "whole", *changes)
    subprocess.run(whole_run, cwd=ROOT, check=True, capture_output=True)
    rng = np.random.default_rng(0)
    kills = 0
    while kills < times:
        with start(tmp_path / "run", *changes) as run:
            # At a new row, between two saves or in one; and by turns anywhere in the time that a
            # run takes to its first new row: in the imports, the compilation, the restore.
            if kills % 2 == 0:
                before, started = len(rows_of(tmp_path / "run")), time.monotonic()
                while run.poll() is None and len(rows_of(tmp_path / "run")) <= before:
                    time.sleep(0.01)
                to_a_row = time.monotonic() - started
                time.sleep(rng.uniform(0, 0.05))
            else:
                time.sleep(rng.uniform(0, 1.1 * to_a_row))
            if run.poll() is None:
                run.kill()
                kills += 1
            run.communicate()
        if run.returncode == 0:
            break
    assert kills == times, "the run was over before it was killed as often"
    last_run = command(tmp_path / "run", *changes)
    subprocess.run(last_run, cwd=ROOT, check=True, capture_output=True)
    whole, killed = (last_arrays(tmp_path / name) for name in ("whole", "run"))
    for name, x in whole.items():
        np.testing.assert_array_equal(x, killed[name], err_msg=name)
    rows = rows_of(tmp_path / "run")
    steps = [row["step"] for row in rows]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert without_times(rows) == without_times(rows_of(tmp_path / "whole"))
