"""``podracer.train``: one line from Python."""

import importlib

import numpy as np
import pytest

import podracer
from podracer import envs
from podracer.errors import ConfigError
from podracer.storage.workdir import read_config

# Settings with which a run compiles and ends quickly.
SMALL = {
    "total_steps": 128,
    "num_envs": 8,
    "unroll_length": 16,
    "num_epochs": 1,
    "num_minibatches": 1,
    "network": {"hidden": (16,)},
    "evaluation": {"episodes": 8, "max_steps": 20},
    "quiet": True,
}


def test_training_returns_weights_metrics_summary_and_policy(tmp_path, capsys):
    settings = {**SMALL, "total_steps": 2048, "num_epochs": 4, "learning_rate": 1e-2, "seed": 3}
    result = podracer.train("dummy:choice", agent="vtrace", workdir=tmp_path / "run", **settings)
    assert result.summary["env_steps"] == result.metrics[-1]["step"] == 2048
    assert result.summary["seed"] == 3
    # The observation says which of the two actions is right.
    assert [int(result.policy(np.array([x]))) for x in (1.0, -1.0, 1.0)] == [1, 0, 1]
    content = read_config(tmp_path / "run")
    assert content["architecture"] == "anakin"
    assert (content["config"]["agent"], content["config"]["learning_rate"]) == ("vtrace", 1e-2)
    # Other settings of a section keep their defaults.
    assert content["config"]["network"]["hidden"] == [16]
    assert content["config"]["network"]["torso"] == "mlp"
    assert capsys.readouterr().out == ""


def test_host_environments_are_trained_in_by_sebulba(tmp_path):
    result = podracer.train("envpool:CartPole-v1", workdir=tmp_path / "run", **SMALL)
    assert read_config(tmp_path / "run")["architecture"] == "sebulba"
    assert result.policy(np.zeros(4)) in (0, 1)


@pytest.mark.slow
def test_several_agents_have_the_first_ones_policy():
    result = podracer.train("gymnax:Pendulum-v1", num_seeds=2, **SMALL)
    action = result.policy(np.zeros(3))
    # In the environment's own units.
    assert action.shape == (1,)
    assert -2 <= action.item() <= 2
    members = result.summary["members"]
    assert [each["seed"] for each in members] == [0, 1]
    mean = np.mean([each["eval_return_mean"] for each in members])
    assert mean == pytest.approx(result.summary["eval_return_mean"])


@pytest.mark.parametrize(
    ("env", "architecture"),
    [
        ("gymnax:CartPole-v1", "anakin"),
        ("dummy:counting", "anakin"),
        ("my_module:MyEnv", "anakin"),
        ("envpool:Pong-v5", "sebulba"),
        ("gymnasium:LunarLander-v3", "sebulba"),
    ],
)
def test_the_architecture_follows_from_the_environment(env, architecture):
    assert envs.architecture(env) == architecture


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"totl_steps": 3}, "unknown setting 'totl_steps'; did you mean total_steps"),
        ({"quit": True}, "unknown setting 'quit'; did you mean quiet"),
        ({"ppo": {"clp": 0.1}}, r"unknown config key 'ppo\.clp'; did you mean ppo\.clip"),
        ({"total_steps": "many"}, "total_steps must be a whole number, got 'many'"),
        ({"profile": -1}, "profile=-1 must not be negative"),
        ({"ppo": {"objective": "kl"}}, r"unknown ppo\.objective 'kl'"),
        ({"ppo": {"objective": "kl_penalty"}}, r"needs a positive ppo\.target_kl, such as 0\.01"),
        (
            {"ppo": {"objective": "kl_penalty", "target_kl": 0.01}, "num_epochs": 1},
            "needs a num_epochs of at least 2, got 1",
        ),
        ({"agent": "vtrace", "vtrace": {"clip": -0.1}}, r"vtrace\.clip must be 0 .*, got -0\.1"),
        ({"agent": "dqn", "whole_episodes": True}, "whole_episodes=True is for agents that learn"),
        ({"stagger": 3, "whole_episodes": True}, "stagger=3 has no effect with whole_episodes"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_compiles(settings, message, monkeypatch):
    def compiles(*args):
        raise AssertionError("compiled")

    trainer = importlib.import_module("podracer.anakin.trainer")
    monkeypatch.setattr(trainer, "compile_program", compiles)
    with pytest.raises(ConfigError, match=message):
        podracer.train("gymnax:CartPole-v1", **settings)
