"""Action spaces, as agents see them and as environments take them."""

import jax.numpy as jnp
import numpy as np

from podracer.types import Array, Box


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
