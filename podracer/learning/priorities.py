"""Drawing items in proportion to their priorities, from recomputed sums in two levels.

The priorities of an environment are laid out as ``[rows, width]``, with the sum of each row beside
them. An item is drawn by drawing a row by the sums, then a place within the row. Setting priorities
recomputes the sums of the rows that they are in, so that a sum never drifts, however often its
items change, as it would if differences were added to it. Drawing an item and setting its priority
take time proportional to the square root of the number of items in a group.

Environments are divided into *groups* of consecutive global numbers, from each of which equally
many items of a batch are drawn, with keys derived from the group's number. How the environments are
spread over devices therefore does not change what is drawn, and drawing needs no communication.
"""

from math import ceil, gcd, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.types import Array

# What stands for a sum of 0 in a divisor.
TINY = 1e-30


class Layout(NamedTuple):
    """Where priorities are.

    Attributes:
      groups: number of groups, over all devices.
      envs: number of environments of a group.
      draws: number of items of a batch that are drawn from a group.
      rows: number of rows of an environment.
      width: number of items of a row.
    """

    groups: int
    envs: int
    draws: int
    rows: int
    width: int


class Priorities(struct.PyTreeNode):
    """Priorities of the items of B environments, raised to ``priority_exponent``; an item of 0 is
    never drawn.

    Attributes:
      items: ``[B, rows, width]`` float32.
      sums: ``[B, rows]`` float32, the sum of each row.
    """

    items: Array
    sums: Array


class Drawn(NamedTuple):
    """The items of a batch on this device, ``[items]`` each.

    Attributes:
      env: number of the environment on this device.
      item: number of the item in its environment.
      priority: its priority, raised to ``priority_exponent``.
      probability: the probability that a draw over all groups returns this item.
    """

    env: Array
    item: Array
    priority: Array
    probability: Array


def make_layout(num_envs: int, batch: int, items: int) -> Layout:
    """The layout with as many groups as possible, and about as many rows of a group as places.

    Args:
      num_envs: number of environments, over all devices.
      batch: items of a batch, over all devices.
      items: items of an environment.
    """
    groups = gcd(num_envs, batch)
    envs = num_envs // groups
    width = max(1, min(items, round(sqrt(envs * items))))
    return Layout(groups, envs, batch // groups, ceil(items / width), width)


def init(layout: Layout, batch: int) -> Priorities:
    """Priorities of 0 for ``batch`` environments."""
    zeros = jnp.zeros((batch, layout.rows, layout.width))
    return Priorities(zeros, zeros[..., 0])


def assign(priorities: Priorities, env: Array, item: Array, values: Array) -> Priorities:
    """Sets the priorities of items.

    Args:
      priorities: the present priorities.
      env: ``[n]``, numbers of environments on this device.
      item: ``[n]``, numbers of items in these environments.
      values: ``[n]``, their new priorities; an item that occurs twice must have the same
        value each time.
    """
    row, place = jnp.divmod(item, priorities.items.shape[-1])
    items = priorities.items.at[env, row, place].set(values)
    sums = priorities.sums.at[env, row].set(items[env, row].sum(-1))
    return Priorities(items, sums)


def _choose(weights: Array, place: Array) -> Array:
    """The index of the weight that contains ``place`` in [0, 1) of their sum: ``[..., n]`` and
    ``[...]`` -> ``[...]``.

    First a block of weights is chosen, then one within it: running sums are the most expensive part
    of drawing, and these are of about the square root of n numbers.
    """
    width = max(1, round(sqrt(weights.shape[-1])))
    rest = -weights.shape[-1] % width
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, rest)])
    blocks = weights.reshape(*weights.shape[:-1], -1, width)
    sums = blocks.sum(-1)
    block, place = _find(sums, place * sums.sum(-1))
    chosen = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
    return block * width + _find(chosen, place)[0]


def _find(weights: Array, place: Array) -> tuple[Array, Array]:
    """The index of the weight that contains ``place`` of their sum, and the place within it:
    ``[..., n]`` and ``[...]`` -> ``[...]`` each.

    A parallel sum is not exactly monotonic, so a weight of 0 is ruled out explicitly.
    """
    total = jnp.cumsum(weights, -1)
    beyond = (total > place[..., None]) & (weights > 0)
    index = jnp.where(beyond.any(-1), beyond.argmax(-1), weights.argmax(-1))
    before = jnp.take_along_axis(total - weights, index[..., None], -1)[..., 0]
    return index, place - before


def draw(priorities: Priorities, layout: Layout, key: Array, device_index: Array | int) -> Drawn:
    """Draws this device's items of a batch.

    Args:
      priorities: of this device's environments, whole groups.
      layout: their layout.
      key: random key of the batch, the same on all devices.
      device_index: number of this device; the environments of device 0 come first.
    """
    groups = priorities.items.shape[0] // layout.envs
    draws = layout.draws

    def from_group(key: Array, items: Array, sums: Array) -> Drawn:
        uniform = jax.random.uniform(key, (2, draws))
        # Stratified sampling: each draw has its own part of the sum, which lowers the variance.
        places = (jnp.arange(draws) + uniform[0]) / draws
        row = _choose(jnp.broadcast_to(sums, (draws, sums.size)), places)
        chosen = items[row]
        place = _choose(chosen, uniform[1])
        weight = jnp.take_along_axis(chosen, place[:, None], 1)[:, 0]
        env, row = jnp.divmod(row, layout.rows)
        # The probability of a row times that of the place in it.
        probability = weight / jnp.maximum(sums.sum(), TINY) / layout.groups
        return Drawn(env, row * layout.width + place, weight, probability)

    numbers = device_index * groups + jnp.arange(groups)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)
    items = priorities.items.reshape(groups, -1, layout.width)
    drawn = jax.vmap(from_group)(keys, items, priorities.sums.reshape(groups, -1))
    env = drawn.env + jnp.arange(groups)[:, None] * layout.envs
    return jax.tree.map(jnp.ravel, drawn._replace(env=env))
