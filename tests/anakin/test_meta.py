"""Learning an update rule: its gradient, devices, and resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from podracer.anakin import meta
from podracer.anakin.meta.program import make_gradient, make_objective, make_program
from podracer.config import Config
from podracer.distributed import mesh as mesh_lib
from podracer.errors import ConfigError, PreemptedError
from podracer.storage.workdir import read_rows
from podracer.training import lifetimes
from tests.helpers import make_config
from tests.training.resuming import Stops, without_times


def config(**changes) -> Config:
    small = {
        "env": "grid:3x3",
        "num_envs": 4,
        "unroll_length": 6,
        "network__hidden": (),
        "optimizer": "sgd",
        "learning_rate": 4.0,
        "anneal": False,
        "max_grad_norm": 0.0,
        "evaluation__episodes": 2,
        "total_steps": 4 * 6 * 3 * 4 * 4,
        "updates_per_call": 2,
        "lpg__predictions": 3,
        "lpg__units": 4,
        "lpg__embedding": 4,
        "lpg__agents": 4,
        "lpg__updates": 2,
        "lpg__lifetime": 4,
    }
    return make_config(**{**small, **changes})


def test_the_gradient_of_a_rule_is_that_of_finite_differences():
    """Through two updates of an agent and the experience after them, along the gradient and along
    directions by chance."""
    run = config()
    kind = lifetimes.make_learned(run)
    objective = make_objective(kind.lives, kind.rule_loss, 2)
    flat, unravel = ravel_pytree(kind.init(jax.random.key(0)))
    member = jax.jit(kind.lives.born)(jax.random.key(1))

    @jax.jit
    def f(x):
        return objective(unravel(x), member, jax.random.key(2))[0]

    gradient = jax.grad(f)(flat)
    rng = np.random.default_rng(0)
    others = [jnp.asarray(rng.normal(size=flat.shape), jnp.float32) for _ in range(2)]
    step, compared = 0.02, []
    for direction in (gradient, *others):
        unit = direction / jnp.linalg.norm(direction)
        slope = (f(flat + step * unit) - f(flat - step * unit)) / (2 * step)
        compared.append((float(slope), float(gradient @ unit)))
    slopes, products = np.array(compared).T
    np.testing.assert_allclose(slopes, products, rtol=0.02, atol=2e-5)
    assert products[0] > 1e-3


def test_an_agent_can_not_outweigh_the_others():
    """The gradient is the mean of gradients that are clipped agent by agent."""
    slopes = jnp.array([[0.1, 0.0], [300.0, 400.0], [0.0, -0.2]])

    def objective(rule, slope, key):
        return (rule * slope).sum(), key

    rule, keys = jnp.ones(2), jnp.arange(3)
    found, clipped, (values, aux) = make_gradient(objective, 0.5)(rule, slopes, keys)
    expected = np.array([[0.1, 0.0], [0.3, 0.4], [0.0, -0.2]]).mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert clipped == pytest.approx(1 / 3)
    np.testing.assert_allclose(values, slopes.sum(1))
    np.testing.assert_array_equal(aux, keys)


@pytest.mark.slow
def test_agents_on_two_devices_learn_one_rule():
    """Also in what agents do next, and when they are replaced."""
    run, found = config(updates_per_call=4), []
    for devices in (1, 2):
        mesh = mesh_lib.make_mesh(jax.devices()[:devices], devices)
        program = make_program(run, devices, mesh)
        state, metrics = program.step(program.init(jax.random.key(0)))
        found.append(jax.device_get((state.train, state.members.age, metrics)))
    # Agents of all ages, the older ones of which have been replaced.
    assert set(found[0][1].tolist()) == {2, 4}
    for one, two in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
    losses = found[0][2].learner.losses
    assert (losses["grad_norm"] > 0).all()
    # Some agents' gradients are clipped, those of others are not.
    assert 0 < losses["agents/clipped"].mean() < 1


@pytest.mark.slow
def test_resumed_is_never_stopped(tmp_path, monkeypatch):
    whole = meta.train(config(), tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        Stops(patch, 1)
        with pytest.raises(PreemptedError):
            meta.train(config(), tmp_path / "parts", quiet=True)
    parts = meta.train(config(), tmp_path / "parts", quiet=True)
    rows = [without_times(read_rows(tmp_path / x)) for x in ("whole", "parts")]
    assert rows[0] == rows[1]
    for one, two in zip(*map(jax.tree.leaves, (whole.weights, parts.weights)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lpg__lifetime": 5}, "lpg.lifetime=5 must be a multiple of lpg.updates=2"),
        ({"lpg__units": 0}, "lpg.units must be positive, got 0"),
        ({"num_seeds": 2, "stagger": 3}, "num_seeds, stagger: not for learning an update rule"),
        ({"env": "dummy:choice"}, "update rules are learned in grid worlds"),
        ({"cpu_devices": 3}, "the lpg.agents=4 agents do not divide evenly over 3 devices"),
    ],
)
def test_impossible_runs_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        meta.train(config(**changes), quiet=True)


def test_sizes_count_the_steps_of_all_agents():
    sizes = make_program(config(), 1, mesh_lib.make_mesh(jax.devices()[:1], 1)).sizes
    # Four agents, two updates and the experience that evaluates them, 4 x 6 steps each.
    assert sizes.steps_per_update == 4 * 3 * 24
    assert dataclasses.asdict(sizes)["num_updates"] == 4
