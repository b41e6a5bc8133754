"""The benchmarks run, and print what they are documented to print; how fast is nothing to test."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_sebulba_is_compared_with_its_pools_alone():
    command = [
        sys.executable, "benchmarks/sebulba.py", "--env=envpool:Pong-v5", "--num_envs=8",
        "--unroll_length=4", "--seconds=0.2",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert (result["env"], result["num_envs"]) == ("envpool:Pong-v5", 8)
    assert result["frames_per_second"] == pytest.approx(4 * result["steps_per_second"], abs=2)
    assert result["steps_per_second"] > 0
    assert len(result["ceiling_steps_per_second_all"]) == 5
    ratios = [
        learning / alone
        for learning, alone in zip(
            result["steps_per_second_all"], result["ceiling_steps_per_second_all"], strict=True
        )
    ]
    assert min(ratios) - 1e-3 <= result["ceiling_ratio"] <= max(ratios) + 1e-3
    actors = ("environment", "inference", "transfer", "wait")
    learner = ("wait", "update", "publish")
    assert result["breakdown"].keys() == {
        *(f"actor_{name}" for name in actors),
        *(f"learner_{name}" for name in learner),
    }
