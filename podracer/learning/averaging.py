"""Groups that average: each learns independently, and at intervals all continue from their mean.

With an outer rate of 1 and without outer momentum this is local SGD
(https://arxiv.org/abs/1805.09767); with them it is DiLoCo (https://arxiv.org/abs/2311.08105), whose
outer optimizer is SGD with Nesterov's momentum. Its gradient is the difference between the
weights that all groups began with and the mean of those that they have now.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer.types import Array, ArrayTree, Reduce, Weights


class Groups(NamedTuple):
    """Groups that are to be averaged; the first axis of every array is that of the groups.

    Attributes:
      weights: their weights.
      target: their targets, see ``types.Target``.
      alive: bool, whether a group has not diverged.
    """

    weights: Weights
    target: ArrayTree
    alive: Array


class Average(NamedTuple):
    """What all groups continue from.

    Attributes:
      weights: the weights.
      target: the target.
      opt_state: the state of the outer optimizer.
      metrics: numbers by name, ``[]`` float32 each.
    """

    weights: Weights
    target: ArrayTree
    opt_state: ArrayTree
    metrics: dict[str, Array]


def make_outer(rate: float, momentum: float) -> optax.GradientTransformation:
    """The outer optimizer, which works on one flat vector of all parameters."""
    return optax.flatten(optax.sgd(rate, momentum, nesterov=True))


def mean_of_living(tree: ArrayTree, alive: Array, all_sum: Reduce) -> ArrayTree:
    """The mean over the groups that have not diverged; NaN if all of them have.

    Args:
      tree: ``[groups, ...]``, those of this device.
      alive: ``[groups]`` bool.
      all_sum: the sum of a tree over devices with other groups; called once.
    """

    def total(x: Array) -> Array:
        living = alive.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(living, x, 0).astype(jnp.float32).sum(0)

    count, sums = all_sum((total(alive), jax.tree.map(total, tree)))
    return jax.tree.map(lambda x, like: (x / count).astype(like.dtype), sums, tree)


def average(
    optimizer: optax.GradientTransformation,
    before: Weights,
    opt_state: ArrayTree,
    groups: Groups,
    all_sum: Reduce = lambda tree: tree,
) -> Average:
    """The parameters after a step of the outer optimizer; statistics and targets are means.

    Args:
      optimizer: the outer optimizer, from ``make_outer``.
      before: the weights that all groups began with.
      opt_state: the state of the outer optimizer.
      groups: the groups of this device, after their updates. Those that have diverged have no part
        in the average.
      all_sum: see ``mean_of_living``.
    """
    way = jax.tree.map(lambda old, new: old - new, before.params, groups.weights.params)
    squares = jax.vmap(optax.tree.norm)(way) ** 2
    tree = (way, squares, groups.weights.stats, groups.target)
    way, square, stats, target = mean_of_living(tree, groups.alive, all_sum)
    updates, opt_state = optimizer.update(way, opt_state)
    params = optax.apply_updates(before.params, updates)
    moved = optax.tree.norm(way)
    metrics = {
        "averaging/moved": moved,
        "averaging/apart": jnp.sqrt(jnp.maximum(square - moved**2, 0)),
    }
    return Average(before.replace(params=params, stats=stats), target, opt_state, metrics)
