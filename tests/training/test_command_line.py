"""The command line: exit codes, one-line errors before anything compiles, files of a run."""

import contextlib
import importlib
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import podracer
from podracer import anakin, errors
from podracer.agents import AGENTS, dqn
from podracer.anakin import meta
from podracer.config import Config, default_config, parse
from podracer.config.sizes import make_sizes
from podracer.errors import ConfigError, ExitCode
from podracer.storage.workdir import Workdir
from podracer.training import command_line
from tests.helpers import is_one_error

CARTPOLE = pathlib.Path(__file__).parents[2] / "configs" / "cartpole.py"
SMALL = [
    "--config.total_steps=2000", "--config.num_envs=8", "--config.unroll_length=16",
    "--config.num_epochs=1", "--config.network.hidden=(8,)",
]  # fmt: skip


def small():
    """An update that compiles quickly."""
    config = default_config()
    config.total_steps, config.num_envs, config.unroll_length = 128, 8, 16
    config.num_epochs = config.num_minibatches = 1
    return config


def run(tmp_path, *arguments, config=CARTPOLE) -> int:
    argv = ["anakin", f"--config={config}", f"--workdir={tmp_path / 'run'}", *SMALL, *arguments]
    return command_line.main(anakin.train, argv)


BAD = {
    "environment": (["--config.env=gymnax:CartPol-v1"], "did you mean CartPole-v1"),
    "suite": (["--config.env=gymnac:CartPole-v1"], "did you mean gymnax"),
    "agent": (["--config.agent=pp"], "unknown agent 'pp'; did you mean ppo"),
    "network": (["--config.network.torso=resnt"], "did you mean resnet"),
    "activation": (["--config.network.activation=reluu"], "did you mean relu"),
    "key": (["--config.totl_steps=3"], "did you mean total_steps"),
    "key in a section": (["--config.ppo.clp=3"], "did you mean ppo.clip"),
    "setting as a section": (["--config.optimizer.momentum=3"], "unknown config section 'opt"),
    "section": (["--config.evaluaton.every=3"], "section 'evaluaton'; did you mean evaluation"),
    "section of a switch": (["--noconfig.evaluaton.greedy"], "section 'evaluaton'; did you mean"),
    "hyphen": (["--config.learning-rate=1e-3"], "unknown config key 'learning-rate'; did you mean"),
    "keyword": (["--config.q_lambda.lambda=0.9"], "did you mean q_lambda.lambda_"),
    "item of a list": (["--config.network.hidden[0]=3"], "did you mean network.hidden"),
    "type": (["--config.seed=first"], "--config.seed=first: must be a whole number"),
    "fraction": (["--config.total_steps=1.5"], "total_steps=1.5: must be a whole number"),
    "not finite": (["--config.discount=nan"], "discount must be a finite number, got nan"),
    "option": (["--workdr=x"], "Did you mean: workdir"),
    "setting without its prefix": (["--seed=1"], "did you mean --config.seed?"),
    "environments by devices": (
        ["--config.num_envs=12", "--config.cpu_devices=8"],
        "num_envs=12 does not divide evenly over 8",
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
    "lambda": (
        ["--config.agent=q_lambda", "--config.q_lambda.lambda_=2"],
        "q_lambda.lambda_ must be in [0, 1], got 2",
    ),
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
    "no value": (["--config.env_params.gravity", "3"], "take their value after an equals sign"),
    "extra": (["everything"], "unexpected arguments: everything"),
}


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compiles(*args):
        raise AssertionError("compiled")

    # Imported by name, because tests replace a function of this module.
    module = importlib.import_module("podracer.anakin.trainer")
    monkeypatch.setattr(module, "compile_program", compiles)


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_end_in_one_line_and_exit_code_2(name, tmp_path, capsys, nothing_compiles):
    arguments, message = BAD[name]
    assert run(tmp_path, *arguments) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert is_one_error(error)
    assert not (tmp_path / "run").exists()


CONFIG_ERRORS = {
    "cartpol": "unknown config 'cartpol'; did you mean cartpole",
    "configs/cartpol.py": "unknown config 'configs/cartpol.py'; did you mean configs/cartpole.py",
    "elsewhere/pendulum.py": "unknown config 'elsewhere/pendulum.py'; did you mean pendulum",
    "configs/cartpole.py:slow": "--config=configs/cartpole.py:slow does not fit its get_config(): ",
    "empty.py": "--config=empty.py defines no function get_config()",
    "config.json": "--config=config.json is not a Python file that defines get_config(), such as",
    "wrong.py": "get_config() of --config=wrong.py must return a ConfigDict, got 3",
    "": "--config is missing; specify a file, as in --config=my_config.py, or the name of a config "
    "that podracer ships: acrobot, atari, brax_ant,",
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_configs_that_do_not_exist_or_are_invalid(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(CARTPOLE.parent)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "config.json").write_text("{}\n")
    (tmp_path / "wrong.py").write_text("def get_config():\n    return 3\n")
    assert run(tmp_path, config=name) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith(f"error: {CONFIG_ERRORS[name]}")


def parse_command(*arguments: str):
    config, path, options = command_line.parse_config("anakin", command_line.OPTIONS, arguments)
    return parse(config), path, options


def test_a_shipped_config_is_used_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = parse_command("anakin", "--config=cartpole")
    assert by_name[0] == parse_command("anakin", "--config", str(CARTPOLE))[0]
    assert by_name[1].samefile(CARTPOLE)
    # A file of this name in the working directory comes first.
    (tmp_path / "cartpole").write_text(CARTPOLE.read_text().replace("1_000_000", "5"))
    assert parse_command("anakin", "--config=cartpole")[0].total_steps == 5


def test_two_config_files_in_one_process_do_not_mix(tmp_path):
    """ml_collections' own flag loads the second file on top of the first one's names."""
    parse_command("anakin", f"--config={CARTPOLE}")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="defines no function"):
        parse_command("anakin", f"--config={tmp_path}/empty.py")


def test_the_argument_after_a_colon_goes_to_get_config(tmp_path):
    text = CARTPOLE.read_text().replace("get_config()", "get_config(agent)")
    text = text.replace("return config", "config.agent = agent\n    return config")
    (tmp_path / "variant.py").write_text(text)
    config, path, _ = parse_command("anakin", f"--config={tmp_path}/variant.py:vtrace")
    assert (config.agent, path.name) == ("vtrace", "variant.py")


def test_flags_change_the_config_in_any_order_and_notation():
    config, _, options = parse_command(
        "anakin",
        "--config.total_steps=1e6",
        "--config.seed=1_000",
        "--config=cartpole",
        "--noconfig.anneal",
        "--quiet",
        "--config.learning_rate=1",
        "--config.network.hidden=32,16",
        "--config.env_params.gravity=9.5",
        "--config.env_kwargs={'size': 3}",
    )
    assert (config.total_steps, config.seed, config.anneal) == (1_000_000, 1000, False)
    assert (config.learning_rate, config.network.hidden) == (1.0, (32, 16))
    assert (config.env_params, config.env_kwargs) == ({"gravity": 9.5}, {"size": 3})
    assert options["quiet"]
    assert options["workdir"] is None


def test_unwritable_workdir(tmp_path, capsys, nothing_compiles):
    (tmp_path / "run").write_text("a file is in the way")
    assert run(tmp_path) == ExitCode.CONFIG
    assert "is not writable" in capsys.readouterr().err


def test_unwritable_checkpoints(tmp_path, capsys, nothing_compiles):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file is in the way")
    assert run(tmp_path) == ExitCode.CONFIG
    assert "run/checkpoints' is not writable" in capsys.readouterr().err


def test_a_tracker_whose_package_is_missing(tmp_path, capsys, monkeypatch, nothing_compiles):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(tmp_path, "--config.logging.wandb") == ExitCode.CONFIG
    assert "pip install -e '.[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_workdir_of_a_run_that_is_still_running(tmp_path, capsys, nothing_compiles):
    with contextlib.closing(Workdir(tmp_path / "run", restart=False, log=print)):
        assert run(tmp_path) == ExitCode.CONFIG
    assert "belongs to a run that is still running" in capsys.readouterr().err


def test_workdir_that_can_not_be_moved_aside(tmp_path, capsys, monkeypatch, nothing_compiles):
    (tmp_path / "config.json").write_text('{"config": {}, "sizes": {}}')
    monkeypatch.chdir(tmp_path)
    argv = ["anakin", f"--config={CARTPOLE}", "--workdir=.", "--restart", *SMALL]
    assert command_line.main(anakin.train, argv) == ExitCode.CONFIG
    assert "can't be moved aside" in capsys.readouterr().err


def test_divergence_ends_in_exit_code_3_and_keeps_what_was_written(tmp_path, capsys):
    arguments = ["--config.learning_rate=1e30", "--config.updates_per_call=1"]
    assert run(tmp_path, *arguments) == ExitCode.DIVERGED
    error = capsys.readouterr().err
    assert "became NaN or infinite between environment steps" in error
    assert is_one_error(error)
    assert (tmp_path / "run" / "config.json").exists()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("error", [*errors.ERRORS, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_every_error_ends_the_command_with_its_own_code(error, capsys):
    def train(*args, **kwargs):
        raise error("what happened")

    code = command_line.main(train, ["anakin", f"--config={CARTPOLE}"])
    expected = {
        "ConfigError": 2, "DivergedError": 3, "ActorError": 4, "SaveError": 5, "DriftError": 6,
        "DisplacedError": 7, "PreemptedError": 42, "TransientError": 75, "KeyboardInterrupt": 130,
    }  # fmt: skip
    assert code == expected[error.__name__]
    text = capsys.readouterr().err
    if error is KeyboardInterrupt:
        assert text == "interrupted what happened\n"
    else:
        assert is_one_error(text)
        assert text.startswith("error: what happened\n")


def test_an_unexpected_error_ends_in_exit_code_1_with_its_traceback(capsys):
    def train(*args, **kwargs):
        raise ZeroDivisionError("what happened")

    code = command_line.main(train, ["anakin", f"--config={CARTPOLE}"])
    assert code == ExitCode.CRASHED == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "ZeroDivisionError: what happened",
        "See docs/troubleshooting.md#a-crash",
    ]


@pytest.mark.parametrize("train", [anakin.train, meta.train])
def test_the_command_is_recorded_as_it_was_given(train):
    found = []

    def record(config, *, command, **options):
        found.append(command)

    record.__module__ = train.__module__
    package = train.__module__.removesuffix(".trainer")
    assert command_line.main(record, [package, f"--config={CARTPOLE}"]) == ExitCode.OK
    assert found == [["python", "-m", package, f"--config={CARTPOLE}"]]


def test_a_run_writes_the_documented_files(tmp_path, capsys):
    changes = ["--config.seed=7", "--config.evaluation.every=4", "--config.cpu_devices=2"]
    assert run(tmp_path, *changes, "--config.env_params.gravity=9.5") == ExitCode.OK
    out = capsys.readouterr().out
    assert "8 = 2 x 4" in out
    assert "steps/s" in out
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
    clone = errors.PACKAGE.parent
    if (clone / ".git").exists() and shutil.which("git"):
        head = subprocess.run(
            ["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commit = config["versions"].get("commit", "").removesuffix("-dirty")
        assert commit == head.stdout.strip()
    assert len(config["devices"]) == 2
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == [128 * (i + 1) for i in range(16)]
    for row in rows:
        assert {"wall_time", "time/steps_per_second", "loss/total"} <= row.keys()
        assert ("eval/episode_return" in row) == (row["step"] % 512 == 0)
    assert any("train/episode_return" in row for row in rows)

    # After a restart, nothing of the first run is lost.
    assert run(tmp_path, *changes, "--restart") == ExitCode.OK
    assert json.loads((tmp_path / "run.1" / "summary.json").read_text()) == summary


@pytest.mark.slow
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


def test_an_episode_truncated_at_the_cap_is_complete():
    """A truncation becomes visible in the step after the last one, which is past the cap."""
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
    rows = []
    for greedy in (True, False):
        config.evaluation.greedy = greedy
        rows.append(anakin.train(config, quiet=True).metrics[-1])
    # +1 or -1 per episode. After a single update the right actions are the most probable ones, by
    # so little that samples are about as often wrong as right.
    assert (rows[0]["eval/episode_return"], rows[0]["eval/episode_return_std"]) == (1, 0)
    assert abs(rows[1]["eval/episode_return"]) < 0.5
    assert rows[1]["eval/episode_return_std"] > 0.5


def test_environment_parameters_come_from_the_config():
    config = small()
    config.env_params = {"max_steps_in_episode": 5}
    row = anakin.train(config, quiet=True).metrics[-1]
    assert row["eval/episode_length"] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": "many"}, "num_envs must be a whole number, got 'many'"),
        ({"num_envs": 8.5}, r"num_envs must be a whole number, got 8\.5"),
        ({"num_envs": True}, "num_envs must be a whole number, got True"),
        ({"anneal": 1}, "anneal must be true or false, got 1"),
        ({"discount": float("nan")}, "discount must be a finite number, got nan"),
        ({"env": None}, "env must be a string, got None"),
        ({"env_kwargs": 3}, "env_kwargs must be a dictionary, got 3"),
        ({"network": 3}, "network must be a section of settings, got 3"),
        ({"network": {"hidden": (1, "a")}}, "network.hidden must be a tuple of whole numbers"),
        ({"ppo": {"clp": 1}}, r"unknown config key 'ppo\.clp'; did you mean ppo\.clip"),
        ({"evaluation": {"episodes": 0}}, "evaluation.episodes"),
        ({"averaging": {"folder": "gs://bucket/x"}}, "must be a folder of a file system"),
        ({"numenvs": 3}, "did you mean num_envs"),
    ],
)
def test_parse_rejects(change, message):
    with pytest.raises(ConfigError, match=message):
        parse(change)


def test_parse_is_the_inverse_of_default_config():
    assert parse(default_config()) == Config()
    for agent in AGENTS:
        assert parse(default_config(agent)) == parse({"agent": agent})


def test_defaults_are_those_of_the_agent_where_nothing_else_is_given():
    defaults = dqn.DEFAULTS
    config = parse({"agent": "dqn", "unroll_length": 3, "replay": {"capacity": 7_000}})
    assert (config.unroll_length, config.replay.capacity) == (3, 7_000)
    assert config.learning_rate == defaults["learning_rate"] != Config().learning_rate
    assert config.replay.begin == defaults["replay"]["begin"] != Config().replay.begin
    assert config.replay.priority_exponent == Config().replay.priority_exponent
    with pytest.raises(ConfigError, match="did you mean vtrace"):
        default_config("vtrac")


def test_parse_converts_between_numbers_and_from_lists():
    config = parse({"total_steps": 500_000.0, "discount": 1, "network": {"hidden": [8, 4]}})
    assert (config.total_steps, config.discount, config.network.hidden) == (500_000, 1.0, (8, 4))
    assert type(config.total_steps) is int
    assert type(config.discount) is float


def test_a_call_is_never_longer_than_the_run():
    made = make_sizes(
        Config(total_steps=100, num_envs=2, unroll_length=5, updates_per_call=1000), 1
    )
    assert made.total_steps == 100


def test_sizes_are_rounded_up_to_whole_calls():
    found = make_sizes(parse({"total_steps": 1001, "num_envs": 4, "unroll_length": 5}), 2)
    assert (found.envs_per_device, found.steps_per_update) == (2, 20)
    assert (found.num_updates, found.total_steps) == (51, 1020)
    settings = {"total_steps": 1001, "num_envs": 4, "unroll_length": 5, "updates_per_call": 10}
    found = make_sizes(parse(settings), 2)
    assert (found.num_calls, found.num_updates, found.total_steps) == (6, 60, 1200)
    found = make_sizes(parse({"total_steps": 1_000_000, "num_envs": 4, "unroll_length": 5}), 1)
    assert (found.updates_per_call, found.num_calls) == (100, 500)
