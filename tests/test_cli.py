"""The command line: exit codes, one-line errors before anything compiles, files of a run."""

import contextlib
import importlib
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import podracer
from podracer import anakin, cli
from podracer.config import Config, default_config, parse, sizes
from podracer.errors import ConfigError
from podracer.workdir import Workdir

CARTPOLE = str(pathlib.Path(__file__).parent.parent / "configs" / "cartpole.py")
SMALL = [
    "--config.total_steps=2000", "--config.num_envs=8", "--config.unroll_length=16",
    "--config.num_epochs=1", "--config.network.hidden=(8,)",
]  # fmt: skip


def small():
    """An update that compiles soon."""
    config = default_config()
    config.total_steps, config.num_envs, config.unroll_length = 128, 8, 16
    config.num_epochs = config.num_minibatches = 1
    return config


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
    "environments by devices": (
        ["--config.num_envs=12", "--config.cpu_devices=8"],
        "num_envs=12 does not divide over 8",
    ),
    "batch by minibatches": (
        ["--config.num_minibatches=7"],
        "num_minibatches=7 does not divide the",
    ),
    "sequences by minibatches": (
        ["--config.agent=vtrace", "--config.cpu_devices=8"],
        "does not divide the 1 items",
    ),
    "continuous on discrete": (["--config.network.initial_log_std=-1"], "discrete"),
    "zero": (["--config.num_envs=0"], "num_envs must be positive, got 0"),
    "negative": (["--config.unroll_length=-5"], "unroll_length must be positive, got -5"),
    "discount": (["--config.discount=1.5"], "discount must be in [0, 1], got 1.5"),
    "too late": (["--config.cpu_devices=9"], "cpu_devices=9, but JAX already runs with 8"),
    "seed": (["--config.seed=4294967296"], "seed must be below 2^32, got 4294967296"),
    "environment's argument": (
        ["--config.env=dummy:counting", "--config.env_kwargs.lenght=3"],
        "dummy:counting does not take env_kwargs={'lenght': 3}",
    ),
    "environment's parameter": (
        ["--config.env_params.gravitas=3"],
        "unknown parameter of gymnax:CartPole-v1 in env_params 'gravitas'; did you mean gravity",
    ),
    "environment's parameter's type": (
        ["--config.env_params.gravity=low"],
        "env_params.gravity of gymnax:CartPole-v1 is 9.8, got 'low'",
    ),
    "module": (["--config.env=podracer.nothere:Env"], "there is no module 'podracer.nothere'"),
    "no value": (["--config.env_params.gravity", "3"], "needs its value after an equals sign"),
    "extra": (["everything"], "unexpected arguments: everything"),
}


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compiles(*args):
        raise AssertionError("compiled")

    # By the module's name: the package shows its function of the same name.
    module = importlib.import_module("podracer.anakin.train")
    monkeypatch.setattr(module, "compile_program", compiles)


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_end_in_one_line_and_exit_code_2(name, tmp_path, capsys, nothing_compiles):
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


def test_unwritable_workdir(tmp_path, capsys, nothing_compiles):
    (tmp_path / "run").write_text("a file is in the way")
    assert run(tmp_path) == cli.BAD_CONFIG
    assert "is not writable" in capsys.readouterr().err


def test_unwritable_checkpoints(tmp_path, capsys, nothing_compiles):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file is in the way")
    assert run(tmp_path) == cli.BAD_CONFIG
    assert "run/checkpoints' is not writable" in capsys.readouterr().err


def test_a_tracker_whose_package_is_missing(tmp_path, capsys, monkeypatch, nothing_compiles):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(tmp_path, "--config.logging.wandb") == cli.BAD_CONFIG
    assert "pip install 'podracer[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_workdir_of_a_run_that_is_going_on(tmp_path, capsys, nothing_compiles):
    with contextlib.closing(Workdir(tmp_path / "run", restart=False, say=print)):
        assert run(tmp_path) == cli.BAD_CONFIG
    assert "belongs to a run that is going on" in capsys.readouterr().err


def test_workdir_that_can_not_be_moved_aside(tmp_path, capsys, monkeypatch, nothing_compiles):
    (tmp_path / "config.json").write_text('{"config": {}, "sizes": {}}')
    monkeypatch.chdir(tmp_path)
    argv = ["anakin", f"--config={CARTPOLE}", "--workdir=.", "--restart", *SMALL]
    assert cli.main(anakin.train, argv) == cli.BAD_CONFIG
    assert "can't be moved aside" in capsys.readouterr().err


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
    changes = ["--config.seed=7", "--config.evaluation.every=4", "--config.cpu_devices=8"]
    assert run(tmp_path, *changes, "--config.env_params.gravity=9.5") == cli.OK
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
    assert config["config"]["env_params"] == {"gravity": 9.5}
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

    # Begun anew, nothing of the first run is lost.
    assert run(tmp_path, *changes, "--restart") == cli.OK
    assert json.loads((tmp_path / "run.1" / "summary.json").read_text()) == summary


def test_an_earlier_run_in_the_same_process_does_not_decide_the_devices(tmp_path):
    """As in a notebook: one run splits the CPU in two, the next one's sizes fit one device only."""
    code = """
import podracer
config = podracer.config.default_config()
config.total_steps, config.num_envs, config.unroll_length = 8192, 64, 128
config.num_epochs = config.num_minibatches = 1
assert len(podracer.anakin.train(config, quiet=True).metrics) == 1
config.num_envs, config.agent, config.evaluation.episodes = 4, "vtrace", 4
config.num_minibatches = 4
result = podracer.anakin.train(config, "run", quiet=True)
assert len(result.weights.params["value"]["value"]["kernel"].sharding.device_set) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_training_from_python_returns_weights_and_metrics():
    config = small()
    config.total_steps = 2000
    result = podracer.anakin.train(config, quiet=True)
    assert result.summary["env_steps"] == 2048
    assert result.metrics[-1]["step"] == 2048
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.weights.params))


def test_evaluation_never_hangs_on_an_episode_that_does_not_end():
    config = small()
    config.env = "dummy:counting"
    config.env_kwargs = {"length": 1_000_000}
    config.evaluation.max_steps, config.evaluation.episodes = 20, 11
    row = anakin.train(config, quiet=True).metrics[-1]
    assert (row["eval/episodes"], row["eval/complete"]) == (11, 0)
    assert row["eval/episode_length"] == 20
    assert row["eval/episode_return"] == sum(range(21))


def test_what_is_truncated_at_the_cap_is_complete():
    """That an episode was truncated shows in the step after its last, which is past the cap."""
    config = small()
    config.env_params = {"max_steps_in_episode": 5}
    config.evaluation.episodes = 4
    for cap, complete in ((4, 0), (5, 4)):
        config.evaluation.max_steps = cap
        row = anakin.train(config, quiet=True).metrics[-1]
        assert row["eval/complete"] == complete
        assert row["eval/episode_length"] == row["eval/episode_return"] == min(cap, 5)


def test_evaluation_samples_where_it_is_not_greedy():
    config = small()
    config.env, config.evaluation.episodes = "dummy:choice", 64
    for greedy in (True, False):
        config.evaluation.greedy = greedy
        row = anakin.train(config, quiet=True).metrics[-1]
        # +1 or -1 an episode: an untrained policy chooses at random, its mode is a fixed answer.
        assert (abs(row["eval/episode_return"]) < 0.5) or greedy
        assert row["eval/episode_return_std"] > 0.5 or greedy


def test_environment_parameters_come_from_the_config():
    config = small()
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


def test_a_call_is_never_longer_than_the_run():
    made = sizes(Config(total_steps=100, num_envs=2, unroll_length=5, updates_per_call=1000), 1)
    assert made.total_steps == 100


def test_sizes_are_rounded_up_to_whole_calls():
    found = sizes(parse({"total_steps": 1001, "num_envs": 4, "unroll_length": 5}), 2)
    assert (found.envs_per_device, found.steps_per_update) == (2, 20)
    assert (found.num_updates, found.total_steps) == (51, 1020)
    found = sizes(parse({"total_steps": 1_000_000, "num_envs": 4, "unroll_length": 5}), 1)
    assert (found.updates_per_call, found.num_calls) == (100, 500)
