"""The benchmarks run with tiny sizes and print consistent results; their speed is not tested."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from podracer import config as config_lib

ROOT = pathlib.Path(__file__).parents[2]
WEEKLY = pytest.mark.weekly


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.weekly
def test_anakin(load, capsys):
    # An environment and an agent that compile quickly, on all devices of the test process.
    arguments = ["--env=dummy:counting", "--agent=vtrace", "--cpu_devices=8", "--num_envs=32"]
    sizes = ["--unroll_length=4", "--updates_per_call=1", "--calls=5", "--seconds=0"]
    load("anakin").main([*arguments, *sizes])
    (result,) = printed(capsys)
    assert (result["env"], result["agent"]) == ("dummy:counting", "vtrace")
    assert (result["num_envs"], result["unroll_length"], result["agents"]) == (32, 4, 1)
    assert result["devices"] == "8 x cpu"
    assert len(result["steps_per_second_all"]) == 5
    assert result["steps_per_second"] == sorted(result["steps_per_second_all"])[2] > 0
    ratio = result["steps_per_second"] / result["ceiling_steps_per_second"]
    assert result["ceiling_ratio"] == pytest.approx(ratio, abs=1e-3)
    assert result["versions"]["jax"] == importlib.metadata.version("jax")
    assert result["versions"].keys() == {"podracer", "jax", "flax"}


def test_speed_beside_purejaxrl_alternates_and_divides(load, capsys, monkeypatch):
    speed = load("purejaxrl_speed")
    measured = []

    def measure(program, path, size):
        measured.append((program.__name__, size))
        return {"podracers": 3e5, "purejaxrls": 1e5 * len(measured)}[program.__name__]

    monkeypatch.setattr(speed, "measure_alone", measure)
    speed.main(["PATH", "--rounds=2"])
    assert [program for program, _ in measured[:4]] == ["podracers", "purejaxrls"] * 2
    assert [size for _, size in measured[::4]] == list(speed.SIZES)
    row = capsys.readouterr().out.splitlines()[2]
    assert row == "| CartPole-v1 | 4 x 128 | 300 K, 300 K | 200 K, 400 K | 1.50, 0.75 |"


# Writes three rows, whose loss depends on the core at the third; two runs have two cores.
ROWS = """
import json, os, pathlib, sys
run = pathlib.Path(sys.argv[1].removeprefix("--workdir="))
run.mkdir()
core = min(os.sched_getaffinity(0))
rows = [{"step": i, "wall_time": float(core), "loss": core * (i > 1 and %s)} for i in range(3)]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="both runs need a core of their own")
def test_two_commits_compute_the_same_or_the_first_difference_is_named(load, capsys):
    compare = load("compare_commits")
    compare.main(["HEAD", "--", "-c", ROWS % "False"])
    *_, rows, verdict = capsys.readouterr().out.splitlines()
    assert rows == "3 rows up to step 2 since HEAD"
    assert verdict == "all metrics are equal, to the last bit"
    with pytest.raises(SystemExit, match="1"):
        compare.main(["HEAD", "--", "-c", ROWS % "True"])
    assert capsys.readouterr().out.splitlines()[-2] == "differs from step 2: loss"
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl after this time:\nno run"):
        compare.main(["HEAD", "--", "-c", "print('no run')"])


@pytest.mark.weekly
def test_resets(load, capsys):
    pytest.importorskip("jumanji", reason="the suite is not installed: pip install -e '.[jumanji]'")
    resets = load("resets")
    assert resets.make("jumanji:Snake-v1", cached=True).refresh is not None
    assert resets.make("jumanji:Snake-v1", cached=False).refresh is None
    resets.main(["--env=jumanji:Snake-v1", "--num_envs=2", "--unroll_length=2", "--rounds=1"])
    results = printed(capsys)
    assert [result["cached"] for result in results] == [True, False]
    assert all(result["steps_per_second"] > 0 for result in results)


@pytest.mark.weekly
def test_convolution(load, capsys):
    load("convolution").main(["--torso=minatar", "--batch=2", "--rounds=1"])
    results = printed(capsys)
    assert [(result["gradients"], result["scan"]) for result in results] == [
        ("podracer", True), ("podracer", False), ("jax", True), ("jax", False),
    ]  # fmt: skip
    assert all(result["images_per_second"] > 0 for result in results)


@pytest.mark.parametrize("own", [True, False])
def test_convolution_compares_podracers_gradients_with_jaxs(own, load):
    convolution = load("convolution")
    torso = convolution.make_torso("minatar", own=own)
    (layer,) = (x for _, x in nnx.iter_graph(torso) if isinstance(x, nnx.Conv))
    assert (layer.conv_general_dilated is jax.lax.conv_general_dilated) != own


def test_cleanba_is_a_valid_config(load):
    config = config_lib.parse(load("cleanba").get_config())
    assert (config.env, config.agent, config.ppo.clip) == ("envpool:Pong-v5", "ppo", 0.1)


@pytest.mark.weekly
def test_sebulba():
    """As a command, with the number of devices that a user's process has."""
    command = [
        sys.executable, "benchmarks/sebulba.py", "--env=envpool:Pong-v5", "--num_envs=8",
        "--unroll_length=4", "--seconds=0.2",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
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


@pytest.mark.weekly
def test_remote():
    command = [
        sys.executable, "benchmarks/remote.py", "--env=envpool:CartPole-v1", "--vector",
        "--workers=1", "--num_envs=8", "--unroll_length=4", "--seconds=0.2", "--rounds=2",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    pairs = zip(
        result["remote_steps_per_second_all"], result["local_steps_per_second_all"], strict=True
    )
    ratios = [there / here for there, here in pairs]
    assert result["ratio"] == pytest.approx(sum(ratios) / 2, rel=0.01)
    assert result["last_round"]["remote/received_mb"] > 0
    assert result["last_round"]["time/actor_network"] > 0


@pytest.mark.weekly
def test_checkpoint(load, capsys):
    load("checkpoint").main(["--gigabytes=0.002", "--devices=2", "--rounds=1"])
    (result,) = printed(capsys)
    assert result["bytes"] == pytest.approx(2e6, rel=0.1)
    assert all(x >= 0 for x in result["seconds"].values())
    assert {"copy", "save", "step_after_save", "background"} <= result["seconds"].keys()


@pytest.mark.parametrize(
    ("kind", "arguments", "variants"),
    [
        pytest.param("planner", [], ["podracer", "plain"], marks=WEEKLY),
        pytest.param("selfplay", ["--env=pgx:tic_tac_toe"], ["podracer", "plain"], marks=WEEKLY),
        pytest.param(
            "unroll",
            ["--env=gymnax:Breakout-MinAtar", "--state=planes", "--channels=2"],
            ["podracer, 1", "podracer, 5", "jax, 1", "jax, 5"],
            marks=WEEKLY,
        ),
    ],
)
def test_search(kind, arguments, variants, load, capsys):
    if kind == "selfplay":
        pytest.importorskip("pgx")
    sizes = ["--num_envs=2", "--simulations=2", "--unroll_length=2", "--batch=2"]
    load("search").main([kind, *arguments, *sizes, "--rounds=1", "--repeat=1"])
    results = printed(capsys)
    assert [result["variant"] for result in results] == variants
    assert all(result["items_per_cpu_second"] > 0 for result in results)
    assert all(("simulations_per_cpu_second" in result) == (kind != "unroll") for result in results)


@pytest.mark.weekly
def test_a_plain_search_finds_what_podracers_finds(load):
    """Without noise, so that the random keys do not matter."""
    search = load("search")
    arguments = search.make_parser().parse_args(["planner", "--num_envs=4", "--simulations=8"])
    calls = search.make_planners(arguments, noise=False)
    found, (action, policy) = calls["podracer"](), calls["plain"]()
    np.testing.assert_array_equal(found.action, action)
    np.testing.assert_allclose(found.policy, policy, atol=1e-5)
    assert np.ptp(policy) > 0.01


@pytest.mark.weekly
def test_replay(load, capsys):
    pytest.importorskip("flashbax")
    load("replay").main(["--items=4096", "--rounds=1"])
    results = printed(capsys)
    assert len(results) == 4
    for result in results:
        operations = {"add", "sample", *["set_priorities"] * result["prioritised"]}
        for library in ("podracer", "flashbax"):
            assert result["microseconds"][library].keys() == operations
