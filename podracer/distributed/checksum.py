"""Names and checksums of the arrays of a tree."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from podracer.types import Array, ArrayTree


def named_arrays(tree: ArrayTree) -> dict[str, Array]:
    """The arrays of a tree by name, see ``path_name``; random keys become their uint32 data."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): jax.random.key_data(x) if is_key(x) else x for path, x in paths}


def path_name(path: Any) -> str:
    """The name of a leaf: the parts of its path, joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_key(x: Array) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _bits(x: Array) -> Array:
    """The bits of each element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)


def _words(x: Array) -> Array:
    """The bits of an array as uint32, several elements to a word where the last axis allows it."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    pack = 4 // x.dtype.itemsize
    if pack <= 1 or x.shape[-1] % pack:
        return _bits(x)
    packs = x.reshape(*x.shape[:-1], x.shape[-1] // pack, pack)
    return jax.lax.bitcast_convert_type(packs, jnp.uint32)


@jax.jit
def digests(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays whose axes after the second are summed up, so that any single element changes them.

    Whole words are summed with odd weights, axis by axis, which takes about as long as reading
    them; ``checksum`` takes many times as long for bytes. Arrays of at most two axes stay as they
    are, and so does how arrays are sharded over the first two.

    Args:
      arrays: arrays by name, of any shapes and types.
    """

    def digest(x: Array) -> Array:
        if x.ndim <= 2:
            return x
        words = _words(x)
        while words.ndim > 2:
            # Differs from axis to axis, so that elements at transposed places differ in weight.
            weights = jax.lax.iota(jnp.uint32, words.shape[-1]) * jnp.uint32(2 * words.ndim) + 1
            words = jnp.sum(words * weights, axis=-1, dtype=jnp.uint32)
        return words

    return {name: digest(x) for name, x in arrays.items()}


@jax.jit
def checksum(arrays: Mapping[str, Array]) -> Array:
    """A checksum that changes with any single element: a sum of all bits with odd weights.

    The sum is over integers modulo 2^32, so it doesn't depend on how arrays are sharded.

    Args:
      arrays: arrays by name, of any shapes and types.

    Returns:
      ``[]`` uint32.
    """
    total = jnp.uint32(0)
    for number, name in enumerate(sorted(arrays)):
        x = arrays[name]
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
        part = jnp.sum(_bits(x) * (2 * place + 1), dtype=jnp.uint32)
        total += part * jnp.uint32(2 * number + 1)
    return total
