"""Our threefry is JAX's, bit for bit."""

import jax
import numpy as np

from podracer import prng


def test_unrolled_threefry_has_the_bits_of_jax():
    for seed in (0, 3, 2**31 - 1):
        ours, theirs = prng.key(seed), jax.random.key(seed, impl="threefry2x32")
        for draw in (
            lambda k: jax.random.key_data(k),
            lambda k: jax.random.key_data(jax.random.split(k, (3, 5))),
            lambda k: jax.random.key_data(jax.random.fold_in(k, 77)),
            lambda k: jax.random.key_data(jax.vmap(jax.random.split)(jax.random.split(k, 4))),
            lambda k: jax.random.bits(k, (7,)),
            lambda k: jax.random.bits(k, (7,), "uint8"),
            lambda k: jax.random.normal(k, (2, 3)),
            lambda k: jax.random.permutation(k, 10),
        ):
            np.testing.assert_array_equal(draw(ours), draw(theirs))
