"""MuZero's model; most of its tests are of images, whose states are images too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets.model import ModelConfig, make_model, scale
from podracer.nets.network import NetworkConfig
from podracer.types import Discrete, Spec
from tests.helpers import make_config, make_run

ACTIONS, ATOMS = 3, 5


def make(shape, halvings=0, dtype=jnp.uint8, blocks=1, remat=False):
    spec = Spec(jax.ShapeDtypeStruct(shape, dtype), Discrete(ACTIONS))
    sizes = {"hidden": (8,), "channels": 4, "blocks": blocks, "halvings": halvings}
    config = ModelConfig("planes", **sizes, remat=remat)
    return make_model(spec, NetworkConfig(), config, ATOMS)


@pytest.mark.parametrize(
    ("size", "halvings", "state"), [(84, 4, 6), (84, 3, 11), (96, 4, 6), (10, 0, 10), (7, 1, 4)]
)
def test_each_halving_rounds_up(size, halvings, state):
    model = make((size, size, 4), halvings)
    params = jax.eval_shape(model.init, jax.random.key(0))
    observation = jax.ShapeDtypeStruct((2, size, size, 4), jnp.uint8)
    planes = jax.eval_shape(model.represent, params, observation)
    assert planes.shape == (2, state, state, 4)
    action = jax.ShapeDtypeStruct((2,), jnp.int32)
    after, reward = jax.eval_shape(model.step, params, planes, action)
    policy, value = jax.eval_shape(model.predict, params, after)
    assert after.shape == planes.shape
    assert (reward.shape, policy.shape, value.shape) == ((2, ATOMS), (2, ACTIONS), (2, ATOMS))


def test_states_follow_from_each_observation_and_action_alone():
    model = make((6, 6, 2))
    params = model.init(jax.random.key(0))
    observation = np.random.default_rng(0).integers(0, 256, (3, 6, 6, 2)).astype(np.uint8)
    state = model.represent(params, jnp.asarray(observation))
    after, _ = model.step(params, state, jnp.array([0, 1, 2]))
    for x in (state, after):
        np.testing.assert_allclose(x.min((1, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(x.max((1, 2, 3)), 1, atol=1e-3)
    one, _ = model.step(params, model.represent(params, observation[1:2]), jnp.array([1]))
    np.testing.assert_allclose(one, after[1:2], atol=1e-5)
    other, _ = model.step(params, state, jnp.array([0, 2, 2]))
    np.testing.assert_allclose(other[0], after[0], atol=1e-5)
    assert np.abs(other[1] - after[1]).max() > 0.01
    # Bytes are numbers of 255ths.
    again = model.represent(params, jnp.asarray(observation, jnp.float32) / 255)
    np.testing.assert_allclose(again, state, atol=1e-5)


def test_remat_has_the_same_gradient_in_less_memory():
    def compiled(remat):
        model = make((10, 10, 4), dtype=jnp.float32, blocks=4, remat=remat)

        def loss(params, observation, action):
            after, reward = model.step(params, model.represent(params, observation), action)
            return jnp.mean(after**2) + jnp.mean(reward**2)

        params = model.init(jax.random.key(0))
        inputs = (params, jax.random.uniform(jax.random.key(1), (16, 10, 10, 4)), jnp.ones(16, int))
        program = jax.jit(jax.grad(loss)).lower(*inputs).compile()
        return program(*inputs), program.memory_analysis().temp_size_in_bytes

    (stored, more), (computed_again, less) = compiled(False), compiled(True)
    assert less < 0.7 * more
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stored, computed_again)


def test_each_action_has_weights_of_its_own_in_vector_dynamics():
    spec = Spec(jax.ShapeDtypeStruct((4,), jnp.float32), Discrete(ACTIONS))
    model = make_model(spec, NetworkConfig(hidden=()), ModelConfig(size=6, hidden=(8,)), ATOMS)
    # The last layers are zeros at first.
    params = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape),
        model.init(jax.random.key(0)),
    )
    state = model.represent(params, jax.random.normal(jax.random.key(1), (5, 4)))
    action = jnp.array([0, 1, 2, 1, 0])
    after, reward = model.step(params, state, action)

    parts = params["dynamics"]
    (first,) = parts["layers"]["layers"].values()
    weights = first["kernel"].reshape(1 + ACTIONS, 1 + 6, 8)
    for s, a, found, logits in zip(state, action, after, reward, strict=True):
        both = weights[0] + weights[1 + a]
        x = np.tanh(both[0] + s @ both[1:] + first["bias"])
        change = s + x @ parts["change"]["kernel"] + parts["change"]["bias"]
        np.testing.assert_allclose(found, change / np.sqrt((change**2).mean()), atol=1e-4)
        expected = x @ parts["reward"]["kernel"] + parts["reward"]["bias"]
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    for x in (state, after):
        np.testing.assert_allclose((x**2).mean(-1), 1, atol=1e-3)


@pytest.mark.parametrize("state", ["vector", "planes"])
def test_dense_layers_are_normalised(state):
    shape = (4,) if state == "vector" else (6, 6, 2)
    spec = Spec(jax.ShapeDtypeStruct(shape, jnp.float32), Discrete(ACTIONS))
    config = ModelConfig(state, hidden=(8,), channels=4, blocks=1)

    def arrays(on):
        model = make_model(spec, NetworkConfig(hidden=(), layer_norm=on), config, ATOMS)
        return len(jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))

    # Dynamics, policy and value have a hidden layer each, with a scale and a bias.
    assert arrays(True) - arrays(False) == 2 * 3


def test_the_gradient_of_a_scaled_state_is_finite():
    """Also where a compiler computes a state again, rounded otherwise: that of ``jnp.max`` is not a
    number then, in some 150 rows of this function on a CPU with few optimisations."""
    states, factors = np.random.default_rng(0).normal(size=(2, 512, 4, 4, 4)).astype(np.float32)
    norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    def total(states):
        return (scale(jax.nn.relu(states + norm(factors * states))) * factors).sum()

    gradient = jax.jit(jax.grad(total))(states)
    np.testing.assert_allclose(gradient, jax.grad(total)(states), atol=1e-3)


def test_the_gradient_of_a_scaled_state_is_that_of_the_formula():
    state = np.random.default_rng(0).normal(size=(3, 5))
    factors = np.random.default_rng(1).normal(size=(3, 5))
    gradient = jax.grad(lambda x: (scale(x) * factors).sum())(jnp.asarray(state))
    for place in np.ndindex(3, 5):
        change = np.zeros((3, 5))
        change[place] = 1e-2
        slope = ((scale(state + change) - scale(state - change)) * factors).sum() / 2e-2
        np.testing.assert_allclose(gradient[place], slope, atol=1e-2)


def test_planes_need_one_image():
    with pytest.raises(ConfigError, match="needs observations"):
        make((4,))
    spec = Spec(
        {"a": jax.ShapeDtypeStruct((6, 6, 2), jnp.uint8)}
        | {"b": jax.ShapeDtypeStruct((3,), jnp.float32)},
        Discrete(ACTIONS),
    )
    with pytest.raises(ConfigError, match="observes 2 arrays"):
        make_model(spec, NetworkConfig(), ModelConfig("planes"), ATOMS)


@pytest.mark.slow
def test_all_parts_of_a_model_of_images_learn():
    config = make_config(
        env="gymnax:Breakout-MinAtar",
        agent="muzero",
        replay__begin=64,
        replay__batch=8,
        muzero__unroll=2,
        muzero__n_step=2,
        muzero__search__simulations=2,
        muzero__model__state="planes",
        muzero__model__channels=4,
        muzero__model__blocks=1,
    )
    _, _, state, step = make_run(config)
    # The last layers are zeros at first: what is before them learns from the second step on.
    before = state.train.weights.params
    for _ in range(4):
        state, metrics = step(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics.learner))
    for name, part in state.train.weights.params.items():
        changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), part, before[name])
        assert max(jax.tree.leaves(changes)) > 0, name
