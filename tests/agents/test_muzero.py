"""MuZero: targets beside slow references, and its loss beside the paper's formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.agents import muzero, returns
from podracer.agents.model_targets import targets
from podracer.agents.search import Found
from podracer.agents.value_scale import Support, rescale
from podracer.errors import ConfigError
from podracer.nets.model import ModelConfig, make_model
from podracer.types import Devices, Discrete, Spec, TimeStep, TrainState
from tests import references
from tests.helpers import make_config

K, N, GAMMA, ITEMS, ACTIONS = 4, 3, 0.9, 64, 3


@pytest.mark.parametrize("next_step", [True, False])
@pytest.mark.parametrize("truncate", [0.0, 0.6])
@pytest.mark.parametrize("vtrace", [False, True])
def test_targets_are_those_of_each_episode(next_step, truncate, vtrace):
    """Also after the end of an episode, and where what follows is unknown."""
    rng = np.random.default_rng(0)
    stream = references.random_stream(rng, K + N, 200, next_step=next_step, truncate=truncate)
    values = rng.normal(size=(K + N + 1, 200)).astype(np.float32)
    log_rho = rng.normal(size=(K + N, 200)).astype(np.float32) if vtrace else None
    rho = None if log_rho is None else np.exp(log_rho)
    ours = targets(K, N, GAMMA, stream.timestep, jnp.asarray(values), log_rho)
    expected = references.model_targets(stream, values, K, N, GAMMA, rho)
    for name in ("value", "value_weight", "policy_weight"):
        np.testing.assert_allclose(getattr(ours, name), expected[name], atol=1e-5, err_msg=name)
    for name in ("reward", "reward_weight"):
        np.testing.assert_allclose(getattr(ours, name), expected[name][:-1], atol=1e-5)
    # All kinds of ends occur: something is learned after some episodes, and nothing after others.
    absorbing = expected["value_weight"] - expected["policy_weight"]
    assert absorbing.any()
    assert (expected["value_weight"][-1] == 0).any() == (truncate > 0)


def test_values_survive_their_distributions():
    support = Support(50.0, 21)
    values = jnp.array([-50.0, -3.21, 0.0, 0.5, 17.0, 50.0])
    probabilities = support.encode(values)
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    assert ((probabilities > 1e-4).sum(-1) <= 2).all()
    np.testing.assert_allclose(support.decode(jnp.log(probabilities)), values, atol=2e-2)
    np.testing.assert_allclose(support.encode(jnp.array([99.0]))[0, -1], 1, atol=1e-4)
    # On the scale of ``rescale``, neighbours are equally far apart.
    places = np.array([support.decode(jnp.log(jnp.eye(21)[i])) for i in range(21)])
    np.testing.assert_allclose(np.diff(np.asarray(rescale(places))), 0.62, atol=0.02)


def make_agent(**changes):
    config = make_config(
        agent="muzero",
        discount=GAMMA,
        num_envs=8,
        value_cost=0.3,
        network__hidden=(16,),
        replay__capacity=8 * 64,
        replay__begin=1,
        replay__batch=ITEMS,
        muzero__unroll=K,
        muzero__n_step=N,
        muzero__atoms=9,
        muzero__largest_value=5.0,
        muzero__model__size=6,
        muzero__model__hidden=(16,),
        **changes,
    )
    spec = Spec(jax.ShapeDtypeStruct((3,), jnp.float32), Discrete(ACTIONS))
    agent = muzero.make(spec, config.settings, config.muzero, Devices())
    model = make_model(spec, config.settings.network, config.muzero.model, config.muzero.atoms)
    return config, agent, model


def make_batch(rng, *, observations: int):
    """A random batch with episodes that end in all ways."""
    length = K + N
    stream = references.random_stream(rng, length, ITEMS, next_step=True, truncate=0.5)
    shape = (length + 1, ITEMS)
    policy = rng.dirichlet(np.ones(ACTIONS), shape).astype(np.float32)
    value, depth = rng.normal(size=(2, *shape)).astype(np.float32)
    observation = rng.normal(size=(observations, ITEMS, 3)).astype(np.float32)
    timestep = stream.timestep.replace(observation=())
    batch = muzero.Batch(
        observation,
        timestep,
        rng.integers(0, ACTIONS, shape),
        Found((), policy, value, np.abs(depth)),
        rng.uniform(0.2, 1, ITEMS).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, batch), stream


def train_state(agent):
    weights = jax.jit(agent.init)(jax.random.key(0))
    # The last layers are zeros at first; their gradients would hide those of all others.
    rng = np.random.default_rng(5)
    params, target = (
        jax.tree.map(
            lambda x: jnp.asarray(x + 0.3 * rng.normal(size=x.shape), jnp.float32),
            jax.device_get(weights.params),
        )
        for _ in range(2)
    )
    return TrainState(weights.replace(params=params), target, (), jnp.int32(0))


def with_range(weights, least_range):
    return weights.replace(stats={**weights.stats, "least_range": jnp.float32(least_range)})


def cross_entropy(logits, probabilities):
    return -(probabilities * jax.nn.log_softmax(logits)).sum(-1)


def paper_loss(config, model, params, batch, target):
    """Equation 1 and appendix G of the paper. The model is unrolled by one step after another, and
    each step's gradient is halved by adding half of a state to half of a constant."""
    support = Support(config.muzero.largest_value, config.muzero.atoms)
    state = model.represent(params, batch.observation[0])
    total = jnp.zeros(ITEMS)
    for k in range(K + 1):
        part = 1 if k == 0 else 1 / K
        logits, value = model.predict(params, state)
        policy = target["policy_weight"][k] * cross_entropy(logits, batch.found.policy[k])
        encoded = support.encode(jnp.float32(target["value"][k]))
        values = target["value_weight"][k] * cross_entropy(value, encoded)
        total += part * (policy + 0.3 * values)
        if k < K:
            constant = jax.lax.stop_gradient(state)
            state, reward = model.step(params, (state + constant) / 2, batch.action[k])
            encoded = support.encode(jnp.float32(target["reward"][k]))
            total += target["reward_weight"][k] * cross_entropy(reward, encoded) / K
    return (batch.importance * total).mean()


def test_the_loss_is_that_of_the_paper():
    config, agent, model = make_agent()
    state = train_state(agent)
    batch, stream = make_batch(np.random.default_rng(1), observations=1)
    target = references.model_targets(stream, np.asarray(batch.found.value), K, N, GAMMA)
    key = jax.random.key(0)
    ours = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))
    (loss, aux), gradient = ours(state.weights.params, state, batch, key)
    reference = jax.value_and_grad(lambda params: paper_loss(config, model, params, batch, target))
    expected, expected_gradient = jax.jit(reference)(state.weights.params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
        assert np.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-5)
    support = Support(5.0, 9)
    first = model.represent(state.weights.params, batch.observation[0])
    first = support.decode(model.predict(state.weights.params, first)[1])
    np.testing.assert_allclose(aux.priorities, np.abs(target["value"][0] - first), atol=1e-4)
    np.testing.assert_allclose(aux.metrics["reanalyzed"], 0)


@pytest.mark.parametrize(
    ("bootstrap", "reanalyze"),
    [("target", 0.0), ("corrected", 0.0), pytest.param("search", 0.25, marks=pytest.mark.slow)],
)
def test_the_target_network_refreshes_what_the_actor_found(bootstrap, reanalyze):
    """Values of all items, or policies and values of a quarter of each eight."""
    config, agent, model = make_agent(
        muzero__bootstrap=bootstrap, muzero__reanalyze=reanalyze, muzero__search__simulations=4
    )
    state = train_state(agent)
    batch, stream = make_batch(np.random.default_rng(2), observations=K + N + 1)
    loss = jax.jit(agent.loss)
    key = jax.random.key(3)
    (total, aux) = loss(state.weights.params, state, batch, key)
    np.testing.assert_allclose(aux.metrics["reanalyzed"], reanalyze)
    fresh = model.represent(state.target, batch.observation.reshape(-1, 3))
    policy, fresh = model.predict(state.target, fresh)
    fresh = Support(5.0, 9).decode(fresh).reshape(K + N + 1, ITEMS)
    if bootstrap != "search":
        policy = jax.nn.softmax(policy).reshape(K + N + 1, ITEMS, ACTIONS)
        taken = jax.nn.one_hot(batch.action, ACTIONS)
        rho = (taken * policy).sum(-1) / (taken * batch.found.policy).sum(-1)
        rho = np.asarray(rho) if bootstrap == "corrected" else None
        target = references.model_targets(stream, np.asarray(fresh), K, N, GAMMA, rho)
        reference = jax.jit(lambda params: paper_loss(config, model, params, batch, target))
        expected = reference(state.weights.params)
        np.testing.assert_allclose(total, expected, rtol=1e-5)
        return

    # What the actor found for an item that is searched again makes no difference.
    def priorities(found):
        return loss(state.weights.params, state, batch.replace(found=found), key)[1].priorities

    found = batch.found
    moved = priorities(found.replace(value=found.value + 1)) != aux.priorities
    bootstraps = returns.n_step(batch.timestep, N, GAMMA).discount[0] > 0
    again = np.asarray(~moved & bootstraps)
    assert 0 < again.sum() <= ITEMS / 4
    positions = np.unique(np.flatnonzero(again) % 8)
    assert len(positions) == 2


@pytest.mark.slow
def test_a_reanalysed_policy_is_what_a_search_finds():
    """The loss of one item alone, whose policy was searched again, by that policy. The search is
    the softer, the larger the range that entropies have led to."""
    _, agent, _ = make_agent(muzero__reanalyze=1.0)
    state = train_state(agent)
    batch, _ = make_batch(np.random.default_rng(2), observations=K + N + 1)
    entropy = jax.jit(agent.loss)(state.weights.params, state, batch, jax.random.key(3))[1]
    other = batch.found.replace(policy=jnp.full_like(batch.found.policy, 1 / ACTIONS))
    again = jax.jit(agent.loss)(
        state.weights.params, state, batch.replace(found=other), jax.random.key(3)
    )[1]
    assert entropy.metrics["policy"] == again.metrics["policy"]
    assert entropy.metrics["policy_entropy"] < np.log(ACTIONS) - 0.05
    softer = state.replace(weights=with_range(state.weights, 9.0))
    soft = jax.jit(agent.loss)(state.weights.params, softer, batch, jax.random.key(3))[1]
    assert soft.metrics["policy_entropy"] > entropy.metrics["policy_entropy"] + 0.02


def test_searches_do_not_depend_on_their_neighbours():
    _, agent, _ = make_agent()
    state = train_state(agent)
    count, part = 32, slice(2, 4)
    # Alike, so that actions differ by their noise alone.
    observation = jnp.broadcast_to(jnp.array([0.1, -0.2, 0.3]), (count, 3))
    keys = jax.random.split(jax.random.key(1), count)
    timestep = TimeStep(observation, jnp.zeros(count), jnp.ones(count), jnp.zeros(count, bool))
    act = jax.jit(agent.act)
    _, action, found = act(state.weights, agent.carry(jnp.arange(count)), timestep, keys)
    assert len(np.unique(action)) > 1
    _, some, few = act(
        state.weights,
        agent.carry(jnp.arange(2)),
        jax.tree.map(lambda x: x[part], timestep),
        keys[part],
    )
    np.testing.assert_array_equal(action[part], some)
    np.testing.assert_allclose(found.policy[part], few.policy, atol=5e-6)


def test_actors_search_with_the_range_that_entropies_have_led_to():
    _, agent, _ = make_agent(muzero__search__least_range=0.7)
    state = train_state(agent)
    np.testing.assert_allclose(state.weights.stats["least_range"], 0.7)
    observation = jax.random.normal(jax.random.key(2), (8, 3))
    timestep = TimeStep(observation, jnp.zeros(8), jnp.ones(8), jnp.zeros(8, bool))
    keys = jax.random.split(jax.random.key(1), 8)

    def certainty(least_range):
        weights = with_range(state.weights, least_range)
        found = jax.jit(agent.act)(weights, agent.carry(jnp.arange(8)), timestep, keys)[2]
        return found.policy.max(-1).mean()

    assert certainty(0.01) > certainty(9.0) + 0.05


def test_settings_without_effect_or_sense_are_rejected():
    env = envs.make_environment("dummy:memory", {}, {})
    config = make_config(agent="muzero", network__core="gru")
    with pytest.raises(ConfigError, match="for environments that need memory agent='r2d2'"):
        muzero.make(env.spec, config.settings, config.muzero, Devices())
    env = envs.make_environment("dummy:choice", {}, {})
    with pytest.raises(ConfigError, match="use agent='alphazero'"):
        muzero.make(env.spec._replace(players=2), config.settings, config.muzero, Devices())
    env = envs.make_environment("dummy:stripe", {"continuous": True}, {})
    config = make_config(agent="muzero", muzero__bootstrap="corrected")
    with pytest.raises(ConfigError, match="'corrected' needs discrete actions"):
        muzero.make(env.spec, config.settings, config.muzero, Devices())
    for changes, match in (
        ({"muzero__reanalyze": 0.3}, "a number of eighths"),
        ({"muzero__atoms": 10}, "must be odd"),
        ({"muzero__bootstrap": "serch"}, "Did you mean|search"),
        ({"muzero__search__policy": "puct"}, "gumbel"),
        ({"muzero__search__temperature": 2.0}, r"in \[0, 1\]"),
        ({"muzero__search__least_range": 0.0}, "must be positive"),
        ({"muzero__entropy__start": 1.0}, r"start must be in \[0, 1\)"),
        ({"muzero__entropy__end": 0.0}, r"end in \(0, 1\)"),
        ({"muzero__entropy__steps": -1}, "must not be negative, got -1"),
        ({"muzero__search__prior_exponent": 1.5}, r"prior_exponent must be in \[0, 1\]"),
        ({"muzero__reanalyze": 0.5, "replay__batch": 12}, "must be a multiple of 8"),
        ({"muzero__model__state": "plane"}, "one of"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_config(agent="muzero", **changes)


def test_all_settings_of_the_model_but_remat_are_fixed_for_a_run():
    prefix = "muzero.model."
    fixed = {key.removeprefix(prefix) for key in muzero.Config.fixed if key.startswith(prefix)}
    assert fixed | {"remat"} == {field.name for field in dataclasses.fields(ModelConfig)}
