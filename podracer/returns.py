"""Targets over ``[T, B]``, on rlax, and the one rule for every autoreset.

Some environments begin a new episode within the step that ended the last one, others in the next
step, in which they ignore the action. Both are read by one rule. The transition t -> t+1 teaches
something iff

    valid[t] = ~first[t+1] | (discount[t+1] == 0)

that is, unless the next observation opens an episode without the last one having terminated: then
``observation[t+1]`` is no successor of ``observation[t]``. An invalid transition is *cut*: its
temporal-difference error is exactly zero and no trace passes through it. (rlax's ``sample_mask``
skips a step instead and lets the trace of the next episode leak into the last one.)

What each convention gives:

- same step, terminated: first, discount 0: valid, and the discount stops the bootstrap.
- same step, truncated: first, discount 1: cut. The final observation is lost, so the step before it
  bootstraps from V of the state it was taken in.
- next step: the final observation is an ordinary one (discount 0, or 1 if truncated: bootstrap);
  the transition from it to the first observation of the next episode has discount 1 and is cut.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import rlax

from podracer.types import Array, TimeStep


class Targets(NamedTuple):
    """What a policy-gradient agent learns from; every field is ``[T, B]`` float32.

    Attributes:
      advantage: of the action taken, 0 where invalid.
      value: the target of the value function, the current value itself where invalid.
      valid: 1 where the transition teaches something, else 0.
    """

    advantage: Array
    value: Array
    valid: Array


def valid(timestep: TimeStep) -> Array:
    """Which transitions teach something: ``[T+1, B]`` time steps -> ``[T, B]`` bool."""
    return ~timestep.first[1:] | (timestep.discount[1:] == 0)


def _cut(timestep: TimeStep, values: Array, discount: float) -> tuple[Array, Array, Array]:
    """Rewards and discounts with which invalid transitions have no error and pass no trace.

    With a discount of 0 and a reward equal to the value, the error r + 0 * v' - v is exactly zero
    for any algorithm that is made of such errors, and discount * trace is zero as well.
    """
    keep = valid(timestep)
    reward = jnp.where(keep, timestep.reward[1:], values[:-1])
    return reward, jnp.where(keep, discount * timestep.discount[1:], 0.0), keep.astype(jnp.float32)


def gae(timestep: TimeStep, values: Array, *, discount: float, lambda_: float) -> Targets:
    """Generalised advantage estimation, https://arxiv.org/abs/1506.02438, equation 16.

    Args:
      timestep: ``[T+1, B]``.
      values: ``[T+1, B]``, V of each observation.
      discount: gamma of the agent, in [0, 1].
      lambda_: weight of the longer horizons, in [0, 1].

    Returns:
      Advantages, and value targets ``advantage + value``.
    """
    reward, discounts, keep = _cut(timestep, values, discount)
    estimate = jax.vmap(
        rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1
    )
    advantage = jax.lax.stop_gradient(jnp.asarray(estimate(reward, discounts, lambda_, values)))
    return Targets(advantage, advantage + jax.lax.stop_gradient(values[:-1]), keep)


def vtrace(
    timestep: TimeStep,
    values: Array,
    log_rho: Array,
    *,
    discount: float,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> Targets:
    """V-trace, https://arxiv.org/abs/1802.01561, equation 1 and section 4.2.

    Args:
      timestep: ``[T+1, B]``.
      values: ``[T+1, B]``, V of each observation under the current parameters.
      log_rho: ``[T, B]``, log pi(a|x) - log mu(a|x).
      discount: gamma of the agent.
      lambda_: multiplies the traces c (remark 2 of the paper).
      clip_rho: rho-bar, the cap of the ratios in the errors.
      clip_pg_rho: cap of the ratio that weighs the policy gradient.

    Returns:
      Advantages rho (r + gamma v_{s+1} - V(x_s)), with the *target* of the next state as in the
      paper, and value targets v_s.
    """
    reward, discounts, keep = _cut(timestep, values, discount)
    estimate = jax.vmap(
        rlax.vtrace_td_error_and_advantage, in_axes=(1, 1, 1, 1, 1, None, None, None), out_axes=1
    )
    rho = jnp.exp(log_rho)
    out = estimate(values[:-1], values[1:], reward, discounts, rho, lambda_, clip_rho, clip_pg_rho)
    target = out.errors + values[:-1]
    # Not rlax's: there lambda mixes the next target with the next value here as well.
    target_next = jnp.concatenate([target[1:], values[-1:]])
    error = reward + discounts * target_next - values[:-1]
    advantage = jnp.minimum(clip_pg_rho, rho) * error
    return Targets(jax.lax.stop_gradient(advantage), jax.lax.stop_gradient(target), keep)


class Episode(NamedTuple):
    """Sums over the running episode, ``[B]``.

    Attributes:
      ret: undiscounted return so far.
      length: transitions so far; the reset step of a next-step autoreset is none.
    """

    ret: Array
    length: Array


def track(episode: Episode, timestep: TimeStep) -> tuple[Episode, Episode, Array]:
    """Adds one arrival; where it opens an episode, the last one is complete and sums start anew.

    Args:
      episode: sums before this time step.
      timestep: ``[B]``.

    Returns:
      New sums, sums including this arrival, and ``[B]`` bool: those are of a complete episode.
    """
    real = ~timestep.first | (timestep.discount == 0)
    total = Episode(episode.ret + timestep.reward, episode.length + real)
    return Episode(*(jnp.where(timestep.first, 0, x) for x in total)), total, timestep.first


def discounted(total: Array, timestep: TimeStep, discount: float) -> tuple[Array, Array]:
    """Discounted sums of past rewards, whose variance scales rewards (reward normalisation).

    Args:
      total: ``[B]``, the sum before ``timestep``.
      timestep: ``[T, B]``.
      discount: gamma of the agent.

    Returns:
      ``[B]`` the sum after it, and ``[T, B]`` the sum at each arrival, before an episode's end
      resets it.
    """

    def step(total: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, first = x
        total = discount * total + reward
        return jnp.where(first, 0.0, total), total

    return jax.lax.scan(step, total, (timestep.reward, timestep.first))
