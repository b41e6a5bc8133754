"""What a model that is unrolled over the actions taken has to predict (MuZero)."""

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import returns
from podracer.types import Array, TimeStep


class Targets(struct.PyTreeNode):
    """Targets of an unroll of K steps, and 1 where there is something to learn, else 0;
    ``[K+1, items]`` float32 each, but those of rewards ``[K, items]``.

    Attributes:
      value: n-step returns, or the targets of V-trace; 0 after the end of an episode.
      value_weight: 0 from a cut on.
      reward: of the transition from this step to the next; 0 after the end of an episode.
      reward_weight: 0 from a cut on.
      policy_weight: 0 from the end of an episode or a cut on.
    """

    value: Array
    value_weight: Array
    reward: Array
    reward_weight: Array
    policy_weight: Array


def targets(
    unroll: int,
    n_step: int,
    discount: float,
    timestep: TimeStep,
    value: Array,
    log_rho: Array | None = None,
) -> Targets:
    """The targets of a model's unroll, https://arxiv.org/abs/1911.08265, equation 2 and appendix G.

    What follows the end of an episode is *absorbing*: rewards and value are 0, and the policy is of
    no importance. After a transition that is cut (``agents/returns.py``), what follows is unknown.

    Args:
      unroll: K.
      n_step: transitions between a value and the one it bootstraps from.
      discount: gamma of the agent.
      timestep: ``[K + n_step + 1, items]``.
      value: ``[K + n_step + 1, items]``, the values to bootstrap from.
      log_rho: ``[K + n_step, items]``, log pi(a|x) - log mu(a|x) of the actions taken. With these,
        the targets of values are those of V-trace (``returns.vtrace``) over all transitions, and
        not n-step returns.
    """
    valid = returns.valid(timestep)[: unroll + 1].astype(jnp.float32)
    if log_rho is None:
        steps = jax.tree.map(lambda x: x[: unroll + 1], returns.n_step(timestep, n_step, discount))
        later = jnp.take_along_axis(value, jnp.arange(unroll + 1)[:, None] + steps.steps, 0)
        expected = steps.reward + steps.discount * later
    else:
        corrected = returns.vtrace(timestep, value, log_rho, discount=discount)
        expected = corrected.value[: unroll + 1]
    ends = valid * (timestep.discount[1 : unroll + 2] == 0)

    def before(x: Array, first: float) -> Array:
        return jnp.concatenate([jnp.full_like(x[:1], first), x[:-1]])

    # Whether all transitions before a step were valid and none of them ended the episode.
    running = before(jnp.cumprod(valid * (1 - ends), 0), 1)
    absorbing = before(jnp.cumsum(running * ends, 0), 0)
    taught = running * valid
    return Targets(
        value=taught * expected,
        value_weight=taught + absorbing,
        reward=taught[:-1] * timestep.reward[1 : unroll + 1],
        reward_weight=(taught + absorbing)[:-1],
        policy_weight=taught,
    )
