"""Conversion of observations and actions between environments and agents."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError
from podracer.types import Array, Box, Discrete, HostEnvironment, Pool, Spec


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


def to_transfer_dtype(observation: Any) -> Any:
    """An observation as it is transferred to the device: uint8 stays, all else is float32."""
    dtype = np.uint8 if observation.dtype == np.uint8 else np.float32
    return observation.astype(dtype, copy=False)


def is_image(space: Any) -> bool:
    """Whether a Gymnasium space holds images: uint8 arrays with three axes."""
    return getattr(space, "dtype", None) == np.uint8 and len(space.shape) == 3


def host_environment(
    name: str,
    observation: Any,
    action: Any,
    make: Callable[[Sequence[int], int], Pool],
    *,
    channels_first: bool = False,
) -> HostEnvironment:
    """A host environment from its Gymnasium spaces.

    An integer of a Discrete space becomes one-hot: it is not a quantity.

    Args:
      name: name of the environment, for errors.
      observation: Gymnasium's space.
      action: Gymnasium's space.
      make: see ``types.HostEnvironment``.
      channels_first: the observations are images ``[C, H, W]``, which the device turns into
        ``[H, W, C]``.

    Raises:
      ConfigError: a space that agents can't observe or act in.
    """
    actions = action_space(action, name)

    def environment(
        transfer_spec: jax.ShapeDtypeStruct, decode: Callable[[Array], Array]
    ) -> HostEnvironment:
        """``decode``: observations as transferred, ``[B, ...]``, to those that agents see."""

        def observe(observation: Array) -> Array:
            return decode(to_transfer_dtype(observation)[None])[0]

        spec = Spec(jax.eval_shape(observe, transfer_spec), actions)
        return HostEnvironment(spec, make, transfer_spec, lambda x, _: decode(x), observe=observe)

    if _is_discrete(observation):
        classes, start = int(observation.n), int(getattr(observation, "start", 0))
        return environment(
            jax.ShapeDtypeStruct((), jnp.float32),
            lambda x: jax.nn.one_hot(x.astype(jnp.int32) - start, classes),
        )
    if not hasattr(observation, "low"):
        raise ConfigError(
            f"{name} observes {observation}; networks take a single array, of a Box or Discrete"
        )
    dtype = jnp.uint8 if observation.dtype == np.uint8 else jnp.float32
    transfer_spec = jax.ShapeDtypeStruct(observation.shape, dtype)
    if channels_first:
        return environment(transfer_spec, lambda x: jnp.moveaxis(x, 1, -1))
    return environment(transfer_spec, lambda x: x)
