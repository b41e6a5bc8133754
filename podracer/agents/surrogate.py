"""The clipped surrogate objective of PPO, https://arxiv.org/abs/1707.06347, and its advantages."""

import jax.numpy as jnp
import rlax

from podracer.types import Array, Reduce


def normalize(advantage: Array, valid: Array, all_mean: Reduce) -> Array:
    """Advantages with mean 0 and deviation 1 over the valid entries of all devices.

    Args:
      advantage: advantages of any shape.
      valid: of that shape, 1 where they are valid, else 0.
      all_mean: the mean of a tree over devices.
    """
    share, mean = all_mean((valid.mean(), (valid * advantage).mean()))
    share = jnp.maximum(share, 1e-8)
    mean = mean / share
    # A second pass avoids cancellation where the mean is much larger than the deviation.
    variance = all_mean((valid * (advantage - mean) ** 2).mean()) / share
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)


def clipped(log_ratio: Array, advantage: Array, clip: float) -> Array:
    """Equation 7 of the paper, negated: a mean over all entries, whatever their shape."""
    ratio = jnp.exp(log_ratio).ravel()
    return jnp.asarray(rlax.clipped_surrogate_pg_loss(ratio, advantage.ravel(), clip))


def change(log_ratio: Array, clip: float) -> dict[str, Array]:
    """How far the policy has moved, per entry."""
    ratio = jnp.exp(log_ratio)
    return {
        # The estimator k3 of http://joschu.net/blog/kl-approx.html.
        "approx_kl": ratio - 1 - log_ratio,
        "clip_fraction": jnp.abs(ratio - 1) > clip,
    }
