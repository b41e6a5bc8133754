"""The command line: exit codes, one-line errors before anything compiles, files of a run."""

import importlib
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

import podracer
from podracer import anakin, cli
from podracer.config import Config, default_config, parse, sizes
from podracer.errors import ConfigError

CARTPOLE = str(pathlib.Path(__file__).parent.parent / "configs" / "cartpole.py")
SMALL = ["--config.total_steps=2000", "--config.num_envs=8", "--config.unroll_length=16"]


def run(tmp_path, *arguments, config=CARTPOLE) -> int:
    argv = ["anakin", f"--config={config}", f"--workdir={tmp_path / 'run'}", *SMALL, *arguments]
    return cli.main(anakin.train, argv)


BAD = {
    "environment": (["--config.env=gymnax:CartPol-v1"], "did you mean CartPole-v1"),
    "suite": (["--config.env=gymnac:CartPole-v1"], "did you mean gymnax"),
    "agent": (["--config.agent=pp"], "unknown agent 'pp'; did you mean ppo"),
    "network": (["--config.network.torso=resnt"], "did you mean resnet"),
    "activation": (["--config.network.activation=reluu"], "did you mean relu"),
    "key": (["--config.totl_steps=3"], "did you mean total_steps"),
    "key in a section": (["--config.ppo.clp=3"], "did you mean ppo.clip"),
    "type": (["--config.seed=first"], "first"),
    "environments by devices": (["--config.num_envs=12"], "num_envs=12 does not divide over 8"),
    "batch by minibatches": (
        ["--config.num_minibatches=7"],
        "num_minibatches=7 does not divide the",
    ),
    "sequences by minibatches": (["--config.agent=vtrace"], "does not divide the 1 items"),
    "continuous on discrete": (["--config.network.initial_log_std=-1"], "discrete"),
    "zero": (["--config.num_envs=0"], "num_envs must be positive, got 0"),
    "negative": (["--config.unroll_length=-5"], "unroll_length must be positive, got -5"),
    "discount": (["--config.discount=1.5"], "discount must be in [0, 1], got 1.5"),
    "too late": (["--config.cpu_devices=3"], "cpu_devices=3, but JAX already runs with 8"),
    "extra": (["everything"], "unexpected arguments: everything"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_end_in_one_line_and_exit_code_2(name, tmp_path, capsys, monkeypatch):
    def compiles(*args):
        raise AssertionError("compiled")

    # By the module's name: the package shows its function of the same name.
    module = importlib.import_module("podracer.anakin.train")
    monkeypatch.setattr(module, "compile_program", compiles)
    arguments, message = BAD[name]
    assert run(tmp_path, *arguments) == cli.BAD_CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_config_files_that_are_none(tmp_path, capsys, monkeypatch):
    # ml_collections loads every config file of a process into one module, on top of the last.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    assert run(tmp_path, config=tmp_path / "missing.py") == cli.BAD_CONFIG
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert run(tmp_path, config=tmp_path / "empty.py") == cli.BAD_CONFIG
    errors = capsys.readouterr().err.splitlines()
    assert "missing.py is no file" in errors[0]
    assert "empty.py defines no function get_config()" in errors[1]
    assert len(errors) == 2
    assert cli.main(anakin.train, ["anakin"]) == cli.BAD_CONFIG


def test_unwritable_workdir(tmp_path, capsys):
    (tmp_path / "run").write_text("a file is in the way")
    assert run(tmp_path) == cli.BAD_CONFIG
    assert "is not writable" in capsys.readouterr().err


def test_divergence_ends_in_exit_code_3_and_keeps_what_was_written(tmp_path, capsys):
    arguments = ["--config.learning_rate=1e30", "--config.updates_per_call=1"]
    assert run(tmp_path, *arguments) == cli.DIVERGED
    error = capsys.readouterr().err
    assert "became NaN or infinite between environment steps" in error
    assert error.count("\n") == 1
    assert (tmp_path / "run" / "config.json").exists()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_interruption_has_its_own_code(tmp_path, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    assert cli.main(interrupted, ["anakin", f"--config={CARTPOLE}"]) == cli.INTERRUPTED


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    assert run(tmp_path, "--config.seed=7", "--config.evaluation.every=4") == cli.OK
    out = capsys.readouterr().out
    assert "8 = 8 x 1" in out
    assert "steps a second" in out
    workdir = tmp_path / "run"
    summary = json.loads((workdir / "summary.json").read_text())
    assert {
        "env_steps",
        "wall_seconds",
        "compile_seconds",
        "steps_per_second",
        "eval_return_mean",
        "eval_return_std",
        "eval_episodes",
        "seed",
    } <= summary.keys()
    assert summary["seed"] == 7
    assert summary["env_steps"] == 2048
    config = json.loads((workdir / "config.json").read_text())
    assert config["config"]["num_envs"] == 8
    assert config["sizes"]["num_updates"] == 16
    assert config["versions"]["jax"] == jax.__version__
    assert len(config["devices"]) == 8
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == [128 * (i + 1) for i in range(16)]
    for row in rows:
        assert {"wall_time", "time/steps_per_second", "loss/total"} <= row.keys()
        assert ("eval/episode_return" in row) == (row["step"] % 512 == 0)
    assert any("train/episode_return" in row for row in rows)

    # The same command again: nothing of the first run is lost.
    assert run(tmp_path) == cli.OK
    assert json.loads((tmp_path / "run.1" / "summary.json").read_text()) == summary


def test_training_from_python_returns_weights_and_metrics():
    config = default_config()
    config.total_steps, config.num_envs, config.unroll_length = 2000, 8, 16
    result = podracer.anakin.train(config, quiet=True)
    assert result.summary["env_steps"] == 2048
    assert result.metrics[-1]["step"] == 2048
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.weights.params))


def test_evaluation_never_hangs_on_an_episode_that_does_not_end():
    config = default_config()
    config.total_steps, config.num_envs, config.unroll_length = 128, 8, 16
    config.env = "dummy:counting"
    config.env_kwargs = {"length": 1_000_000}
    config.evaluation.max_steps, config.evaluation.episodes = 20, 11
    row = anakin.train(config, quiet=True).metrics[-1]
    assert (row["eval/episodes"], row["eval/complete"]) == (11, 0)
    assert row["eval/episode_length"] == 20
    assert row["eval/episode_return"] == sum(range(21))


def test_environment_parameters_come_from_the_config():
    config = default_config()
    config.total_steps, config.num_envs, config.unroll_length = 1024, 8, 16
    config.env_params = {"max_steps_in_episode": 5}
    row = anakin.train(config, quiet=True).metrics[-1]
    assert row["eval/episode_length"] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": "many"}, "num_envs must be of type int, got 'many'"),
        ({"discount": float("nan")}, "discount must be of type float, got nan"),
        ({"network": 3}, "network is a section, got 3"),
        ({"network": {"hidden": (1, "a")}}, "network.hidden must be of type"),
        ({"evaluation": {"episodes": 0}}, "evaluation.episodes"),
        ({"numenvs": 3}, "did you mean num_envs"),
    ],
)
def test_parse_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(change)


def test_parse_is_the_inverse_of_default_config():
    assert parse(default_config()) == Config()


def test_sizes_are_rounded_up_to_whole_calls():
    found = sizes(parse({"total_steps": 1001, "num_envs": 4, "unroll_length": 5}), 2)
    assert (found.envs_per_device, found.steps_per_update) == (2, 20)
    assert (found.num_updates, found.total_steps) == (51, 1020)
    found = sizes(parse({"total_steps": 1_000_000, "num_envs": 4, "unroll_length": 5}), 1)
    assert (found.updates_per_call, found.num_calls) == (500, 100)
