"""A deterministic policy and distributional critics, from a ``Spec`` and a ``NetworkConfig``."""

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets.mlp import MLP, linear
from podracer.nets.network import DTYPES, Branch, NetworkConfig, as_functions
from podracer.types import Array, ArrayTree, Box, Params, Spec


class PolicyCritic(NamedTuple):
    """Torso, policy and critics as pure functions of the same parameters, of which each reads its
    own: ``{"torso", "policy", "critic"}``, the last a list.

    Attributes:
      init: ``(key) -> params``.
      features: ``(params, observation [T, B, ...]) -> features [T, B, F]``.
      policy: ``(params, features) -> actions [T, B, *shape]`` in [-1, 1].
      critic: ``(params, features, actions) -> logits [critics, T, B, atoms]``.
    """

    init: Callable[[Array], Params]
    features: Callable[[Params, Array], Array]
    policy: Callable[[Params, Array], Array]
    critic: Callable[[Params, Array, Array], Array]


class Head(nnx.Module):
    """Features ``[..., F]`` -> ``[..., out_size]`` float32, by layers of their own.

    The first layer is normalised and bounded by tanh, so that the scale of features has little
    effect, as in acme's D4PG (https://arxiv.org/abs/2006.00979).
    """

    def __init__(
        self,
        in_size: int,
        hidden: Sequence[int],
        out_size: int,
        config: NetworkConfig,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = DTYPES[config.dtype]
        first, *others = hidden
        self.first = linear(in_size, first, 2**0.5, dtype=self.dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(first, dtype=self.dtype, rngs=rngs)
        self.others = MLP((first,), others, config.activation, dtype=self.dtype, rngs=rngs)
        # In float32, as those of other networks: bfloat16 has three significant digits.
        self.last = linear(hidden[-1], out_size, 0.01, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = jnp.tanh(self.norm(self.first(x)))
        y = self.last(self.others(x.reshape(-1, x.shape[-1])))
        return y.reshape(*x.shape[:-1], -1)


def make_policy_critic(
    spec: Spec,
    config: NetworkConfig,
    *,
    policy_hidden: Sequence[int],
    critic_hidden: Sequence[int],
    critics: int,
    atoms: int,
) -> PolicyCritic:
    """Builds a policy and critics on a common torso.

    Args:
      spec: observation and action spaces.
      config: settings of the network. The torso "mlp" passes the flat observation through:
        ``hidden`` has an effect for the torso "pixels" only, and ``layer_norm`` for those of
        images. ``shared`` and ``initial_log_std`` have none.
      policy_hidden: sizes of the policy's layers.
      critic_hidden: sizes of the layers of a critic.
      critics: number of critics.
      atoms: number of values that a critic distributes probability over.

    Raises:
      ConfigError: actions are discrete or unbounded, or the torso can't take the observations.
    """
    action = spec.action
    if not isinstance(action, Box):
        raise ConfigError(
            "a deterministic policy is for continuous actions, but this environment has "
            f"{action.num_actions} discrete actions; use agent='dqn' or agent='ppo'"
        )
    bounded = np.isfinite(action.low) & np.isfinite(action.high)
    if not bounded.all():
        raise ConfigError(
            "the policy spreads its actions over the bounds of the action space, but "
            f"{int((~bounded).sum())} of its {prod(action.shape)} dimensions have no lower or no "
            "upper bound; use agent='ppo'"
        )
    if config.torso == "mlp":
        config = dataclasses.replace(config, hidden=())
    size = nnx.eval_shape(lambda: Branch(spec, config, rngs=nnx.Rngs(0))).out_size
    actions = prod(action.shape)
    torso_init, torso = as_functions(lambda rngs: Branch(spec, config, rngs=rngs))
    policy_init, policy = as_functions(
        lambda rngs: Head(size, policy_hidden, actions, config, rngs=rngs)
    )
    critic_init, critic = as_functions(
        lambda rngs: Head(size + actions, critic_hidden, atoms, config, rngs=rngs)
    )

    def init(key: Array) -> Params:
        torso_key, policy_key, *critic_keys = jax.random.split(key, 2 + critics)
        return {
            "torso": torso_init(torso_key),
            "policy": policy_init(policy_key),
            "critic": [critic_init(k) for k in critic_keys],
        }

    def features(params: Params, observation: ArrayTree) -> Array:
        return torso(params["torso"], (), observation, None)[1]

    def act(params: Params, features: Array) -> Array:
        output = policy(params["policy"], features)
        return jnp.tanh(output).reshape(*features.shape[:-1], *action.shape)

    def evaluate(params: Params, features: Array, actions: Array) -> Array:
        flat = actions.reshape(*features.shape[:-1], -1).astype(features.dtype)
        x = jnp.concatenate([features, flat], -1)
        return jnp.stack([critic(p, x) for p in params["critic"]])

    return PolicyCritic(init, features, act, evaluate)
