"""JAX's threefry with its rounds unrolled: the same bits, on CPUs up to twenty times as fast.

On CPUs JAX runs the rounds of threefry in a loop, to compile faster. XLA can't fuse a loop with the
operations around it, and environments draw few numbers often: in CartPole with 64 environments,
random numbers then cost more than the physics. Unrolled rounds are fused into the neighbouring
kernels. (JAX's philox is fused as well, but in JAX 0.11 it does not compile on several devices.)
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.extend import random as jex_random

from podracer.types import Array

_JAX = jex_random.threefry_prng_impl
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _hash(key: Array, count: Array) -> tuple[Array, Array]:
    """Threefry 2x32 with 20 rounds of the counters (0, count); Salmon et al. 2011, section 3.3.

    Args:
      key: ``[2]`` uint32.
      count: uint32 of any shape.

    Returns:
      Two arrays of that shape.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = jnp.zeros_like(count) + keys[0], count + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def _counts(shape: tuple[int, ...]) -> Array:
    return jax.lax.iota(jnp.uint32, prod(shape)).reshape(shape)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.stack(_hash(key, _counts(shape)), -1)


def _fold_in(key: Array, data: Array | int) -> Array:
    return jnp.stack(_hash(key, jnp.asarray(data, jnp.uint32)))


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    # JAX's own code handles the other cases, which are rare.
    if bit_width != 32 or prod(shape) >= 2**32:
        return _JAX.random_bits(key, bit_width, shape)
    x, y = _hash(key, _counts(shape))
    return x ^ y


_UNROLLED = jex_random.define_prng_impl(
    key_shape=(2,),
    seed=_JAX.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="threefry_unrolled",
)


def key(seed: int, platform: str = "") -> Array:
    """A random key, of the implementation that is fastest on a platform.

    Args:
      seed: any integer.
      platform: platform of the devices that will use the key, "cpu", "gpu" or "tpu"; by default
        JAX's default backend.

    Returns:
      A scalar key, ``[]``.
    """
    impl = _UNROLLED if (platform or jax.default_backend()) == "cpu" else "threefry2x32"
    return jax.random.key(seed, impl=impl)
