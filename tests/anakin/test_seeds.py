"""Several agents in one program: each is what it would be alone."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from podracer import anakin
from podracer import config as config_lib
from podracer.anakin import trainer
from podracer.anakin.state import make_start
from podracer.config.sizes import make_sizes
from podracer.errors import ConfigError
from podracer.monitoring import dashboard
from tests.helpers import make_config
from tests.training.resuming import MUZERO

SEEDS = 3


def config(**changes):
    return make_config(
        **{
            "env": "dummy:counting",
            "num_envs": 16,
            "cpu_devices": 2,
            "total_steps": 16 * 8 * 5,
            "evaluation__every": 2,
            "checkpoint__every": 2,
            "num_minibatches": 2,
            "anneal": False,
            "normalize_observations": True,
            **changes,
        }
    )


_programs, _compiled = {}, {}


@pytest.fixture
def shared_programs(monkeypatch):
    """Has runs that differ in their seeds and lengths share one compiled program."""
    prepare, compile_program = trainer.prepare, trainer.compile_program

    def key(config):
        return repr(dataclasses.replace(config, seed=0, total_steps=1))

    def shared_prepare(config, joined):
        if key(config) not in _programs:
            _programs[key(config)] = prepare(config, joined)
        return _programs[key(config)]._replace(sizes=make_sizes(config, 2))

    def shared_compile(program, config):
        if key(config) not in _compiled:
            _compiled[key(config)] = compile_program(program, config)
        return _compiled[key(config)]._replace(state=program.init(make_start(config)))

    monkeypatch.setattr(trainer, "prepare", shared_prepare)
    monkeypatch.setattr(trainer, "compile_program", shared_compile)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"agent": "vtrace", "network__core": "gru"}, marks=pytest.mark.slow),
        pytest.param(MUZERO, marks=pytest.mark.weekly),
    ],
    ids=str,
)
@pytest.mark.timeout(900)
def test_each_agent_is_the_single_run_of_its_seed(changes, tmp_path, shared_programs):
    together = anakin.train(
        config(seed=7, num_seeds=SEEDS, **changes), tmp_path / "all", quiet=True
    )
    for i in range(SEEDS):
        alone = anakin.train(config(seed=7 + i, **changes), quiet=True)
        both = zip(jax.tree.leaves(together.weights), jax.tree.leaves(alone.weights), strict=True)
        for a, b in both:
            np.testing.assert_allclose(a[i], b, atol=2e-5)
        for row, single in zip(together.metrics, alone.metrics, strict=True):
            for name, x in single.items():
                if "time" not in name and name != "step":
                    np.testing.assert_allclose(
                        row[f"seed_{7 + i}/{name}"], x, rtol=1e-3, atol=1e-4, err_msg=name
                    )
    row = together.metrics[-1]
    returns = [row[f"seed_{7 + i}/eval/episode_return"] for i in range(SEEDS)]
    np.testing.assert_allclose(row["eval/episode_return"], np.mean(returns))
    # t of two degrees of freedom is 4.303.
    half = 4.302653 * np.std(returns, ddof=1) / np.sqrt(SEEDS)
    np.testing.assert_allclose(row["eval/episode_return_interval"], half, rtol=1e-5)
    assert together.summary["num_seeds"] == SEEDS
    assert repr(together.summary["eval_episodes"]) == "8"
    title = dashboard.title({"agent": "ppo", "env": "e", "seed": 7, "num_seeds": SEEDS})
    assert title == "ppo on e, seeds 7 to 9"

    # Several agents also resume like a single one.
    longer = config(seed=7, num_seeds=SEEDS, total_steps=16 * 8 * 7, **changes)
    assert anakin.train(longer, tmp_path / "all", quiet=True).metrics[:5] == together.metrics


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_no_batch_of_matrices_is_factored_at_the_start(core):
    """In such a batch, two CPU devices of jaxlib 0.10 wait for each other forever."""
    parsed = config_lib.parse(config(num_seeds=SEEDS, network__core=core))
    program = trainer.prepare(parsed)
    text = program.init.lower(make_start(parsed)).as_text()
    operands = re.findall(r"@lapack_\w+\(.*?\) .*? : \((.*?)\)", text)
    assert operands
    assert not [x for x in operands if re.search(r"tensor<\d+x\d+x\d+x", x)], operands


@pytest.mark.slow
def test_a_profile_is_written(tmp_path, capsys, shared_programs):
    anakin.train(config(), tmp_path, profile=2)
    assert "a trace of 2 updates is in" in capsys.readouterr().out
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(ConfigError, match="profile=3 must not be negative, and needs a workdir"):
        anakin.train(config(), profile=3)
