"""Agents learn: the real command, in a process of its own with the devices a user has."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent


def final_return(workdir: pathlib.Path, *arguments: str) -> float:
    """What the closing evaluation of a run of configs/cartpole.py says."""
    command = [sys.executable, "-m", "podracer.anakin", "--config=configs/cartpole.py", "--quiet"]
    subprocess.run([*command, f"--workdir={workdir}", *arguments], cwd=ROOT, check=True)
    return json.loads((workdir / "summary.json").read_text())["eval_return_mean"]


@pytest.mark.parametrize("agent", ["ppo", "vtrace"])
def test_cartpole_is_learned_by_the_command_of_the_readme(agent, tmp_path):
    assert final_return(tmp_path, f"--config.agent={agent}") >= 475


@pytest.mark.parametrize("core", ["gru", "none"])
def test_memory_chain_is_learned_with_a_memory_and_not_without(core, tmp_path):
    score = final_return(
        tmp_path,
        "--config.env=gymnax:MemoryChain-bsuite",
        "--config.num_envs=64",
        "--config.unroll_length=16",
        "--config.total_steps=100_000",
        "--config.learning_rate=3e-3",
        f"--config.network.core={core}",
        "--config.network.core_size=32",
        "--config.network.shared=True",
    )
    # +1 for the right answer, -1 for the wrong one: guessing gives 0.
    assert score > 0.9 if core == "gru" else score < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", ["ppo", "vtrace"])
def test_cartpole_is_learned_with_every_seed(agent, tmp_path):
    """At the setting that peers are measured at: 4 environments x 128 steps, 500 k steps."""
    returns = [
        final_return(
            tmp_path / str(seed),
            f"--config.seed={seed}",
            f"--config.agent={agent}",
            "--config.num_envs=4",
            "--config.total_steps=500_000",
            "--config.learning_rate=2.5e-4",
        )
        for seed in range(8)
    ]
    print(agent, returns)
    assert np.mean(returns) > 470
    assert min(returns) > 400
