"""Sweeps with environments on the host: one run after another, each as it would be alone."""

import json
import re
from functools import partial

import jax
import numpy as np
import pytest

from podracer.errors import ConfigError, DivergedError, PreemptedError
from podracer.monitoring.console import show_run
from podracer.monitoring.sweeps import read_sweep
from podracer.sebulba import train
from podracer.storage.workdir import read_rows
from podracer.training import saved_run
from tests.sebulba.runs import SOLO, sebulba_config
from tests.training.resuming import Stops

SWEEP = {"num_envs": 4, "total_steps": 4 * 8 * 3, "evaluation__episodes": 2, **SOLO}
EVALUATION = "eval/episode_return"


@pytest.mark.slow
def test_each_agent_is_a_run_of_its_own_and_the_command_resumes_them(tmp_path, monkeypatch, capsys):
    whole = sebulba_config(**SWEEP, sweep={"learning_rate": [1e-3, 1e-2]}, num_seeds=2, seed=5)
    Stops(monkeypatch, 1)
    with pytest.raises(PreemptedError):
        train(whole, tmp_path / "all")
    assert len(read_rows(tmp_path / "all" / "member_0")) == 2
    assert not (tmp_path / "all" / "member_1").exists()
    capsys.readouterr()
    result = train(whole, tmp_path / "all")
    out = capsys.readouterr().out
    assert "resumed from update 2, step 64" in out
    assert [x["seed"] for x in result.summary["members"]] == [5, 6, 5, 6]
    assert "by the mean over 2 seeds" in out
    assert out.rstrip().endswith("--config.num_seeds=2")
    for i in (1, 3):
        rows = read_rows(tmp_path / "all" / f"member_{i}")
        alone = train(whole.alone(whole.members[i]), quiet=True)
        for name in ("loss/total", "loss/grad_norm", EVALUATION):
            assert rows[-1][name] == alone.metrics[-1][name]
    best = result.summary["best_member"]
    returns = [x["eval_return_mean"] for x in result.summary["members"]]
    assert best == int(np.argmax(returns))
    assert json.loads((tmp_path / "all" / "summary.json").read_text()) == result.summary
    alone = [
        json.loads((tmp_path / "all" / f"member_{i}" / "summary.json").read_text())
        for i in range(4)
    ]
    assert (result.summary["seed"], result.summary["num_seeds"]) == (5, 2)
    assert result.summary["eval_return_mean"] == pytest.approx(np.mean(returns))
    assert result.summary["wall_seconds"] == pytest.approx(sum(x["wall_seconds"] for x in alone))
    assert result.summary["seconds"].keys() == alone[0]["seconds"].keys()
    # It has neither rows of its own nor weights.
    for use in (partial(show_run, out=None, width=None, verbose=False), saved_run.evaluate):
        with pytest.raises(ConfigError, match=r"agents in turn; specify one .*/member_0"):
            use(tmp_path / "all")
    # As the plot of a sweep reads it.
    points = read_sweep(tmp_path / "all", EVALUATION)
    means = [np.mean(returns[:2]), np.mean(returns[2:])]
    np.testing.assert_allclose([point.value[-1] for point in points], means)
    with pytest.raises(ConfigError, match="num_seeds=2, not 1, which can't change"):
        train(sebulba_config(**SWEEP, sweep={"learning_rate": [1e-3]}, seed=5), tmp_path / "all")


def test_seeds_are_reported_by_their_mean(capsys):
    result = train(sebulba_config(**SWEEP, num_seeds=2))
    assert re.search(r"evaluation [\d.]+ ± [\d.]+ over 2 seeds\n$", capsys.readouterr().out)
    assert [each["name"] for each in result.summary["members"]] == ["seed_0", "seed_1"]


def test_one_that_diverges_does_not_end_the_others(tmp_path):
    changes = {**SWEEP, "max_grad_norm": 0.0}
    whole = sebulba_config(**changes, sweep={"value_cost": [1e38, 0.5]})
    result = train(whole, tmp_path, quiet=True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.weights))
    assert [x["diverged"] for x in result.summary["members"]] == [True, False]
    assert result.summary["members"][0]["eval_return_mean"] is None
    assert result.summary["best_member"] == 1
    with pytest.raises(DivergedError, match="each of the 2 agents has diverged"):
        train(sebulba_config(**changes, sweep={"value_cost": [1e38, 2e38]}), quiet=True)


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        (
            {"selection__every": 2, "population": 4, "sweep": {"discount": "uniform(0.8, 1)"}},
            {},
            "selection.every=2 is for environments written in JAX; set it to 0",
        ),
        (
            {"num_seeds": 2},
            {
                "JAX_COORDINATOR_ADDRESS": "localhost:5001",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
            },
            "trains 2 agents in turn, .* and there are 2 processes; start one process for all",
        ),
    ],
)
def test_what_runs_in_turn_can_not_do_is_rejected(changes, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        train(sebulba_config(**SWEEP, **changes), quiet=True)
