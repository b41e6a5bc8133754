"""Running normalisation of observations and rewards, the same on every device."""

import jax.numpy as jnp
from flax import struct

from podracer.types import Array, Mean


class Moments(struct.PyTreeNode):
    """Mean and variance over all batches so far.

    Attributes:
      count: ``[]`` float32, how many *batches*. All batches of a run have one size, so they weigh
        the same, and no number of samples has to be counted or merged over devices.
      mean: ``[*shape]``.
      variance: ``[*shape]``.
    """

    count: Array
    mean: Array
    variance: Array


def init(shape: tuple[int, ...]) -> Moments:
    """Moments that leave a value as it is until the first batch has come in."""
    return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


def update(moments: Moments, batch: Array, all_mean: Mean) -> Moments:
    """Merges one batch a device.

    The parallel update of Chan, Golub and LeVeque (1979): deviations are taken from the old mean,
    so that nothing cancels where the mean is large against the deviation.

    Args:
      moments: so far.
      batch: ``[..., *shape]``, of one size on every device.
      all_mean: the mean of a tree over devices.
    """
    axes = tuple(range(batch.ndim - moments.mean.ndim))
    deviation = batch.astype(jnp.float32) - moments.mean
    shift, square = all_mean((deviation.mean(axes), (deviation**2).mean(axes)))
    variance = square - shift**2
    weight = 1 / (moments.count + 1)
    return Moments(
        moments.count + 1,
        moments.mean + weight * shift,
        (1 - weight) * (moments.variance + weight * shift**2) + weight * variance,
    )


def standardize(moments: Moments, x: Array, clip: float) -> Array:
    """(x - mean) / standard deviation, within [-clip, clip]."""
    scale = jnp.sqrt(moments.variance + 1e-8)
    return jnp.clip((x.astype(jnp.float32) - moments.mean) / scale, -clip, clip)


def rescale(moments: Moments, x: Array, clip: float) -> Array:
    """x / standard deviation, within [-clip, clip]: rewards keep their sign."""
    return jnp.clip(x / jnp.sqrt(moments.variance + 1e-8), -clip, clip)
