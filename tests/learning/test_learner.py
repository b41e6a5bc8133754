"""The learner alone: shuffling, the order of gradient steps, target networks, stopping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.errors import ConfigError
from podracer.learning import learner, rollout
from podracer.learning import optimizer as optimizer_lib
from podracer.learning.optimizer import OptimizerConfig
from podracer.learning.rollout import RolloutConfig, shuffle
from podracer.types import Agent, Devices, LossAux, Target, TrainState, Weights
from podracer.xla_cpu import prng


def config(**changes) -> OptimizerConfig:
    base = {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "anneal": False,
        "warmup": 0,
        "batch_rule": "none",
        "reference_batch": 0,
        "epsilon": 1e-5,
        "max_grad_norm": 0.0,
    }
    return OptimizerConfig(**{**base, **changes})


def quadratic(epochs: int, minibatches: int, stop_above: float | None = None, **fields) -> Agent:
    """An "agent" whose batch is the trajectory and whose loss is (w - x)^2."""

    def loss(params, train_state, batch, key):
        value = ((params["w"] - batch) ** 2).mean()
        metrics = {"total": value, "first": batch[0], "draw": jax.random.uniform(key)}
        stop = () if stop_above is None else params["w"] - stop_above
        return value, LossAux(metrics, stop=stop)

    def prepare(train_state, trajectory):
        return trajectory, {"seen": train_state.weights.stats["seen"] + 1}

    source = rollout.make_source(
        prepare, RolloutConfig(epochs, minibatches, whole_episodes=False), Devices()
    )
    return Agent(init=None, carry=None, act=None, source=source, loss=loss, **fields)  # type: ignore[arg-type]


def run(cfg, data, *, state=None, epochs=2, minibatches=4, **fields):
    optimizer = optax.sgd(cfg.learning_rate)
    update = learner.make_update(
        quadratic(epochs, minibatches, **fields),
        optimizer,
        schedule=optimizer_lib.make_schedule(cfg, 4, 8),
        devices=Devices(),
    )
    params = {"w": jnp.float32(0)}
    stats = {"seen": jnp.int32(0)}
    if state is None:
        state = TrainState(Weights(params, stats), params, optimizer.init(params), jnp.int32(0))
    state, source, metrics = jax.jit(update)(state, (), data, prng.key(3))
    # An unroll is learned from once.
    assert source == ()
    return state, metrics.losses


def test_shuffle_gives_every_item_to_one_minibatch_and_spreads_neighbours():
    order = np.asarray(shuffle(prng.key(0), 24, 4, 0))
    assert order.shape == (4, 6)
    assert sorted(order.ravel()) == list(range(24))
    assert sorted(order[:, 2]) == [8, 9, 10, 11]
    other = np.asarray(shuffle(prng.key(1), 24, 4, 0))
    assert (order != other).any()


def test_shuffle_draws_every_place_equally_often():
    orders = jax.vmap(lambda key: shuffle(key, 8, 4, 0))(jax.random.split(prng.key(0), 4000))
    share = np.stack([(np.asarray(orders)[:, :, 1] == 4 + i).mean(0) for i in range(4)])
    np.testing.assert_allclose(share, 0.25, atol=0.03)


def test_shuffle_is_the_same_however_items_are_spread_over_devices():
    shuffled = jax.jit(shuffle, static_argnums=(1, 2))
    whole = np.asarray(shuffled(prng.key(0), 32, 4, 0))
    for devices in (2, 4, 8):
        items = 32 // devices
        parts = [shuffled(prng.key(0), items, 4, d) + d * items for d in range(devices)]
        np.testing.assert_array_equal(np.sort(np.concatenate(parts, 1)), np.sort(whole))


def test_update_takes_every_gradient_step_in_order():
    """Compared with the same steps written out."""
    cfg, data = config(), jnp.arange(8.0)
    state, metrics = run(cfg, data)
    w, losses = 0.0, []
    for key in jax.random.split(prng.key(3), 2):
        shuffle_key, _ = jax.random.split(key)
        for indices in np.asarray(shuffle(shuffle_key, 8, 4, 0)):
            batch = np.asarray(data)[indices]
            losses.append(((w - batch) ** 2).mean())
            w -= cfg.learning_rate * 2 * (w - batch).mean()
    assert float(state.weights.params["w"]) == pytest.approx(w, rel=1e-5)
    assert float(metrics["total"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert int(state.step) == 1
    assert int(state.weights.stats["seen"]) == 1
    assert float(state.target["w"]) == 0


def test_the_target_network_follows_its_rule_at_each_gradient_step():
    """With data of 1, w is 1 - 0.8^n after n gradient steps."""

    def update(target, params, metrics, step):
        return optax.periodic_update(params, target, step, 3)

    every_third = Target(lambda params: params, update)

    state, _ = run(config(), jnp.ones(8), target=every_third)
    assert float(state.target["w"]) == pytest.approx(1 - 0.8**6)
    # Gradient steps are counted over updates.
    state, _ = run(config(), jnp.ones(8), state=state, target=every_third)
    assert float(state.target["w"]) == pytest.approx(1 - 0.8**15)


def test_stop_skips_the_rest_of_the_update():
    free, _ = run(config(), jnp.ones(8))
    stopped, metrics = run(config(), jnp.ones(8), stop_above=0.5)
    # w: 0, 0.2, 0.36, 0.488, 0.59; the step that finds w above 0.5 is skipped.
    assert float(stopped.weights.params["w"]) == pytest.approx(1 - 0.8**4)
    assert float(free.weights.params["w"]) == pytest.approx(1 - 0.8**8)
    assert float(metrics["stopped"]) == pytest.approx(4 / 8)


@pytest.mark.parametrize("stop_above", [None, 1.0])
def test_learning_rate_anneals_to_zero_over_the_run(stop_above):
    """It depends on the number of updates, whether or not gradient steps were skipped."""
    cfg, once = config(anneal=True), {"epochs": 1, "minibatches": 1}
    factors, state = [], None
    for n in range(5):
        new, _ = run(cfg, jnp.ones(8), state=state, stop_above=stop_above, **once)
        before = 0.0 if state is None else float(state.weights.params["w"])
        # The gradient of (w - 1)^2, times the rate of 0.1.
        factors.append((float(new.weights.params["w"]) - before) / (0.2 * (1 - before)))
        state = new
        if n == 1 and stop_above:
            state, _ = run(
                cfg, jnp.ones(8), state=_moved(state, 2.0), stop_above=stop_above, **once
            )
            assert int(state.step) == 3
            assert float(state.weights.params["w"]) == 2.0
            state = _moved(state, 0.0)
    expected = [1, 0.75, 0.5, 0.25, 0] if stop_above is None else [1, 0.75, 0.25, 0, 0]
    np.testing.assert_allclose(factors, expected, atol=1e-5)


def factors(updates, begin=0, **changes) -> list[float]:
    """The factor of the learning rate in each update of a run, with batches of 400."""
    schedule = optimizer_lib.make_schedule(config(**changes), updates, 400, begin)
    return [float(schedule(jnp.int32(n))) for n in range(updates)]


def test_the_learning_rate_follows_the_batch_by_a_rule():
    np.testing.assert_allclose(factors(3), 1)
    np.testing.assert_allclose(factors(3, batch_rule="linear", reference_batch=100), 4)
    np.testing.assert_allclose(factors(3, batch_rule="sqrt", reference_batch=100), 2)
    np.testing.assert_allclose(factors(3, batch_rule="sqrt", reference_batch=1600), 0.5)
    for wrong in (
        {"batch_rule": "cubic"},
        {"batch_rule": "linear"},
        {"reference_batch": 100},
        {"warmup": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            config(**wrong)


def test_the_learning_rate_warms_up():
    linear = {"batch_rule": "linear", "reference_batch": 100}
    np.testing.assert_allclose(factors(6, warmup=4, **linear), [1, 2, 3, 4, 4, 4])
    np.testing.assert_allclose(factors(6, warmup=2, anneal=True), [0.5, 1, 1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(factors(3, warmup=1), 1)
    # While a replay buffer fills, nothing is learned.
    np.testing.assert_allclose(factors(7, begin=3, warmup=2)[3:], [0.5, 1, 1, 1])
    annealed = factors(8, begin=2, warmup=2, anneal=True)
    np.testing.assert_allclose(annealed[2:], [0.5, 1, 1, 0.75, 0.5, 0.25])


def _moved(state, w):
    return state.replace(weights=state.weights.replace(params={"w": jnp.float32(w)}))


@pytest.mark.parametrize("name", optimizer_lib.OPTIMIZERS)
def test_optimizers_clip_by_the_global_norm(name):
    cfg = config(optimizer=name, max_grad_norm=0.5, epsilon=1e-3)
    optimizer = optimizer_lib.make_optimizer(cfg, quadratic(1, 1))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    big = jax.tree.map(lambda x: x + 100.0, params)
    small = jax.tree.map(lambda x: x * 0.5 / np.sqrt(5 * 100.0**2), big)
    for ours, theirs in zip(
        *(
            jax.tree.leaves(optimizer.update(g, optimizer.init(params), params)[0])
            for g in (big, small)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_items_that_do_not_divide_into_minibatches():
    with pytest.raises(ConfigError, match="num_minibatches=4 does not divide the 6 items"):
        run(config(), jnp.arange(6.0))


@pytest.mark.parametrize("changes", [{"learning_rate": -1.0}, {"optimizer": "adm"}])
def test_impossible_settings(changes):
    with pytest.raises(ConfigError):
        config(**changes)


def test_no_epochs():
    with pytest.raises(ConfigError, match="num_epochs and num_minibatches must be positive"):
        RolloutConfig(0, 1, whole_episodes=False)


def test_each_group_of_parameters_has_its_own_optimizer():
    """Gradients are clipped by the norm of their group, and scaled by its rate."""
    agent = quadratic(
        1, 1, labels=lambda params: {"a": "x", "b": "y"}, rates=(("x", 1.0), ("y", 0.5))
    )
    cfg = config(optimizer="rmsprop", max_grad_norm=0.5, epsilon=1e3, learning_rate=1.0)
    optimizer = optimizer_lib.make_optimizer(cfg, agent)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    updates, _ = optimizer.update(
        {"a": params["a"] + 9, "b": params["b"] + 0.25}, optimizer.init(params), params
    )
    # With so large an epsilon, rmsprop only scales: the clipped 0.5, and half of 0.25.
    assert float(updates["a"][0] / updates["b"][0]) == pytest.approx(4, rel=1e-3)
