"""Targets over ``[T, B]``, on rlax, and the one rule for every autoreset.

Some environments begin a new episode within the step that ended the previous one (*same-step*
autoreset), others in the next step, which ignores its action (*next-step* autoreset). One rule
covers both. The transition t -> t+1 is valid, that is, it is learned from, iff

    valid[t] = ~first[t+1] | (discount[t+1] == 0)

It is invalid if the next observation opens an episode although the previous one did not terminate:
then ``observation[t+1]`` does not follow from ``observation[t]``. An invalid transition is *cut*:
its temporal-difference error is exactly zero and no trace passes through it. (rlax's
``sample_mask`` skips a step instead, and lets the trace of the next episode leak into the previous
one.)

The cases are:

- Same step, terminated: first, discount 0. Valid; the discount of 0 stops the bootstrap.
- Same step, truncated: first, discount 1. Cut: the final observation is lost, so the step before it
  bootstraps from the value of the state in which it was taken.
- Next step: the final observation is an ordinary one (discount 0 if terminated; 1 if truncated,
  which bootstraps). The transition from it to the first observation of the next episode has
  discount 1 and is cut.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import rlax

from podracer.types import Array, TimeStep


class Targets(NamedTuple):
    """Targets over an unroll; every field is ``[T, B]`` float32.

    Attributes:
      advantage: advantage of the action taken, 0 where invalid.
      value: the target of the value function; the current value itself where invalid.
      valid: 1 where the transition is valid, else 0.
    """

    advantage: Array
    value: Array
    valid: Array


def valid(timestep: TimeStep) -> Array:
    """Which transitions are valid: ``[T+1, B]`` time steps -> ``[T, B]`` bool."""
    return ~timestep.first[1:] | (timestep.discount[1:] == 0)


def only_whole_episodes(timestep: TimeStep) -> TimeStep:
    """Makes the transitions after the last end of an episode invalid: ``[T+1, B]`` time steps.

    Where no episode ends, all remain valid.
    """
    end = timestep.first[1:] | (timestep.discount[1:] == 0)
    # Arrivals with no end at or after them.
    after = (jax.lax.cummax(end.astype(jnp.int8), reverse=True) == 0) & end.any(0)
    first = jnp.where(after, True, timestep.first[1:])
    discount = jnp.where(after, 1.0, timestep.discount[1:])
    return timestep.replace(
        first=jnp.concatenate([timestep.first[:1], first]),
        discount=jnp.concatenate([timestep.discount[:1], discount]),
    )


def _cut(timestep: TimeStep, values: Array, discount: float) -> tuple[Array, Array, Array]:
    """Rewards, discounts and the mask of valid transitions, such that invalid ones are cut.

    With a discount of 0 and a reward equal to the value, the error r + 0 * v' - v is exactly zero
    for any algorithm that is built from such errors, and discount * trace is zero as well.
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
      lambda_: decay of the weights of longer horizons, in [0, 1].

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
) -> Targets:
    """V-trace, https://arxiv.org/abs/1802.01561, equation 1 and section 4.2.

    Args:
      timestep: ``[T+1, B]``.
      values: ``[T+1, B]``, V of each observation under the current parameters.
      log_rho: ``[T, B]``, log pi(a|x) - log mu(a|x).
      discount: gamma of the agent.
      lambda_: factor of the traces c (remark 2 of the paper).
      clip_rho: rho-bar, the cap of the ratios in the temporal-difference errors.

    Returns:
      Advantages r + gamma v_{s+1} - V(x_s), with the *target* of the next state as in the paper and
      without the ratio that weights a policy gradient, and value targets v_s.
    """
    reward, discounts, keep = _cut(timestep, values, discount)
    estimate = jax.vmap(
        rlax.vtrace_td_error_and_advantage, in_axes=(1, 1, 1, 1, 1, None, None), out_axes=1
    )
    rho = jnp.exp(log_rho)
    out = estimate(values[:-1], values[1:], reward, discounts, rho, lambda_, clip_rho)
    target = out.errors + values[:-1]
    # Not rlax's advantage: there, lambda also mixes the next target with the next value.
    target_next = jnp.concatenate([target[1:], values[-1:]])
    advantage = reward + discounts * target_next - values[:-1]
    return Targets(jax.lax.stop_gradient(advantage), jax.lax.stop_gradient(target), keep)


class NStep(NamedTuple):
    """n-step returns; every field is ``[T, B]``. The target of an action value is ``reward +
    discount * V(observation[t + steps])``.

    Attributes:
      reward: float32, the discounted sum of the rewards of up to n transitions.
      discount: float32, of the value to bootstrap from, 0 if the episode terminates before it.
      steps: int32, the number of transitions, fewer than n at the end of an episode or of the data.
      valid: 1 where the transition t -> t+1 is valid, else 0.
    """

    reward: Array
    discount: Array
    steps: Array
    valid: Array


def n_step(timestep: TimeStep, n: int, discount: float) -> NStep:
    """n-step returns that bootstrap earlier where a transition is cut and at the end of the data.

    Args:
      timestep: ``[T+1, B]``.
      n: the largest number of transitions.
      discount: gamma of the agent.
    """
    keep = valid(timestep)
    reward, discounts = timestep.reward[1:], discount * timestep.discount[1:]
    # Those of no transition: the value itself.
    sums, factors, steps = jnp.zeros_like(reward), jnp.ones_like(reward), jnp.zeros(reward.shape)
    for _ in range(n):
        sums, factors, steps = (
            jnp.concatenate([x[1:], jnp.full_like(x[:1], end)])
            for x, end in ((sums, 0), (factors, 1), (steps, 0))
        )
        sums = jnp.where(keep, reward + discounts * sums, 0.0)
        factors = jnp.where(keep, discounts * factors, 1.0)
        steps = jnp.where(keep, 1 + steps, 0)
    return NStep(sums, factors, steps.astype(jnp.int32), keep.astype(jnp.float32))


def discounted(total: Array, timestep: TimeStep, discount: float) -> tuple[Array, Array]:
    """Discounted sums of past rewards, whose variance scales rewards (reward normalisation).

    Args:
      total: ``[B]``, the sum before the first of these time steps.
      timestep: ``[T, B]``.
      discount: gamma of the agent.

    Returns:
      ``[B]``, the sum after the last time step, and ``[T, B]``, the sum at each arrival, before
      the end of an episode resets it.
    """

    def step(total: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, first = x
        total = discount * total + reward
        return jnp.where(first, 0.0, total), total

    return jax.lax.scan(step, total, (timestep.reward, timestep.first))
