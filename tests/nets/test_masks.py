"""Networks of dictionaries and masks, against those of single arrays and of the legal actions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.errors import ConfigError
from podracer.nets import actor_critic, masks
from podracer.nets.network import NetworkConfig
from podracer.nets.q_network import make_q_network
from podracer.types import ACTION_MASK, Box, Discrete, Spec
from podracer.xla_cpu import prng

ACTIONS, SHAPE = 5, (2, 30)
NO = np.zeros(SHAPE, bool)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), tree)


def make(observation, **config):
    spec = Spec(shapes(observation), Discrete(ACTIONS))
    network = actor_critic.make_network(spec, NetworkConfig(hidden=(8,), **config))
    network = network._replace(apply=jax.jit(network.apply))
    return network, jax.jit(network.init)(prng.key(0))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*SHAPE, *shape)).astype(np.float32)


def random_masks(seed=0):
    mask = np.random.default_rng(seed).random((*SHAPE, ACTIONS)) < 0.5
    # Some allow one action, and some none, which stands for all.
    mask[0, :10], mask[1, :10] = np.eye(ACTIONS)[np.arange(10) % ACTIONS] > 0, False
    return mask


def allowed(mask):
    return np.where(mask.any(-1, keepdims=True), mask, True)


def test_an_mlp_takes_all_of_a_dictionary_but_the_mask():
    """As if it were one array, in the order of the names."""
    number, pair, image = normal(), normal(2), np.full((*SHAPE, 2, 2, 1), 51, np.uint8)
    flat = np.concatenate([np.full((*SHAPE, 4), 0.2), pair, number[..., None]], -1)
    flat = flat.astype(np.float32)
    tree = {"b": {"pair": pair, "single": number}, "a": image}
    single, params = make(flat)
    network, same = make(tree)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    expected, out = (n.apply(params, (), x, NO) for n, x in ((single, flat), (network, tree)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), out, expected)
    # A mask changes the policy, but not the value.
    tree[ACTION_MASK] = random_masks()
    network, same = make(tree)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    np.testing.assert_allclose(network.apply(params, (), tree, NO)[2], expected[2], atol=1e-6)


@pytest.mark.parametrize("torso", ["minatar", "pixels"])
def test_a_torso_for_images_takes_the_image_and_the_rest_is_appended(torso):
    tree = {"image": normal(4, 4, 2), "a": normal(), "z": normal(3), ACTION_MASK: random_masks()}
    network, params = make(tree, torso=torso, shared=True)
    _, alone = make(tree["image"], torso=torso, shared=True)
    jax.tree.map(np.testing.assert_array_equal, params["actor"]["torso"], alone["actor"]["torso"])
    size = alone["value"]["value"]["kernel"].shape[0]
    kernel = params["value"]["value"]["kernel"]
    assert kernel.shape[0] == size + 4
    # What is appended passes unchanged to the heads, in the order of the names.
    _, _, value = network.apply(params, (), tree, NO)
    zeros = {**tree, "a": np.zeros_like(tree["a"]), "z": np.zeros_like(tree["z"])}
    _, _, without = network.apply(params, (), zeros, NO)
    rest = np.concatenate([tree["a"][..., None], tree["z"]], -1)
    np.testing.assert_allclose(value - without, (rest @ kernel[size:])[..., 0], atol=1e-5)
    assert np.ptp(without) > 0.01


def test_illegal_actions_have_no_probability_and_all_else_stays_finite():
    tree = {"x": 10 * normal(3), ACTION_MASK: random_masks()}
    legal = allowed(tree[ACTION_MASK])
    network, params = make(tree)
    single, _ = make(tree["x"])
    params["policy"] = jax.tree.map(lambda x: 300 * x, params["policy"])
    _, logits, _ = single.apply(params, (), tree["x"], NO)

    def distribution(params, tree) -> Any:
        return network.distribution(network.apply(params, (), tree, NO)[1])

    # The softmax of the legal logits alone.
    e = np.where(legal, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    p = np.asarray(e / e.sum(-1, keepdims=True))
    ours = distribution(params, tree)
    np.testing.assert_allclose(ours.probs, p, atol=1e-5)
    assert (ours.probs[~legal] == 0).all()
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    np.testing.assert_allclose(ours.entropy(), entropy, atol=1e-4)
    other = distribution(jax.tree.map(lambda x: 0.5 * x, params), tree)
    assert np.isfinite(ours.kl_divergence(other)).all()
    assert np.isfinite(ours.log_prob(np.zeros(SHAPE, int))).all()
    for action in (ours.mode()[None], ours.sample(seed=prng.key(1), sample_shape=1000)):
        assert np.take_along_axis(legal[None], np.asarray(action)[..., None], -1).all()

    def loss(params):
        d = distribution(params, tree)
        return (d.entropy() + d.log_prob(d.mode())).sum()

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


@pytest.mark.parametrize("dueling", [False, True])
def test_illegal_actions_have_the_lowest_values(dueling):
    tree = {"x": normal(3), ACTION_MASK: random_masks()}
    legal = allowed(tree[ACTION_MASK])
    spec = Spec(shapes(tree), Discrete(ACTIONS))
    network = make_q_network(spec, NetworkConfig(hidden=()), dueling=dueling)
    params = network.init(prng.key(0))
    _, q = network.apply(params, (), tree, NO, None)
    advantage = tree["x"] @ params["advantage"]["kernel"]
    if dueling:
        count = legal.sum(-1, keepdims=True)
        mean = np.where(legal, advantage, 0).sum(-1, keepdims=True) / count
        advantage = tree["x"] @ params["value"]["kernel"] + advantage - mean
    np.testing.assert_allclose(q[legal], advantage[legal], atol=1e-6)
    np.testing.assert_array_equal(q[~legal], masks.ILLEGAL)


def test_random_actions_are_legal_and_equally_frequent():
    for mask in ([True, False, True, True, False], [False] * 5, [False, False, False, False, True]):
        legal = masks.legal({"x": jnp.zeros(1), ACTION_MASK: jnp.array(mask)})
        keys = jax.random.split(prng.key(0), 20_000)
        draw = partial(masks.random_action, allowed=legal, num_actions=5)
        drawn = jax.jit(jax.vmap(draw))(keys)
        expected = allowed(np.array(mask)) / allowed(np.array(mask)).sum()
        np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 20_000, expected, atol=0.02)
        assert (np.bincount(drawn, minlength=5)[expected == 0] == 0).all()


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bools(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


BOX = Box((2,), -np.ones(2), np.ones(2))


@pytest.mark.parametrize(
    ("observation", "action", "torso", "message"),
    [
        ({"x": f32(3), ACTION_MASK: bools(4)}, None, "mlp", r"is bool\[4\]; .* must be bool\[5\]"),
        ({"x": f32(3), ACTION_MASK: f32(5)}, None, "mlp", r"is float32\[5\]; .* be bool\[5\]"),
        ({"x": f32(3), ACTION_MASK: bools(5)}, BOX, "mlp", r"continuous, of shape \(2,\)"),
        ({ACTION_MASK: bools(5)}, None, "mlp", "something to observe besides an action mask"),
        ({"x": {ACTION_MASK: bools(5), "y": f32()}}, None, "mlp", "it must be at the top"),
        ({"x": f32(3), "y": f32(2)}, None, "minatar", r"with 0 of them, .*; use torso='mlp'"),
        ({"x": f32(9, 9, 1), "y": f32(8, 8, 2)}, None, "nature", "dictionary with 2 of them"),
        ({"x": f32(3), ACTION_MASK: bools(5)}, None, "resnet", r"\[height, width, channels\], got"),
    ],
)
def test_impossible_observations(observation, action, torso, message):
    spec = Spec(observation, action or Discrete(ACTIONS))
    with pytest.raises(ConfigError, match=message):
        actor_critic.make_network(spec, NetworkConfig(torso=torso))
