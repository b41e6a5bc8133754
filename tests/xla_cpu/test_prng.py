"""Our threefry draws the bits of JAX's."""

import jax
import numpy as np

from podracer.xla_cpu import prng

DRAWS = [
    jax.random.key_data,
    lambda k: jax.random.key_data(jax.random.split(k, (3, 5))),
    lambda k: jax.random.key_data(jax.random.fold_in(k, 77)),
    lambda k: jax.random.key_data(jax.vmap(jax.random.split)(jax.random.split(k, 4))),
    lambda k: jax.random.bits(k, (7,)),
    lambda k: jax.random.bits(k, (7,), "uint8"),
    lambda k: jax.random.normal(k, (2, 3)),
    lambda k: jax.random.permutation(k, 10),
]


@jax.jit
def draw(key):
    return [function(key) for function in DRAWS]


def test_unrolled_threefry_has_the_bits_of_jax():
    for seed in (0, 3, 2**31 - 1):
        ours, theirs = prng.key(seed), jax.random.key(seed, impl="threefry2x32")
        assert jax.random.key_impl(ours) != jax.random.key_impl(theirs)
        for own, other in zip(draw(ours), draw(theirs), strict=True):
            np.testing.assert_array_equal(own, other)
