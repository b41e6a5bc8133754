"""What the target network finds in the place of what actors found, which is older: values to
bootstrap from, and policies (https://arxiv.org/abs/2104.06294)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents.search import Found, Planner
from podracer.nets import masks
from podracer.types import Array, ArrayTree, Devices, Params, TimeStep, TrainState

# Items of a batch are reanalysed in groups of this size, the same number of each group.
GROUP = 8
# What an actor's search found for an action that it took is taken to be at least this.
LEAST_PROBABILITY = 1e-6


class Batch(struct.PyTreeNode):
    """Items of L = unroll + n_step transitions, as the loss reads them.

    Attributes:
      observation: ``[k, items, ...]``: all L+1 if any of them is needed again, else the first.
      timestep: ``[L+1, items]`` without its observation, which is ``()``.
      action: ``[L+1, items]``.
      found: ``[L+1, items, ...]``, what the actors' searches found.
      importance: ``[items]``, the factors of the losses.
      log_rho: ``[L, items]``, see ``model_targets.targets``.
    """

    observation: ArrayTree
    timestep: TimeStep
    action: Array
    found: Found
    importance: Array
    log_rho: Array | None = None


def _predict(planner: Planner, params: Params, batch: Batch) -> tuple[ArrayTree, Array]:
    """Policies and values ``[L+1, items]`` of a network."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.observation)
    _, policy, value = planner.predict(params, flat)
    shape = batch.found.value.shape
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (policy, value))


def _log_rho(logits: Array, batch: Batch) -> Array:
    """How much more probable the actions taken are by a network's policy ``[L+1, items, actions]``
    than by those of the actors' searches, which their actions follow; ``[L, items]``."""
    ours = jax.nn.log_softmax(masks.restrict(logits, batch.observation))
    theirs = jnp.log(jnp.maximum(batch.found.policy, LEAST_PROBABILITY))
    action = batch.action[:-1, :, None]
    return jnp.take_along_axis((ours - theirs)[:-1], action, -1)[..., 0]


def _chosen(items: int, share: float, key: Array) -> Array:
    """The items to search again: of each group the same number, the same on any devices."""
    group = GROUP if share < 1 else 1
    places = jnp.arange(round(share * group)) + jax.random.randint(key, (), 0, group)
    return (jnp.arange(0, items, group)[:, None] + places % group).ravel()


def make_refresh(
    planner: Planner, unroll: int, bootstrap: str, share: float, devices: Devices
) -> Callable[[TrainState, Batch, Array], tuple[Batch, Array]]:
    """``(train_state, batch, key) -> (batch, again [items])``: a batch in which the target network
    has taken the place of older searches, and 1 for the items that were searched again.

    Args:
      planner: the search.
      unroll: steps that the model is unrolled for to learn.
      bootstrap: "search", "target" or "corrected", see ``muzero.Config``.
      share: share of the items whose policies are searched again.
      devices: the devices that learn.
    """

    def search(train_state: TrainState, batch: Batch, numbers: Array, key: Array) -> Any:
        """New policies, and the actions that they are about, ``[unroll + 1, items, ...]``."""
        count = unroll + 1
        keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), count))(numbers)
        flat = jax.tree.map(lambda x: x[:count].reshape(-1, *x.shape[2:]), batch.observation)
        least_range = train_state.weights.stats["least_range"]
        found = planner.search(train_state.target, keys.T.ravel(), flat, least_range=least_range)
        return jax.tree.map(
            lambda x: x.reshape(count, numbers.size, *x.shape[1:]), (found.policy, found.actions)
        )

    def refresh(train_state: TrainState, batch: Batch, key: Array) -> tuple[Batch, Array]:
        target, found, items = train_state.target, batch.found, batch.importance.size
        if bootstrap != "search":
            policy, value = _predict(planner, target, batch)
            found = found.replace(value=value)
            if bootstrap == "corrected":
                batch = batch.replace(log_rho=_log_rho(policy, batch))
        again = jnp.zeros(items)
        if share:
            place_key, key = jax.random.split(key)
            place = _chosen(items, share, place_key)
            part = batch.replace(importance=batch.importance[None])
            part = jax.tree.map(lambda x: x[:, place], part)
            fresh = search(train_state, part, devices.number() * items + place, key)
            policy, actions = jax.tree.map(
                lambda old, new: old.at[: unroll + 1, place].set(new),
                (found.policy, found.actions),
                fresh,
            )
            found = found.replace(policy=policy, actions=actions)
            if bootstrap == "search":
                value = _predict(planner, target, part)[1]
                found = found.replace(value=found.value.at[:, place].set(value))
            again = again.at[place].set(1.0)
        return jax.lax.stop_gradient((batch.replace(found=found), again))

    return refresh
