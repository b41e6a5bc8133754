"""The arrays of a tree in one vector, put together quickly on CPUs.

XLA's CPU backend concatenates arrays by a loop for each of them that is as long as the longest
one's, with reads and writes that are masked beyond the end of a shorter array. Where no memory is
mapped there, a masked read takes hundreds of cycles: depending on addresses, the gradients of a
network took 150 times as long to put together (benchmarks/README.md). Other platforms concatenate.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import Array, ArrayTree


def _by_slices(*parts: Array) -> Array:
    """Writes each part to its place."""
    ends = itertools.accumulate(x.size for x in parts)
    places = [(end - x.size, x) for end, x in zip(ends, parts, strict=True)]
    whole = jnp.zeros(sum(x.size for x in parts), parts[0].dtype)
    # XLA turns the first part into a padded one, again with masks beyond its end, and that of the
    # largest part has the least to pad.
    for start, x in sorted(places, key=lambda place: -place[1].size):
        whole = lax.dynamic_update_slice(whole, x, (start,))
    return whole


def _native(*parts: Array) -> Array:
    """JAX's own concatenation."""
    return jnp.concatenate(parts)


def ravel(tree: ArrayTree) -> tuple[Array, Callable[[Array], ArrayTree]]:
    """All elements of a tree in one vector, as by ``jax.flatten_util.ravel_pytree``.

    Args:
      tree: at least one array; their types are promoted to a common one.

    Returns:
      The vector ``[N]``, and a function that makes such a tree of another one, with the types of
      the first.
    """
    leaves, structure = jax.tree.flatten(tree)
    common = jnp.result_type(*leaves)
    parts = [jnp.ravel(x).astype(common) for x in leaves]

    def unravel(vector: Array) -> ArrayTree:
        ends = list(itertools.accumulate(x.size for x in parts))
        pieces = zip(jnp.split(vector, ends[:-1]), leaves, strict=True)
        return structure.unflatten(x.reshape(like.shape).astype(like.dtype) for x, like in pieces)

    return lax.platform_dependent(*parts, cpu=_by_slices, default=_native), unravel
