"""Networks: shapes, carries, precision, densities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets import actor_critic, recurrent
from podracer.nets.conv import LAYERS
from podracer.nets.network import NetworkConfig
from podracer.types import Box, Discrete, Spec
from podracer.xla_cpu import prng
from podracer.xla_cpu.convolution import convolve
from podracer.xla_cpu.pooling import max_pool

BOX = Box((2,), -np.ones(2), np.ones(2))
SHAPES = {
    "mlp": (3, 2),
    "minatar": (10, 10, 4),
    "shallow": (84, 84, 4),
    "nature": (84, 84, 4),
    "resnet": (20, 20, 3),
}


def make(shape, action=None, **config):
    spec = Spec(jax.ShapeDtypeStruct(shape, jnp.float32), action or Discrete(3))
    network = actor_critic.make_network(spec, NetworkConfig(core_size=8, **config))
    return network, jax.jit(network.init)(prng.key(0))


def make_abstract(shape, action, **config):
    """As ``make``, without initialising the parameters."""
    spec = Spec(jax.ShapeDtypeStruct(shape, jnp.float32), action)
    network = actor_critic.make_network(spec, NetworkConfig(core_size=8, **config))
    return network, jax.eval_shape(network.init, prng.key(0))


@pytest.mark.parametrize("torso", SHAPES)
@pytest.mark.parametrize(("core", "shared"), [("none", False), ("gru", True), ("lstm", False)])
def test_shapes_and_precision(torso, core, shared):
    for action, dtype in ((Discrete(3), "float32"), (BOX, "bfloat16")):
        network, params = make_abstract(
            SHAPES[torso], action, torso=torso, core=core, shared=shared, dtype=dtype
        )
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        observation = jnp.ones((2, 5, *SHAPES[torso]), jnp.uint8)
        memory, policy, value = jax.eval_shape(
            network.apply, params, network.initial_carry(5), observation, jnp.zeros((2, 5), bool)
        )
        assert jax.tree.structure(memory) == jax.tree.structure(network.initial_carry(5))
        shape = (2, 5, 3) if action == Discrete(3) else (2, 5, 2)
        assert {x.shape for x in jax.tree.leaves(policy)} == {shape}
        assert value.shape == (2, 5)
        for x in jax.tree.leaves((policy, value, memory)):
            assert x.dtype == jnp.float32


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_a_whole_unroll_equals_single_steps_with_resets(core):
    network, params = make((3,), core=core)
    rng = np.random.default_rng(0)
    observation = jnp.asarray(rng.normal(size=(6, 4, 3)), jnp.float32)
    first = jnp.asarray(rng.random((6, 4)) < 0.4)
    apply = jax.jit(network.apply)
    memory, policy, value = apply(params, network.initial_carry(4), observation, first)
    step = network.initial_carry(4)
    for t in range(6):
        # A reset must be equal to the initial carry where an episode begins.
        fresh = jax.tree.map(
            lambda m, zero, t=t: jnp.where(first[t][:, None], zero, m),
            step,
            network.initial_carry(4),
        )
        no = jnp.zeros((1, 4), bool)
        step, p, v = apply(params, fresh, observation[t : t + 1], no)
        np.testing.assert_allclose(p[0], policy[t], atol=1e-6)
        np.testing.assert_allclose(v[0], value[t], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), step, memory)


def test_layers_are_orthogonal_and_the_policy_starts_nearly_uniform():
    _, params = make((64,), hidden=(64, 64))
    kernel = params["actor"]["torso"]["layers"][0]["kernel"]
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(64), atol=1e-4)
    logits = params["policy"]["logits"]["kernel"]
    np.testing.assert_allclose(np.linalg.norm(logits, axis=0), 0.01, rtol=1e-4)


def test_shared_and_separate_torsos():
    _, separate = make((3,))
    _, shared = make((3,), shared=True)
    assert "critic" in separate
    assert "critic" not in shared


def test_gaussian_log_prob_is_the_density_of_the_stored_action():
    network, _ = make((3,), BOX)
    mean, log_std = jnp.array([[0.3, -2.0]]), jnp.array([[-0.5, 0.2]])
    action = jnp.array([[1.7, -2.4]])
    std = np.exp(log_std)
    density = np.exp(-(((action - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    log_prob = network.distribution((mean, log_std)).log_prob(action)
    np.testing.assert_allclose(log_prob, np.log(density).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("torso", ["mlp", "minatar", "pixels"])
def test_normalised_layers_ignore_the_scale_of_what_they_take(torso):
    """Their weights are orthogonal, and biases zero, at first."""
    observation = jax.random.normal(prng.key(1), (1, 2, *SHAPES.get(torso, (10, 10, 4))))
    values = []
    for layer_norm, scale in itertools.product((False, True), (1.0, 100.0)):
        network, params = make(observation.shape[2:], torso=torso, layer_norm=layer_norm)
        no = jnp.zeros((1, 2), bool)
        values.append(network.apply(params, (), scale * observation, no)[2])
    assert np.abs(values[1] - values[0]).max() > 1e-3
    np.testing.assert_allclose(values[3], values[2], atol=1e-4)


def test_unsigned_bytes_are_scaled_to_one():
    network, params = make((4,))
    no = jnp.zeros((1, 1), bool)
    _, bytes_, _ = network.apply(params, (), jnp.full((1, 1, 4), 255, jnp.uint8), no)
    _, floats, _ = network.apply(params, (), jnp.ones((1, 1, 4)), no)
    np.testing.assert_allclose(bytes_, floats)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torso": "mlpp"}, "unknown network torso 'mlpp'; did you mean mlp"),
        ({"core": "gruu"}, "did you mean gru"),
        ({"activation": "tahn"}, "did you mean tanh"),
        ({"dtype": "bfloat"}, "did you mean bfloat16"),
        ({"hidden": (64, 0)}, r"must be positive, got network.hidden=\(64, 0\)"),
        ({"layer_norm": True, "torso": "resnet"}, "network.layer_norm=True is for the other"),
    ],
)
def test_impossible_networks(changes, message):
    with pytest.raises(ConfigError, match=message):
        NetworkConfig(**changes)


def test_convolutions_reject_observations_that_are_not_images_or_too_small():
    for torso, shape in itertools.product((*LAYERS, "resnet"), ((4,), (2, 2, 2))):
        if (torso, shape) == ("resnet", (2, 2, 2)):
            continue  # It pads, so it takes images of any size.
        with pytest.raises(ConfigError, match=r"needs observations|too large for"):
            make(shape, torso=torso)


def jax_convolve(x, w, stride, padding):
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


KERNELS = [(3, 1), (3, 2), (8, 4), (4, 3)]
PADDINGS = ["SAME", "VALID", ((2, 1), (0, 3))]


# On a CPU, 20 images are two blocks, and 35 are three with an image of padding.
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "images"),
    [
        *((*kernel, padding, 20) for kernel in KERNELS for padding in PADDINGS),
        *((3, 2, "SAME", images) for images in (35, 1, 0)),
    ],
)
def test_convolutions_have_the_gradients_of_jax(kernel, stride, padding, images):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(images, 13, 11, 3)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(kernel, kernel, 3, 5)), jnp.float32)

    def theirs(x, w):
        return jax_convolve(x, w, stride, padding)

    ours, our_vjp = jax.vjp(lambda x, w: convolve(x, w, (stride, stride), padding), x, w)
    expected, their_vjp = jax.vjp(theirs, x, w)
    # A processor may add up one of them in another order, which shows in numbers near 0.
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    dy = jnp.asarray(rng.normal(size=ours.shape), jnp.float32)
    for a, b in zip(our_vjp(dy), their_vjp(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_convolutions_in_bfloat16_have_gradients_as_exact_as_those_of_jax():
    rng = np.random.default_rng(0)
    # As behind a relu: a sum of many terms of one sign.
    x = jnp.asarray(rng.uniform(0, 0.7, size=(4093, 6, 6, 4)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, 3, 4, 5)), jnp.float32)

    def gradient(convolve, dtype):
        return jax.grad(lambda w: convolve(x.astype(dtype), w.astype(dtype)).sum().astype(float))(w)

    exact = gradient(lambda x, w: jax_convolve(x, w, 1, "VALID"), jnp.float32)
    ours = gradient(lambda x, w: convolve(x, w, (1, 1), "VALID"), jnp.bfloat16)
    np.testing.assert_allclose(ours, exact, rtol=0.01)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_run_convolutions_and_pools_of_jax(platform):
    def gradient(x, w):
        return jax.grad(lambda x, w: max_pool(convolve(x, w, (1, 1), "VALID")).sum(), (0, 1))(x, w)

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((40, 8, 8, 3), (3, 3, 3, 4)))
    traced = jax.jit(gradient).trace(*shapes)
    own, theirs = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", platform))
    assert "select_and_scatter" in theirs
    assert "select_and_scatter" not in own
    assert "stablehlo.while" in own
    assert "stablehlo.while" not in theirs


@pytest.mark.parametrize(("height", "width"), [(8, 7), (5, 6), (1, 2)])
def test_the_pool_has_the_values_and_the_gradient_of_jax(height, width):
    rng = np.random.default_rng(0)
    # So few values that most windows have several largest elements; many of them are negative.
    x = jnp.asarray(rng.integers(-2, 1, (2, height, width, 3)), jnp.float32)

    def theirs(x):
        return nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")

    ours, our_vjp = jax.vjp(max_pool, x)
    expected, their_vjp = jax.vjp(theirs, x)
    np.testing.assert_array_equal(ours, expected)
    dy = jnp.asarray(rng.normal(size=ours.shape), jnp.float32)
    np.testing.assert_allclose(our_vjp(dy)[0], their_vjp(dy)[0], rtol=1e-6, atol=1e-6)


def test_convolve_rejects_unsupported_arguments():
    with pytest.raises(ValueError, match="neither dilation nor feature groups"):
        convolve(
            jnp.ones((1, 4, 4, 1)), jnp.ones((2, 2, 1, 1)), (1, 1), "SAME", rhs_dilation=(2, 2)
        )


@pytest.mark.parametrize(("core", "factors"), [("gru", (0, 1, 0)), ("lstm", (-1, 1, 0, 0))])
def test_a_core_can_begin_with_a_long_memory(core, factors):
    """Biases of log U(1, T-1), with which a gate forgets over 1 to T-1 steps."""
    bias = recurrent.bias_init(core, 100)(jax.random.key(0), (50 * len(factors),), jnp.float32)
    gates = bias.reshape(len(factors), 50)
    (place,) = (i for i, factor in enumerate(factors) if factor == 1)
    np.testing.assert_allclose(gates, np.outer(factors, gates[place]))
    times = np.exp(gates[place])
    assert times.min() < 20
    assert times.max() > 80
    assert (times >= 1).all()
    assert (times <= 99).all()
    with pytest.raises(ConfigError, match="core_timescale must be 0 or at least 3 steps, got 2"):
        NetworkConfig(core=core, core_timescale=2)
