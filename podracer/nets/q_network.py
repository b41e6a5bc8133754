"""Networks for the values of actions, from a ``Spec`` and a ``NetworkConfig``."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets import masks
from podracer.nets.mlp import linear
from podracer.nets.network import Branch, NetworkConfig, as_functions, initial_carry
from podracer.types import Array, ArrayTree, Carry, Discrete, Params, Spec


class QNetwork(NamedTuple):
    """The values of actions as pure functions.

    Attributes:
      init: ``(key) -> params``.
      initial_carry: ``(batch size) -> Carry``, the recurrent state at the start of an episode;
        ``()`` without a core.
      apply: ``(params, carry, observation [T, B, ...], first [T, B], extra [T, B, E] or None) ->
        (carry, values [T, B, actions])``; without a core, ``first`` may be None. The values of
        illegal actions are ``masks.ILLEGAL``, so they are never the highest; sums or means over
        actions are of no use where there are masks.
    """

    init: Callable[[Array], Params]
    initial_carry: Callable[[int], Carry]
    apply: Callable[[Params, Carry, ArrayTree, Array | None, Array | None], tuple[Carry, Array]]


class ActionValues(nnx.Module):
    """Values of all actions. A dueling network adds the state's value to the actions' advantages,
    relative to the mean of the legal ones (https://arxiv.org/abs/1511.06581, equation 9)."""

    def __init__(
        self,
        spec: Spec,
        actions: int,
        config: NetworkConfig,
        extra: int,
        *,
        dueling: bool,
        rngs: nnx.Rngs,
    ):
        self.branch = Branch(spec, config, extra, rngs=rngs)
        size = self.branch.out_size
        # Always in float32: bfloat16 has no numbers between 128 and 129.
        self.advantage = linear(size, actions, 0.01, dtype=jnp.float32, rngs=rngs)
        self.value = linear(size, 1, 0.01, dtype=jnp.float32, rngs=rngs) if dueling else None

    def __call__(
        self, carry: Carry, observation: ArrayTree, first: Array | None, extra: Array | None
    ) -> tuple[Carry, Array]:
        carry, x = self.branch(carry, observation, first, extra)
        q = self.advantage(x)
        if self.value is not None:
            q = self.value(x) + q - q.mean(-1, keepdims=True, where=masks.legal(observation))
        return carry, masks.restrict(q, observation)


def make_q_network(spec: Spec, config: NetworkConfig, *, dueling: bool, extra: int = 0) -> QNetwork:
    """Builds a network for the values of actions.

    Args:
      spec: observation and action spaces.
      config: settings of the network; ``shared`` and ``initial_log_std`` have no effect.
      dueling: whether to estimate the value of the state and the actions' advantages.
      extra: number of features that are given besides observations.

    Raises:
      ConfigError: actions are continuous, the action mask is malformed, or the torso can't take the
        observations.
    """
    if not isinstance(spec.action, Discrete):
        raise ConfigError(
            f"this environment has continuous actions of shape {spec.action.shape}, which have no "
            "value each; use an agent for continuous actions, such as agent='ppo'"
        )
    actions = spec.action.num_actions
    init, apply = as_functions(
        lambda rngs: ActionValues(spec, actions, config, extra, dueling=dueling, rngs=rngs)
    )
    return QNetwork(init, lambda batch: initial_carry(config, batch), apply)
