"""Observations and actions, as agents see them and as environments give and take them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree, Box, Discrete, HostEnvironment, Pool, Spec


def _is_discrete(space: Any) -> bool:
    return hasattr(space, "n") and tuple(space.shape) == ()


def action_space(space: Any, name: str) -> Discrete | Box:
    """The action space of a Gymnasium or gymnax environment.

    Args:
      space: theirs.
      name: of the environment, for the error.

    Raises:
      ConfigError: agents can't act in it.
    """
    if _is_discrete(space) and int(getattr(space, "start", 0)) == 0:
        return Discrete(int(space.n))
    if hasattr(space, "low") and np.issubdtype(space.dtype, np.floating):
        shape = tuple(space.shape)
        # float64's largest number, which stands for no bound, is infinite as float32.
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
    """An agent's unbounded action as the environment takes it.

    Agents act in units in which [-1, 1] spans a bounded box; what lies outside is clipped. An
    unbounded side is left as it is.

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
    """An agent's action as the environment takes it."""
    return to_box(action, space) if isinstance(space, Box) else action


def as_sent(observation: np.ndarray) -> np.ndarray:
    """Bytes stay bytes, all other numbers become float32: once, before they travel."""
    dtype = np.uint8 if observation.dtype == np.uint8 else np.float32
    return observation.astype(dtype, copy=False)


def host_environment(
    name: str,
    observation: Any,
    action: Any,
    make: Callable[[Sequence[int], int], Pool],
) -> HostEnvironment:
    """An environment on the host, of its Gymnasium spaces.

    Images with their channels first are turned into ``[H, W, C]`` on the device, and a whole number
    of a Discrete space is given one-hot: it is no quantity.

    Args:
      name: for errors.
      observation: Gymnasium's space.
      action: Gymnasium's space.
      make: see ``types.HostEnvironment``.

    Raises:
      ConfigError: a space that agents can't observe or act in.
    """
    actions = action_space(action, name)

    def environment(
        sent: jax.ShapeDtypeStruct, receive: Callable[[ArrayTree, Array], Array]
    ) -> HostEnvironment:
        def one(sent: Array) -> Array:
            return receive(sent[None], sent[None])[0]

        return HostEnvironment(Spec(jax.eval_shape(one, sent), actions), make, sent, receive)

    if _is_discrete(observation):
        classes, start = int(observation.n), int(getattr(observation, "start", 0))
        sent = jax.ShapeDtypeStruct((), jnp.float32)
        return environment(sent, lambda x, _: jax.nn.one_hot(x.astype(jnp.int32) - start, classes))
    if not hasattr(observation, "low"):
        raise ConfigError(
            f"{name} observes {observation}; networks take a single array, of a Box or Discrete"
        )
    dtype = jnp.uint8 if observation.dtype == np.uint8 else jnp.float32
    sent = jax.ShapeDtypeStruct(observation.shape, dtype)
    image = dtype == jnp.uint8 and len(sent.shape) == 3
    if image and sent.shape[0] < sent.shape[2]:
        return environment(sent, lambda x, _: jnp.moveaxis(x, 1, -1))
    return environment(sent, lambda x, _: x)
