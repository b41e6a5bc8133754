"""What the branches of a search tree stand for: all actions, or, where these are continuous, some
that were drawn from the policy (Sampled MuZero, https://arxiv.org/abs/2104.06303)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer.nets import heads
from podracer.types import Array, ArrayTree, Box, Discrete


class Branches(NamedTuple):
    """The branches of the nodes of a search tree. A policy is an output of ``heads.policy_head``.

    Attributes:
      grow: ``(key, policy [B, ...]) -> (logits [B, n], actions [B, n, ...])``: the prior of a
        node's n branches, and the actions that they stand for; () where branch i is action i.
      action: ``(actions, branch [B]) -> [B, ...]``, the actions of branches.
      error: ``(policy [..., ], probabilities [..., n], actions [..., n, ...]) -> [...]``, the cross
        entropy between a policy and the probabilities that a search found for branches.
    """

    grow: Callable[[Array, ArrayTree], tuple[Array, ArrayTree]]
    action: Callable[[ArrayTree, Array], Array]
    error: Callable[[ArrayTree, Array, ArrayTree], Array]


ALL_ACTIONS = Branches(
    grow=lambda key, logits: (logits, ()),
    action=lambda actions, branch: branch,
    error=lambda logits, probabilities, actions: optax.softmax_cross_entropy(logits, probabilities),
)


def _sampled_actions(space: Box, count: int) -> Branches:
    """Branches of a number of actions that were drawn from the policy. Their prior is uniform, as
    the policy already draws good actions more often (section 5 of the paper)."""
    make = heads.distribution(space)

    def grow(key: Array, policy: ArrayTree) -> tuple[Array, Array]:
        actions = jnp.moveaxis(make(policy).sample(seed=key, sample_shape=(count,)), 0, 1)
        return jnp.zeros(actions.shape[:2]), actions

    def action(actions: Array, branch: Array) -> Array:
        return jax.vmap(lambda actions, branch: actions[branch])(actions, branch)

    def error(policy: ArrayTree, probabilities: Array, actions: Array) -> Array:
        # Each policy is that of all actions of a node.
        place = probabilities.ndim - 1
        distribution = make(jax.tree.map(lambda x: jnp.expand_dims(x, place), policy))
        return -(probabilities * distribution.log_prob(actions)).sum(-1)

    return Branches(grow, action, error)


def make_branches(space: Discrete | Box, sampled: int) -> Branches:
    """The branches for a space of actions.

    Args:
      space: the actions.
      sampled: how many actions are drawn for each node, where actions are continuous.
    """
    return ALL_ACTIONS if isinstance(space, Discrete) else _sampled_actions(space, sampled)
