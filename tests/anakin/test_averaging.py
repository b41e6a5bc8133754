"""Groups that average: local SGD and DiLoCo, https://arxiv.org/abs/2311.08105."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import anakin
from podracer.anakin import trainer
from podracer.anakin.state import make_start
from podracer.config.sizes import make_sizes
from podracer.errors import ConfigError, DivergedError, ExitCode
from podracer.learning import averaging
from podracer.learning.averaging import Groups
from podracer.storage.workdir import read_rows
from podracer.training import builder, command_line, rows, saved_run
from podracer.types import Weights
from tests.helpers import ROOT, make_config
from tests.training.resuming import Stops, without_times


def config(**changes):
    return make_config(
        **{
            "env": "dummy:counting",
            "num_envs": 16,
            "cpu_devices": 2,
            "total_steps": 16 * 8 * 6,
            "averaging__groups": 2,
            "averaging__every": 3,
            "averaging__outer_rate": 0.7,
            "averaging__outer_momentum": 0.9,
            **changes,
        }
    )


class Reference:
    """DiLoCo's outer step, one group and one array after another, in numpy."""

    def __init__(self, weights, rate, momentum):
        self.weights, self.rate, self.momentum = weights, rate, momentum
        self.velocity = {name: np.zeros_like(x) for name, x in weights.items()}

    def average(self, groups):
        for name, old in self.weights.items():
            way = sum(old - group[name] for group in groups) / len(groups)
            self.velocity[name] = velocity = self.momentum * self.velocity[name] + way
            self.weights[name] = old - self.rate * (way + self.momentum * velocity)


def test_the_outer_step_is_diloco_in_numpy():
    rng, shapes = np.random.default_rng(0), {"a": (3, 2), "b": (4,)}
    parameters = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    reference = Reference(dict(parameters), 0.7, 0.9)
    optimizer = averaging.make_outer(0.7, 0.9)
    weights = Weights(jax.tree.map(jnp.float32, parameters), {"mean": jnp.float32(0)})
    outer = optimizer.init(weights.params)
    for lost in ((), (1,), (0, 2)):
        living = [i for i in range(3) if i not in lost]
        arrived = {name: rng.normal(size=(3, *shape)) for name, shape in shapes.items()}
        reference.average([{name: x[i] for name, x in arrived.items()} for i in living])
        target = rng.normal(size=(3, 2))
        expected = target[living].mean(0)
        for x in (*arrived.values(), target):
            x[list(lost)] = np.nan
        alive = jnp.array([i in living for i in range(3)])
        arrived, target = jax.tree.map(jnp.float32, (arrived, target))
        groups = Groups(Weights(arrived, {"mean": jnp.arange(3.0)}), target, alive)
        weights, found, outer, metrics = averaging.average(optimizer, weights, outer, groups)
        for name, x in reference.weights.items():
            np.testing.assert_allclose(weights.params[name], x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(weights.stats["mean"], np.mean(living))
        assert (metrics["averaging/apart"] > 1) == (len(living) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["vtrace", "dqn"])
def test_averages_of_every_step_of_sgd_are_synchronous_training(agent, monkeypatch):
    sgd = optax.sgd(1e-3)
    monkeypatch.setattr(builder, "make_optimizer", lambda config, agent: sgd)
    replay = {"replay__begin": 16, "replay__capacity": 1024, "replay__batch": 16}
    same = {**replay, "agent": agent, "anneal": False, "dqn__target_period": 2}
    # Groups of few environments explore by other epsilons than all environments together.
    same |= {"dqn__epsilon_alpha": 0.0}

    def run(**changes):
        return anakin.train(config(**same, **changes), quiet=True)

    averaged = run(averaging__every=1, averaging__outer_rate=1.0, averaging__outer_momentum=0.0)
    together = run(averaging__groups=1)
    for a, b in zip(averaged.metrics, together.metrics, strict=True):
        for name in ("step", "loss/total", "train/episode_return", "train/episodes"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        jax.device_get(averaged.weights),
        jax.device_get(together.weights),
    )
    assert averaged.metrics[-1]["averaging/apart"] > 1e-4


@pytest.fixture(scope="module")
def on_one_device():
    return anakin.train(config(cpu_devices=1), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_devices": 2},
        {"cpu_devices": 4},
        {"cpu_devices": 1, "agents_at_once": 1},
    ],
    ids=str,
)
def test_groups_learn_the_same_on_any_devices(changes, on_one_device):
    result = anakin.train(config(**changes), quiet=True)
    assert len(result.metrics) == 2
    for a, b in zip(on_one_device.metrics, result.metrics, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"wall_time", "time/steps_per_second"}:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_group_that_diverges_has_no_part_and_goes_on_from_the_others():
    whole = config(averaging__outer_rate=1.0, averaging__outer_momentum=0.0)
    program = trainer.prepare(whole)
    state = program.init(make_start(whole))

    def spoil(state, groups):
        """NaN in what some groups observe next; later observations do not depend on it."""
        observation = state.rollout.timestep.observation
        bad = jnp.arange(2).reshape(2, 1, 1) < groups
        timestep = state.rollout.timestep.replace(
            observation=jax.device_put(jnp.where(bad, jnp.nan, observation), observation.sharding)
        )
        return state.replace(rollout=state.rollout.replace(timestep=timestep))

    copy = jax.tree.map(jnp.copy, state)
    sound, _ = program.step(copy)
    one, metrics = program.step(spoil(state, 1))
    assert metrics.averages["averaging/alive"] == 0.5
    assert metrics.averages["averaging/apart"] < 1e-5
    assert np.isfinite(metrics.learner.losses["total"]).all()
    leaves = [jax.tree.leaves(jax.device_get(x.train.weights.params)) for x in (one, sound)]
    assert all(np.isfinite(x).all() for x in leaves[0])
    assert any((x != y).any() for x, y in zip(*leaves, strict=True))
    two, metrics = program.step(one)
    assert metrics.averages["averaging/alive"] == 1
    assert metrics.averages["averaging/apart"] > 1e-4
    _, metrics = program.step(spoil(two, 2))
    with pytest.raises(DivergedError, match="between environment steps 0 and 128"):
        rows.check_finite(jax.device_get(metrics.learner.losses), 0, program.sizes)


@pytest.mark.slow
def test_resumed_is_never_stopped(tmp_path, monkeypatch, capsys):
    def run(workdir, *more):
        flags = [
            "--config.averaging.groups=2",
            "--config.averaging.every=2",
            "--config.averaging.outer_momentum=0.9",
            "--config.updates_per_call=2",
            "--config.num_envs=8",
            "--config.unroll_length=32",
            "--config.total_steps=2048",
            "--config.evaluation.episodes=4",
            f"--workdir={tmp_path / workdir}",
            "--quiet",
            *more,
        ]
        return command_line.main(anakin.train, ["anakin", "--config=configs/cartpole.py", *flags])

    monkeypatch.chdir(ROOT)
    assert run("whole") == 0
    with monkeypatch.context() as patch:
        Stops(patch, 3)
        assert run("parts") == ExitCode.PREEMPTED
    assert run("parts") == 0
    found = [without_times(read_rows(tmp_path / x)) for x in ("whole", "parts")]
    assert found[0] == found[1]
    evaluated = saved_run.evaluate(tmp_path / "whole")
    assert evaluated["return_mean"] == found[0][-1]["eval/episode_return"]
    assert run("whole", "--config.averaging.groups=4") == ExitCode.CONFIG
    assert "averaging.groups=2, not 4, which can't change" in capsys.readouterr().err


def test_calls_are_whole_multiples_of_the_updates_between_averages():
    sizes = make_sizes(config(updates_per_call=4, total_steps=16 * 8 * 7), 2)
    assert (sizes.updates_per_call, sizes.num_updates, sizes.total_steps) == (6, 12, 1536)
    assert (sizes.learners, sizes.num_groups, sizes.envs_per_device) == (2, 2, 8)
    assert make_sizes(config(averaging__groups=1), 2).updates_per_call == 1
    whole = config(averaging__groups=4, replay__batch=64, replay__capacity=1000, replay__begin=10)
    assert make_sizes(whole, 2).agents_at_once == 2
    assert whole.of_group.num_envs == 4
    assert (whole.of_group.replay.batch, whole.of_group.replay.capacity) == (16, 250)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averaging__groups": 3}, "num_envs=16 .* averaging.groups=3; 15 would"),
        ({"num_seeds": 2}, "for one agent without a sweep, and this run trains 2"),
        ({"sweep": {"learning_rate": [1e-3]}}, "without a sweep, and this run trains 1"),
        ({"averaging__folder": "x"}, "averaging.folder=x averages runs, and averaging.groups=2"),
        ({"averaging__every": 0}, "averaging.every must be positive, got 0"),
        ({"averaging__outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_groups_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)
