"""Raveling of trees, against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from podracer.xla_cpu import raveling

FLOATS = {"b": jnp.arange(3.0), "a": (jnp.arange(60.0).reshape(3, 4, 5), jnp.float32(7))}
MIXED = {"x": jnp.arange(4), "y": jnp.arange(6.0).reshape(2, 3), "z": jnp.array([True, False])}


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


@pytest.mark.parametrize("tree", [FLOATS, MIXED, {"one": jnp.ones((2, 2))}])
@pytest.mark.parametrize("way", [raveling._by_slices, raveling._native])
def test_a_tree_is_raveled_as_by_jax(tree, way, monkeypatch):
    monkeypatch.setattr(raveling.lax, "platform_dependent", lambda *x, cpu, default: way(*x))
    vector, unravel = raveling.ravel(tree)
    expected, unravel_expected = ravel_pytree(tree)
    equal(vector, expected)
    equal(unravel(vector), tree)
    equal(unravel(vector * 2), unravel_expected(expected * 2))


def test_the_trees_of_several_agents_are_raveled_at_once():
    several = jax.tree.map(lambda x: jnp.stack([x, x + 1]), FLOATS)
    vectors = jax.jit(jax.vmap(lambda tree: raveling.ravel(tree)[0]))(several)
    for i in range(2):
        equal(vectors[i], ravel_pytree(jax.tree.map(lambda x, i=i: x[i], several))[0])
