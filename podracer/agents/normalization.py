"""Running normalisation of observations and rewards, the same on every device."""

import jax.numpy as jnp
from flax import struct

from podracer.types import Array, Reduce


class Moments(struct.PyTreeNode):
    """Mean and variance over all batches so far.

    Attributes:
      count: ``[]`` float32, the number of *batches*. All batches of a run have the same size and
        therefore the same weight, so that samples need not be counted or merged over devices.
      mean: ``[*shape]``.
      variance: ``[*shape]``.
    """

    count: Array
    mean: Array
    variance: Array


def init(shape: tuple[int, ...]) -> Moments:
    """Moments before the first batch: mean 0 and variance 1."""
    return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


def update(moments: Moments, batch: Array, all_mean: Reduce) -> Moments:
    """Merges the batches of all devices into the moments.

    The pairwise update of Chan, Golub and LeVeque (1979). The batch's own mean is computed first,
    then the deviations from it, which avoids cancellation where the mean is much larger than the
    deviation.

    Args:
      moments: moments of the previous batches.
      batch: ``[..., *shape]``, this device's batch, of the same size on every device.
      all_mean: the mean of a tree over devices.
    """
    axes = tuple(range(batch.ndim - moments.mean.ndim))
    batch = batch.astype(jnp.float32)
    mean = all_mean(batch.mean(axes))
    variance = all_mean(((batch - mean) ** 2).mean(axes))
    weight, shift = 1 / (moments.count + 1), mean - moments.mean
    return Moments(
        moments.count + 1,
        moments.mean + weight * shift,
        (1 - weight) * (moments.variance + weight * shift**2) + weight * variance,
    )


def standardize(moments: Moments, x: Array, clip: float) -> Array:
    """(x - mean) / standard deviation, clipped to [-clip, clip]."""
    scale = jnp.sqrt(moments.variance + 1e-8)
    return jnp.clip((x.astype(jnp.float32) - moments.mean) / scale, -clip, clip)


def rescale(moments: Moments, x: Array, clip: float) -> Array:
    """x / standard deviation, clipped to [-clip, clip]: rewards keep their sign."""
    return jnp.clip(x / jnp.sqrt(moments.variance + 1e-8), -clip, clip)
