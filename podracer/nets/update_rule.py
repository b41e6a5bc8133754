"""The network of a learned update rule: from an agent's experience to what it should have done."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.nets.mlp import linear
from podracer.nets.network import as_functions
from podracer.nets.recurrent import Recurrent, initial_carry
from podracer.types import Array, Params


class Experience(NamedTuple):
    """What a rule knows of T transitions of B environments, without observations and actions.

    Attributes:
      reward: ``[T, B]``.
      discount: ``[T, B]``, 0 where the episode terminates, else 1.
      gamma: ``[]``, the agent's discount factor.
      probability: ``[T, B]``, of the action that was taken.
      prediction: ``[T+1, B, m]``, the agent's probabilities of m categories.
      ends: ``[T, B]`` bool, whether what follows a transition does not belong to it.
    """

    reward: Array
    discount: Array
    gamma: Array
    probability: Array
    prediction: Array
    ends: Array


class UpdateRule(NamedTuple):
    """A rule as pure functions.

    Attributes:
      init: ``(key) -> params``.
      apply: ``(params, experience) -> (policy, prediction)``: by how much the log-probability of
        each action should rise, ``[T, B]``, and the logits of what should have been predicted,
        ``[T, B, m]``.
    """

    init: Callable[[Array], Params]
    apply: Callable[[Params, Experience], tuple[Array, Array]]


class BackwardLstm(nnx.Module):
    """LPG's network, https://arxiv.org/abs/2007.08794: an LSTM backwards over time,
    whose inputs hold an embedding of each prediction."""

    def __init__(self, predictions: int, units: int, embedding: int, *, rngs: nnx.Rngs):
        self.units = units
        self.hidden = linear(predictions, embedding, 2**0.5, dtype=jnp.float32, rngs=rngs)
        self.embedded = linear(embedding, 1, 1.0, dtype=jnp.float32, rngs=rngs)
        self.core = Recurrent("lstm", 6, units, 0, dtype=jnp.float32, rngs=rngs)
        self.policy = linear(units, 1, 0.1, dtype=jnp.float32, rngs=rngs)
        self.prediction = linear(units, predictions, 1.0, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: Experience) -> tuple[Array, Array]:
        value = self.embedded(jax.nn.relu(self.hidden(x.prediction)))[..., 0]
        gamma = jnp.full(x.reward.shape, x.gamma)
        known = (x.reward, x.discount, gamma, x.probability, value[:-1], value[1:] * x.discount)
        backwards = jnp.stack(known, -1)[::-1]
        carry = initial_carry("lstm", self.units, x.reward.shape[1])
        _, y = self.core(carry, backwards, x.ends[::-1])
        y = y[::-1]
        return self.policy(y)[..., 0], self.prediction(y)


def make_update_rule(predictions: int, units: int, embedding: int) -> UpdateRule:
    """A rule for agents that predict ``predictions`` categories, with an LSTM of ``units`` units,
    and an embedding by one layer of ``embedding`` units."""
    return UpdateRule(
        *as_functions(lambda rngs: BackwardLstm(predictions, units, embedding, rngs=rngs))
    )
