"""Policy heads: from features to the parameters of a distribution over actions.

Box actions use a *clipped* diagonal Gaussian: the agent's action is the unbounded sample, in units
in which [-1, 1] spans the box, and the environment clips and scales it (``envs/spaces.py``). The
log-probability is the Gaussian density of exactly the number that the trajectory stores, so that
importance ratios are exact; clipping is part of the environment's dynamics.
"""

from collections.abc import Callable
from math import prod

import distrax
import jax
import jax.numpy as jnp
from flax import nnx

from podracer.nets.mlp import linear
from podracer.types import Array, ArrayTree, Box, Discrete

Distribution = Callable[[ArrayTree], distrax.Distribution]


class CategoricalHead(nnx.Module):
    """Features ``[..., F]`` -> logits ``[..., num_actions]``, float32."""

    def __init__(self, in_size: int, action: Discrete, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.logits = linear(in_size, action.num_actions, 0.01, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.logits(x).astype(jnp.float32)


class GaussianHead(nnx.Module):
    """Features ``[..., F]`` -> (mean, log standard deviation), each ``[..., *shape]`` float32.

    The standard deviation is a parameter that does not depend on the state, as in PPO's paper
    (https://arxiv.org/abs/1707.06347, section 6.1).
    """

    def __init__(
        self,
        in_size: int,
        action: Box,
        initial_log_std: float,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.shape = action.shape
        self.mean = linear(in_size, prod(action.shape), 0.01, dtype=dtype, rngs=rngs)
        self.log_std = nnx.Param(jnp.full(action.shape, initial_log_std, jnp.float32))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        mean = self.mean(x).astype(jnp.float32).reshape(*x.shape[:-1], *self.shape)
        return mean, jnp.broadcast_to(self.log_std[...], mean.shape)


def policy_head(
    in_size: int,
    action: Discrete | Box,
    initial_log_std: float,
    *,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> CategoricalHead | GaussianHead:
    """The head for an action space."""
    if isinstance(action, Discrete):
        return CategoricalHead(in_size, action, dtype=dtype, rngs=rngs)
    return GaussianHead(in_size, action, initial_log_std, dtype=dtype, rngs=rngs)


def distribution(action: Discrete | Box) -> Distribution:
    """The function that makes a ``distrax`` distribution from the output of ``policy_head``."""
    if isinstance(action, Discrete):
        return lambda logits: distrax.Categorical(logits=logits)
    event_rank = len(action.shape)
    return lambda p: distrax.Independent(distrax.Normal(p[0], jnp.exp(p[1])), event_rank)


class ValueHead(nnx.Module):
    """Features ``[..., F]`` -> ``[...]`` float32."""

    def __init__(self, in_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.value = linear(in_size, 1, 1.0, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return jnp.squeeze(self.value(x), -1).astype(jnp.float32)


def sample(distribution: Distribution, params: ArrayTree, keys: Array) -> Array:
    """One action per environment, ``[B, ...]``, each drawn with its own key ``[B]``."""
    return jax.vmap(lambda key, p: distribution(p).sample(seed=key))(keys, params)
