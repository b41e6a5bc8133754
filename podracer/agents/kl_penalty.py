"""A penalty on how far an update moves the policy, whose coefficient adapts.

Equation 8 of the PPO paper, https://arxiv.org/abs/1707.06347, with the numbers of BatchPPO,
https://arxiv.org/abs/1709.02878, and its second penalty, on what exceeds twice the target.
"""

import jax
import jax.numpy as jnp
from flax import struct

from podracer.types import Array, Params, Reduce, Target

# The coefficient at the start, and the factor that it changes by where the divergence of an update
# is outside of these multiples of its target.
FIRST_COEFFICIENT, FACTOR = 1.0, 1.5
TOO_LOW, TOO_HIGH = 0.7, 1.3
# The second penalty begins at this multiple of the target, with this coefficient.
CUTOFF, CUTOFF_COEFFICIENT = 2.0, 1000.0


class Penalty(struct.PyTreeNode):
    """What adapts, ``[]`` float32 each.

    Attributes:
      coefficient: beta of equation 8.
      divergence: sum of the KL divergences of those gradient steps of an update's last pass that
        are done.
    """

    coefficient: Array
    divergence: Array


def make_target(target_kl: float, steps: int, last_pass: int) -> Target:
    """The coefficient, which adapts after each update by the divergence of its last pass.

    It reads the metric "kl", the mean KL divergence of a minibatch before its gradient step.

    Args:
      target_kl: the divergence that an update should have.
      steps: gradient steps of an update.
      last_pass: how many of them are the last pass over the batch.
    """

    def init(params: Params) -> Penalty:
        del params
        return Penalty(jnp.float32(FIRST_COEFFICIENT), jnp.float32(0))

    def update(penalty: Penalty, params: Params, metrics: dict[str, Array], step: Array) -> Penalty:
        del params
        left = -step % steps
        total = jnp.where(left < last_pass, penalty.divergence + metrics["kl"], 0.0)
        mean = total / last_pass
        factor = jnp.where(mean > TOO_HIGH * target_kl, FACTOR, 1.0)
        factor = jnp.where(mean < TOO_LOW * target_kl, 1 / FACTOR, factor)
        return Penalty(
            penalty.coefficient * jnp.where(left == 0, factor, 1.0),
            jnp.where(left == 0, 0.0, total),
        )

    return Target(init, update)


def loss(
    log_ratio: Array, advantage: Array, kl: Array, penalty: Penalty, target_kl: float, mean: Reduce
) -> Array:
    """The objective to minimise: a mean over all entries, whatever their shape.

    Args:
      log_ratio: ``[...]``, log-probability of the action less the one before the update.
      advantage: ``[...]``.
      kl: ``[]``, mean KL divergence of the policy from the one before the update, over the entries
        of this device.
      penalty: the adapted coefficient.
      target_kl: the divergence that an update should have.
      mean: the mean over devices. The second penalty, which is not linear, is one on the mean over
        all entries of all devices, so that their number changes nothing.
    """
    everywhere = mean(jax.lax.stop_gradient(kl))
    excess = jnp.maximum(everywhere - CUTOFF * target_kl, 0.0)
    value = penalty.coefficient * everywhere + CUTOFF_COEFFICIENT * excess**2
    slope = penalty.coefficient + 2 * CUTOFF_COEFFICIENT * excess
    # Has the value and the gradient of the penalties.
    penalties = value + slope * (kl - jax.lax.stop_gradient(kl))
    return penalties - (jnp.exp(log_ratio) * advantage).mean()
