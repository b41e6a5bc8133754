"""Conversion of observations and actions between environments and agents."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError
from podracer.types import (
    ACTION_MASK,
    Array,
    ArrayTree,
    Box,
    Discrete,
    HostEnvironment,
    Pool,
    Spec,
)


def _is_discrete(space: Any) -> bool:
    return hasattr(space, "n") and tuple(space.shape) == ()


def action_space(space: Any, name: str) -> Discrete | Box:
    """Converts the action space of a Gymnasium or gymnax environment.

    Args:
      space: Gymnasium's or gymnax's space.
      name: name of the environment, for the error.

    Raises:
      ConfigError: agents can't act in this space.
    """
    if _is_discrete(space) and int(getattr(space, "start", 0)) == 0:
        return Discrete(int(space.n))
    if hasattr(space, "low") and np.issubdtype(space.dtype, np.floating):
        shape = tuple(space.shape)
        # The largest float64 stands for "no bound"; as float32 it becomes infinite.
        with np.errstate(over="ignore"):
            low, high = (
                np.broadcast_to(np.asarray(x, np.float32), shape) for x in (space.low, space.high)
            )
        return Box(shape, low, high)
    raise ConfigError(
        f"{name} has the action space {space}; agents act in Box spaces of real numbers and in "
        "Discrete ones that start at 0"
    )


def to_box(action: Array, box: Box) -> Array:
    """Scales an agent's action to the environment's units.

    For an agent, [-1, 1] spans a bounded dimension, and numbers outside are clipped. A dimension
    with fewer than two bounds is not scaled, only clipped at its bound if it has one.

    Args:
      action: ``[..., *box.shape]``, any real number.
      box: the environment's action space.
    """
    bounded = np.isfinite(box.low) & np.isfinite(box.high)
    low, high = np.where(bounded, box.low, -1.0), np.where(bounded, box.high, 1.0)
    scaled = low + (jnp.clip(action, -1, 1) + 1) * 0.5 * (high - low)
    free = jnp.clip(action, box.low, box.high)
    return jnp.where(bounded, scaled, free).astype(jnp.float32)


def to_environment(action: Array, space: Discrete | Box) -> Array:
    """An agent's action in the environment's units."""
    return to_box(action, space) if isinstance(space, Box) else action


def _transfer_dtype(dtype: Any) -> Any:
    return np.uint8 if dtype == np.uint8 else np.float32


def to_transfer_dtype(observation: Any) -> Any:
    """An observation as it is transferred to the device: uint8 stays, all else is float32."""
    return jax.tree.map(lambda x: x.astype(_transfer_dtype(x.dtype), copy=False), observation)


def as_tree(space: Any) -> Any:
    """A Gymnasium space as a tree whose leaves are spaces: a dictionary for a Dict."""
    inner = getattr(space, "spaces", None)
    if not isinstance(inner, Mapping):
        return space
    return {key: as_tree(part) for key, part in inner.items()}


def images(space: Any) -> list[Any]:
    """The spaces of images in a Gymnasium space: uint8 arrays with three axes."""
    leaves = jax.tree.leaves(as_tree(space))
    return [x for x in leaves if getattr(x, "dtype", None) == np.uint8 and len(x.shape) == 3]


def _transfer_spec(name: str, space: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is transferred of a space that is no Dict."""
    if not (hasattr(space, "low") or hasattr(space, "n")):
        raise ConfigError(
            f"{name} observes {space}; agents observe Box, Discrete and MultiBinary spaces, and "
            "Dict spaces of these"
        )
    return jax.ShapeDtypeStruct(space.shape, _transfer_dtype(space.dtype))


def _decoder(space: Any, *, channels_first: bool) -> Callable[[Array], Array]:
    """From what is transferred of a space that is no Dict, ``[B, ...]``, to what agents see."""
    if _is_discrete(space):
        classes, start = int(space.n), int(getattr(space, "start", 0))
        return lambda x: jax.nn.one_hot(x.astype(jnp.int32) - start, classes)
    if channels_first and images(space):
        return lambda x: jnp.moveaxis(x, 1, -1)
    return lambda x: x


def host_environment(
    name: str,
    observation: Any,
    action: Any,
    make: Callable[[Sequence[int], int], Pool],
    *,
    channels_first: bool = False,
) -> HostEnvironment:
    """A host environment from its Gymnasium spaces.

    An integer of a Discrete space becomes one-hot: it is not a quantity. Numbers of an action mask
    become bool.

    Args:
      name: name of the environment, for errors.
      observation: Gymnasium's space.
      action: Gymnasium's space.
      make: see ``types.HostEnvironment``.
      channels_first: images are ``[C, H, W]``, which the device turns into ``[H, W, C]``.

    Raises:
      ConfigError: a space that agents can't observe or act in.
    """
    tree = as_tree(observation)
    transfer_spec = jax.tree.map(partial(_transfer_spec, name), tree)
    decoders = jax.tree.map(partial(_decoder, channels_first=channels_first), tree)
    if isinstance(decoders, dict) and ACTION_MASK in decoders:
        decoders[ACTION_MASK] = lambda x: x != 0

    def decode(transferred: ArrayTree) -> ArrayTree:
        return jax.tree.map(lambda one, x: one(x), decoders, transferred)

    def observe(observation: ArrayTree) -> ArrayTree:
        batch = jax.tree.map(lambda x: x[None], to_transfer_dtype(observation))
        return jax.tree.map(lambda x: x[0], decode(batch))

    spec = Spec(jax.eval_shape(observe, transfer_spec), action_space(action, name))
    return HostEnvironment(spec, make, transfer_spec, lambda x, _: decode(x), observe=observe)
