"""Evaluation of a saved run: known numbers, the run's own, real GIFs, permissions, errors."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

from podracer import anakin, envs, evaluate, look, plot, sebulba
from podracer.acting import rendering
from podracer.acting.policy import Policy
from podracer.errors import ConfigError, ExitCode
from podracer.training import builder, saved_run
from podracer.xla_cpu import prng
from tests.helpers import ROOT, is_one_error, make_config

HOST = ("envpool", "gymnasium")


@pytest.fixture
def left_by(tmp_path, monkeypatch):
    """Makes the workdir of a run of this config, with untrained weights, after 3 updates."""

    def leave(config, on_host=False):
        content = {
            "config": dataclasses.asdict(config),
            "architecture": "sebulba" if on_host else "anakin",
            "sizes": {},
        }
        (tmp_path / "config.json").write_text(json.dumps(content))
        make = envs.make_host_environment if on_host else envs.make_environment
        env = make(config.env, config.env_kwargs, config.env_params)
        weights = builder.make_agent(config, env.spec).init(prng.key(config.seed))
        loaded = []

        def find(workdir, which):
            loaded.append(which)
            return 3

        def load_weights(workdir, which, like):
            assert (str(workdir), which) == (str(tmp_path), 3)
            shapes, expected = (jax.tree.map(np.shape, tree) for tree in (like, weights))
            assert shapes == expected
            return jax.device_put(weights, jax.devices()[0]), 3

        monkeypatch.setattr(saved_run.checkpoint, "find", find)
        monkeypatch.setattr(saved_run.checkpoint, "load_weights", load_weights)
        return tmp_path, loaded

    return leave


def command(*arguments) -> int:
    return evaluate.main(["evaluate", *map(str, arguments)])


@pytest.mark.parametrize("on_host", [False, True])
def test_numbers_known_by_hand(on_host, left_by):
    """Episodes of 3 and of 4 steps, whose rewards count: returns of 6 and of 10."""
    config = make_config(env="dummy:counting", env_kwargs={"length": 3, "vary": 1})
    workdir, _ = left_by(config, on_host)
    result = saved_run.evaluate(workdir, num_episodes=24)
    assert (result["episodes"], result["complete"]) == (24, 24)
    assert (result["return_min"], result["return_max"]) == (6, 10)
    share = (result["return_mean"] - 6) / 4
    assert 0.2 < share < 0.8
    np.testing.assert_allclose(result["return_std"], 4 * np.sqrt(share * (1 - share)), rtol=1e-5)
    np.testing.assert_allclose(result["length_mean"], 3 + share, rtol=1e-5)
    assert (result["update"], result["env_steps"]) == (3, 3 * 8 * 8)


def test_the_command_prints_what_python_returns(left_by, capsys):
    workdir, loaded = left_by(make_config(env="dummy:counting", env_kwargs={"vary": 0}))
    expected = saved_run.evaluate(workdir, weights="best", num_episodes=3, seed=5, greedy=False)
    arguments = (f"--workdir={workdir}", "--weights=best", "--episodes=3", "--seed=5", "--nogreedy")
    assert command(*arguments, "--json") == ExitCode.OK
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == expected
    assert (expected["seed"], expected["greedy"], expected["weights"]) == (5, False, "best")
    assert loaded == ["best", "best"]
    assert command(*arguments) == ExitCode.OK
    out = capsys.readouterr().out
    assert "3 episodes, sampled, seed 5" in out
    assert "return 15.00 ± 0.00, from 15.00 to 15.00" in out
    assert "length 5.000" in out


def test_greedy_or_sampled(left_by):
    """An action half way to the cue earns most; an untrained mean is near 0, a sample anywhere."""
    workdir, _ = left_by(make_config(env="dummy:choice", env_kwargs={"continuous": True}))
    spread = {
        greedy: saved_run.evaluate(workdir, num_episodes=64, greedy=greedy)["return_std"]
        for greedy in (True, False, None)
    }
    assert spread[True] < 0.1
    assert spread[False] > 0.2
    assert spread[None] == spread[True]


def test_a_seed_is_one_set_of_episodes(left_by):
    workdir, _ = left_by(make_config())
    results = [
        saved_run.evaluate(workdir, seed=seed, greedy=False)["return_mean"] for seed in (None, 0, 1)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (anakin.train, {"env": "gymnax:CartPole-v1", "network__core": "gru"}),
        # Environments of a group explore at its rates.
        pytest.param(
            anakin.train,
            {
                "agent": "dqn",
                "averaging__groups": 2,
                "evaluation__greedy": False,
                "dqn__epsilon": 0.5,
                "replay__begin": 200,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(sebulba.train, {"env": "envpool:CartPole-v1"}, marks=pytest.mark.slow),
    ],
)
def test_the_run_s_own_last_evaluation_is_reproduced(train, changes, tmp_path, monkeypatch):
    common = {
        "agent": "vtrace",
        "num_envs": 16,
        "total_steps": 16 * 8 * 20,
        "seed": 3,
        "normalize_observations": True,
        "cpu_devices": 2,
        "learning_rate": 1e-3,
    }
    config = make_config(**{**common, **changes})
    run = train(config, tmp_path, quiet=True)
    steps = run.summary["env_steps"]
    update = steps // (config.num_envs * config.unroll_length)
    monkeypatch.setattr(saved_run.checkpoint, "find", lambda *_: update)
    monkeypatch.setattr(saved_run.checkpoint, "load_weights", lambda *_: (run.weights, update))
    result = saved_run.evaluate(tmp_path)
    assert result["return_mean"] == run.summary["eval_return_mean"]
    assert result["return_std"] == run.summary["eval_return_std"] > 0
    assert (result["env_steps"], result["seed"]) == (steps, 3)
    assert result["length_mean"] == run.metrics[-1]["eval/episode_length"]


@pytest.mark.parametrize(
    ("env_id", "max_steps", "after_end"),
    [
        # gymnax shows no state after a termination.
        ("gymnax:CartPole-v1", 500, 0),
        pytest.param("gymnax:Breakout-MinAtar", 3, 1, marks=pytest.mark.slow),
        pytest.param("envpool:Pong-v5", 40, 1, marks=pytest.mark.slow),
        ("envpool:LunarLander-v3", 6, 1),
        ("gymnasium:CartPole-v1", 500, 1),
    ],
)
def test_an_episode_becomes_an_animated_gif(env_id, max_steps, after_end, left_by, tmp_path):
    """The episode in the GIF is one of the evaluation, also with a GRU and normalisation."""
    on_host = env_id.startswith(HOST)
    changes = {"network__core": "gru", "normalize_observations": True}
    if env_id == "envpool:Pong-v5":
        changes = {"network__torso": "pixels"}
    config = make_config(env=env_id, evaluation__max_steps=max_steps, **changes)
    workdir, _ = left_by(config, on_host)
    gif = tmp_path / "pictures" / "out.gif"
    result = saved_run.evaluate(workdir, num_episodes=1, greedy=False, gif=gif)
    assert result["gif"] == str(gif)
    assert result["gif_return"] == result["return_mean"]
    steps = result["gif_length"]
    assert steps == result["length_mean"] <= max_steps
    assert result["gif_frames"] == steps + after_end
    with Image.open(gif) as image:
        frames = [frame.copy().convert("RGB") for frame in ImageSequence.Iterator(image)]
        shown = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    # Equal consecutive frames are merged into one that is shown for longer.
    assert sum(shown) == (steps + after_end) * rendering.MILLISECONDS
    assert 1 < len(frames) <= steps + after_end
    assert len({frame.tobytes() for frame in frames}) > 1
    assert rendering.SIDE / 2 < max(frames[0].size) <= rendering.SIDE
    # Neither blank nor noise.
    assert 1 < len(frames[0].getcolors(rendering.COLORS)) <= rendering.COLORS


BAD = {
    "no workdir": ([], "--workdir is missing"),
    "no run": (["--workdir=nothing/here"], "'nothing/here' is not a run"),
    "weights": (["--weights=first"], "--weights=first must be last, best, or the number"),
    "episodes": (["--episodes=0"], "evaluation.episodes"),
    "seed": (["--seed=-1"], "seed must not be negative, got -1"),
    "frames": (["--gif_frames=1"], "--gif_frames=1 must be 2 or more"),
    "flag": (["--gif_frame=3"], "Unknown command line flag 'gif_frame'"),
    "member": (["--member=1"], "--member=1 must be best, or from 0 to 0: the run has 1 agents"),
    "extra": (["everything"], "unexpected arguments: everything"),
    "not a GIF": (["--gif=out.mp4"], "--gif=out.mp4 must end in .gif, as out.gif does"),
    "a file in the way": (["--gif=config.json/out.gif"], "can't be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_end_in_one_line_and_exit_code_2(
    name, left_by, capsys, monkeypatch, nothing_plays
):
    arguments, message = BAD[name]
    workdir, _ = left_by(make_config())
    monkeypatch.chdir(workdir)
    given = [] if name == "no workdir" else [f"--workdir={workdir}"]
    assert command(*given, *arguments) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert is_one_error(error)


@pytest.fixture
def nothing_plays(monkeypatch):
    def plays(*args):
        raise AssertionError("played")

    monkeypatch.setattr(saved_run, "summarize", plays)


def test_an_update_rule_has_no_policy(left_by, capsys, nothing_plays):
    workdir, _ = left_by(make_config(env="grid:3x3"))
    path = workdir / "config.json"
    path.write_text(path.read_text().replace('"architecture": "anakin"', '"architecture": "meta"'))
    assert command(f"--workdir={workdir}") == ExitCode.CONFIG
    assert "is a run of podracer.anakin.meta" in capsys.readouterr().err


def test_a_run_without_weights(left_by, capsys, monkeypatch, nothing_plays):
    workdir, _ = left_by(make_config())

    def find(*_):
        raise ConfigError("holds no checkpoints")

    monkeypatch.setattr(saved_run.checkpoint, "find", find)
    assert command(f"--workdir={workdir}") == ExitCode.CONFIG
    assert "holds no checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env_id", "on_host"),
    [
        ("dummy:counting", False),
        ("dummy:counting", True),
        ("gymnax:MemoryChain-bsuite", False),
        ("envpool:Taxi-v3", True),
    ],
)
def test_an_environment_that_can_not_be_drawn_is_rejected_before_anything_is_played(
    env_id, on_host, left_by, capsys, nothing_plays
):
    workdir, _ = left_by(make_config(env=env_id), on_host)
    assert command(f"--workdir={workdir}", f"--gif={workdir}/out.gif") == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert f"{env_id} can't be drawn" in error
    assert is_one_error(error)
    assert not (workdir / "out.gif").exists()


@pytest.mark.parametrize("env_id", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"])
def test_a_missing_package_for_drawing_is_named(env_id, left_by, monkeypatch, nothing_plays):
    monkeypatch.setitem(sys.modules, "pygame", None)
    workdir, _ = left_by(make_config(env=env_id), env_id.startswith(HOST))
    with pytest.raises(ConfigError, match=r"pygame|\[render\]"):
        saved_run.evaluate(workdir, gif=workdir / "out.gif")


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_checkpoints_of_each_member_of_a_run_are_evaluated(
    tmp_path, monkeypatch, capsys, caplog
):
    """In a folder that is given as users give it, relative to where they are."""
    monkeypatch.chdir(tmp_path)
    config = make_config(total_steps=2048, seed=5, num_seeds=2)
    run = anakin.train(config, "run", quiet=True)
    left = files(tmp_path / "run")
    caplog.clear()
    own = [run.metrics[-1][f"seed_{seed}/eval/episode_return"] for seed in (5, 6)]
    assert own[0] != own[1]
    # The first member is the default.
    for which, member, flags in (("last", 0, ()), ("best", 1, ("--member=1",))):
        arguments = ("--workdir=run", f"--weights={which}", *flags)
        assert command(*arguments, "--json") == ExitCode.OK
        result = json.loads(capsys.readouterr().out)
        assert result["return_mean"] == own[member]
        assert result["env_steps"] == run.summary["env_steps"] == 2048
        assert (result["member"], result["seed"]) == (member, 5 + member)
        assert f"member {member} of 2: ppo on gymnax:CartPole-v1" in saved_run.describe(result)
    assert files(tmp_path / "run") == left, "evaluating must only read"
    assert not caplog.records, "a library warned, about what users can't change"
    assert command("--workdir=run", "--member=2") == ExitCode.CONFIG
    assert "--member=2 must be best, or from 0 to 1" in capsys.readouterr().err
    assert command("--workdir=run", "--member=best", "--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["member"] == int(np.argmax(own))

    policy = saved_run.load_policy("run", member=1)
    second = jax.tree.map(lambda x: x[1], run.weights)
    env = envs.make_environment(config.env, {}, {})
    expected = Policy(builder.make_agent(config, env.spec), second, env)
    for observation in np.random.default_rng(0).normal(0, 0.1, (20, 4)):
        assert policy(observation) == expected(observation)

    message = "--init_from=run is a run of 2 agents, and this one trains 1"
    with pytest.raises(ConfigError, match=message):
        anakin.train(make_config(), tmp_path / "next", init_from="run", quiet=True)


STRANGERS = {
    "a class of any module": (
        "evil_module:Environment",
        {},
        False,
        "imports the module 'evil_module'",
        "must be a class derived from",
    ),
    "a function of any module": (
        "subprocess:Popen",
        {"args": ["touch", "MARKER"]},
        False,
        "imports the module 'subprocess'",
        "is not a gymnax environment",
    ),
    "a module that registers environments": (
        "gymnasium:evil_module:Evil-v0",
        {},
        True,
        "imports the module 'evil_module'",
        "'evil_module' registers no environment",
    ),
    "a program": (
        "envpool:Basic-v1",
        {"vzd_path": "MARKER"},
        True,
        r"has env_kwargs.vzd_path='.*', which may name a file or a program",
        None,
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_s_workdir_runs_nothing_without_permission(
    name, left_by, tmp_path, monkeypatch, nothing_plays
):
    env_id, kwargs, on_host, reason, then = STRANGERS[name]
    marker = tmp_path / "marker"
    kwargs = json.loads(json.dumps(kwargs).replace("MARKER", str(marker)))
    evil = tmp_path / "modules" / "evil_module.py"
    evil.parent.mkdir()
    evil.write_text(f"open({str(marker)!r}, 'w').close()\nclass Environment: pass\n")
    monkeypatch.syspath_prepend(evil.parent)
    workdir, _ = left_by(make_config(env="dummy:counting"), on_host)
    config = json.loads((workdir / "config.json").read_text())
    config["config"] |= {"env": env_id, "env_kwargs": kwargs}
    (workdir / "config.json").write_text(json.dumps(config))
    hint = re.escape(f"add --allow_env={env_id} (from Python: allow_env={env_id!r})")
    for play in (saved_run.evaluate, saved_run.load_policy):
        # Permission for another environment does not permit this one.
        for other in (None, "evil_module:Other"):
            with pytest.raises(ConfigError, match=f"{re.escape(env_id)}' {reason}.*{hint}"):
                play(workdir, allow_env=other)
    assert not marker.exists()
    assert "evil_module" not in sys.modules
    if then is not None:
        with pytest.raises(ConfigError, match=then):
            saved_run.evaluate(workdir, allow_env=env_id)
        assert marker.exists() == ("evil_module" in env_id)
        sys.modules.pop("evil_module", None)


def test_drawing_a_stranger_s_run_imports_nothing_that_it_names(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    config = dataclasses.asdict(make_config()) | {"env": "evil_module:Environment"}
    content = {"config": config, "architecture": "anakin", "sizes": {"total_steps": 8}}
    (run / "config.json").write_text(json.dumps(content))
    row = {"step": 4, "wall_time": 1.0, "train/episode_return": 1.0, "train/episodes": 1}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert look.main([str(run)]) == ExitCode.OK
    assert plot.main([str(run), f"--out={tmp_path / 'curve'}"]) == ExitCode.OK
    assert not marker.exists()


@pytest.mark.slow
def test_processes_of_environments_do_not_import_jax(tmp_path, monkeypatch):
    """JAX takes 120 MB in each. They import the main module, so that it depends on the command."""
    (tmp_path / "light.py").write_text(
        "import multiprocessing, sys, gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Light(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        in_a_process = multiprocessing.parent_process() is not None\n"
        "        assert not in_a_process or 'jax' not in sys.modules\n"
        "        return super().step(action)\n"
        "gymnasium.register('Light-v0', Light, max_episode_steps=20)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env_id = "gymnasium:light:Light-v0"
    small = {"num_envs": 4, "total_steps": 4 * 8, "evaluation__episodes": 2, "cpu_devices": 1}
    sebulba.train(make_config(env=env_id, **small), tmp_path / "run", quiet=True)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "podracer.evaluate",
            f"--workdir={tmp_path / 'run'}",
            f"--allow_env={env_id}",
        ],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def test_an_own_environment_is_evaluated_with_permission(left_by, capsys):
    env_id = "tests.envs.test_envs:Corridor"
    workdir, _ = left_by(make_config(env=env_id, evaluation__max_steps=4))
    assert command(f"--workdir={workdir}") == ExitCode.CONFIG
    flag = f"--allow_env={env_id}"
    assert flag in capsys.readouterr().err
    assert command(f"--workdir={workdir}", flag) == ExitCode.OK
    assert f"ppo on {env_id}" in capsys.readouterr().out
