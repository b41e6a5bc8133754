"""Promises of README, configs and docstrings that no other test covers."""

import dataclasses
import inspect
import pathlib
import re
import runpy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from podracer import anakin, envs
from podracer import config as config_lib
from podracer.agents import AGENTS
from podracer.anakin.trainer import prepare
from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed.joining import HostsConfig
from podracer.errors import ConfigError
from podracer.sebulba import trainer as sebulba_trainer
from podracer.storage.checkpoint import Checkpoints
from podracer.training import command_line, session
from podracer.training.loop import Result
from podracer.types import Discrete, HostEnvironment, Spec
from tests.helpers import make_config, make_run

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


# CoinRun's spaces, for machines without the Qt 5 that envpool 1.2.5 needs to make it.
IMAGE = jax.ShapeDtypeStruct((64, 64, 3), jnp.uint8)
COINRUN = HostEnvironment(Spec(IMAGE, Discrete(15)), lambda *_: None, IMAGE, lambda sent, _: sent)


def prepare_on_host(config: Config) -> Sizes:
    try:
        return sebulba_trainer.prepare(config).sizes
    except ConfigError as error:
        if "Qt 5" not in str(error):
            raise
        return sebulba_trainer.prepare(config, COINRUN).sizes


# One for each agent and kind of environment; .ci/run traces all of them.
QUICK = ("atari", "cartpole", "cartpole_muzero", "minatar_dqn", "pendulum_d4pg", "pong_r2d2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in command_line.shipped_configs()
    ],
)
def test_a_shipped_config_fits_its_environment(name):
    """Traced, not compiled: networks take the observations, and batches divide."""
    path = command_line.shipped_configs()[name]
    config = config_lib.parse(runpy.run_path(str(path))["get_config"]())
    on_host = envs.architecture(config.env) == "sebulba"
    try:
        sizes = prepare_on_host(config) if on_host else prepare(config).sizes
    except ConfigError as error:
        # Suites in JAX are optional; what host environments need is installed with the tests.
        if on_host or "packages that are not installed" not in str(error):
            raise
        pytest.skip(str(error))
    assert 0 <= sizes.total_steps - config.total_steps < 0.1 * config.total_steps


def test_a_checkpoint_is_written_every_five_minutes_by_default(tmp_path, monkeypatch):
    """A clock on which 100 seconds pass between two calls of the compiled program."""
    now, saved = [0.0], []

    def monotonic():
        now[0] += 100
        return now[0]

    save = Checkpoints.save

    def spy(self, state, progress, *args, **kwargs):
        saved.append(progress.update)
        return save(self, state, progress, *args, **kwargs)

    config = make_config(total_steps=5 * 64, env="dummy:counting")
    assert config.checkpoint == Config().checkpoint
    assert config.checkpoint.minutes == 5
    with monkeypatch.context() as patch:
        patch.setattr(session, "time", SimpleNamespace(monotonic=monotonic))
        patch.setattr(Checkpoints, "save", spy)
        anakin.train(config, tmp_path / "run", quiet=True)
    # Update 5 is the last one, which is evaluated and saved anyway.
    assert [update for update in saved if update < 5] == [3]


@pytest.mark.weekly
@pytest.mark.parametrize(
    "own",
    [
        {"agent": "ppo"},
        {"agent": "dqn"},
        {"agent": "r2d2", "network__core": "lstm", "r2d2__burn_in": 4, "r2d2__trace": 8},
        {"agent": "d4pg", "env_kwargs": {"continuous": True}},
    ],
    ids=lambda own: own["agent"],
)
def test_bfloat16_trains(own):
    """Layers compute in bfloat16; weights, their gradients and the optimizer stay float32."""
    weights = {}
    for dtype in ("float32", "bfloat16"):
        config = make_config(
            env="dummy:choice",
            **own,
            network__dtype=dtype,
            learning_rate=1e-2,
            replay__begin=1,
            # The first update only fills the replay.
            updates_per_call=2,
        )
        _, _, state, step = make_run(config)
        new, metrics = step(state)
        for before, after in zip(*map(jax.tree.leaves, (state.train, new.train)), strict=True):
            assert after.dtype == before.dtype
            assert after.dtype != jnp.bfloat16
        assert all(np.isfinite(x).all() for x in metrics.learner.losses.values())
        assert metrics.learner.losses["grad_norm"][-1] > 0
        before, after = (ravel_pytree(x.train.weights)[0] for x in (state, new))
        weights[dtype] = np.asarray(after - before)
    # The same direction, computed less exactly.
    one, other = weights.values()
    assert np.abs(one - other).max() > 0
    assert one @ other > 0.9 * np.linalg.norm(one) * np.linalg.norm(other)


@pytest.mark.parametrize("code", [code for code in CODE if "podracer" in code])
def test_the_python_of_the_readme_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, changed = re.subn(r"total_steps( ?= ?)[\d_]+", r"total_steps\g<1>5_000", code)
    assert changed
    names = {}
    exec(code, names)
    (result,) = (value for value in names.values() if isinstance(value, Result))
    assert result.summary["env_steps"] >= 5_000


def test_every_setting_is_documented():
    config = Config()
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    sections = [section for section in sections if dataclasses.is_dataclass(section)]
    assert any(isinstance(section, HostsConfig) for section in sections)
    for section in (config, config.optimization, config.settings, *sections):
        entries = re.findall(r"^ {2}(\w[\w, \n]*): ", inspect.getdoc(section) or "", re.M)
        documented = {name.strip() for entry in entries for name in entry.split(",")}
        fields = {field.name for field in dataclasses.fields(section)}
        # The sections of agents are documented together, as they are named after them.
        assert fields - AGENTS.keys() <= documented
    assert all(f'"{name}"' in (inspect.getdoc(Config) or "") for name in AGENTS)
