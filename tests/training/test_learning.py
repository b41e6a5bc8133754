"""Agents learn: the real command in its own process, with the devices that a user has.

One config of each kind: docs/results.md has all of them, each with several seeds.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def final_return(
    workdir: pathlib.Path, *arguments: str, architecture: str = "anakin", config: str = "cartpole"
) -> float:
    """The final evaluation of a run of a config."""
    module, path = f"podracer.{architecture}", f"configs/{config}.py"
    command = [sys.executable, "-m", module, f"--config={path}", "--quiet"]
    subprocess.run(
        [*command, f"--workdir={workdir}", *arguments],
        cwd=ROOT,
        check=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    return json.loads((workdir / "summary.json").read_text())["eval_return_mean"]


def test_cartpole_is_learned_by_the_command_of_the_readme(tmp_path):
    assert final_return(tmp_path) >= 475


@pytest.mark.weekly
def test_a_memory_task_is_learned(tmp_path):
    assert final_return(tmp_path, config="memory_chain") >= 0.95


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_cartpole_is_learned_by_vtrace_with_every_seed(tmp_path):
    """With the settings at which others are measured: 4 environments x 128 steps, 500 k steps."""
    mean = final_return(
        tmp_path,
        "--config.agent=vtrace",
        "--config.num_seeds=8",
        "--config.num_envs=4",
        "--config.total_steps=500_000",
        "--config.learning_rate=2.5e-4",
    )
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    returns = [last[f"seed_{seed}/eval/episode_return"] for seed in range(8)]
    print(returns)
    assert mean > 470
    assert min(returns) > 400


@pytest.mark.weekly
def test_cartpole_is_learned_by_sebulba_too(tmp_path):
    arguments = ["--config.env=envpool:CartPole-v1", "--config.agent=vtrace"]
    assert final_return(tmp_path, *arguments, architecture="sebulba") >= 475


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_minute_of_sebulba_holds_its_memory(tmp_path):
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "podracer.sebulba",
            "--config=configs/cartpole.py",
            "--config.env=envpool:CartPole-v1",
            "--config.total_steps=10_000_000_000",
            # A signal waits for the end of a call.
            "--config.updates_per_call=10",
            f"--workdir={tmp_path}/run",
            "--quiet",
        ],
        cwd=ROOT,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert run.poll() is None
            time.sleep(0.5)
        used = []
        for _ in range(60):
            time.sleep(1)
            assert run.poll() is None
            pages = pathlib.Path(f"/proc/{run.pid}/statm").read_text().split()[1]
            used.append(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    finally:
        run.send_signal(signal.SIGINT)
        assert run.wait(120) == 130
    print([round(x) for x in used])
    # Rows of metrics are kept in memory, a few kilobytes each.
    assert max(used[30:]) < max(used[:30]) + 10
