"""Multi-layer perceptron torso."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import unknown

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation with this name; ``ConfigError`` with the nearest names if there is none."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def linear(
    in_size: int, out_size: int, scale: float, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Linear:
    """A dense layer: float32 parameters, orthogonal with gain ``scale``, computing in ``dtype``."""
    init = nnx.initializers.orthogonal(scale)
    return nnx.Linear(in_size, out_size, kernel_init=init, dtype=dtype, rngs=rngs)


def norms(
    sizes: Sequence[int], *, on: bool, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.List | tuple[Callable[[jax.Array], jax.Array], ...]:
    """What stands between layers of these sizes and their activations: normalisations
    (https://arxiv.org/abs/1607.06450) if ``on``, else nothing."""
    if not on:
        return (lambda x: x,) * len(sizes)
    return nnx.List(nnx.LayerNorm(size, dtype=dtype, rngs=rngs) for size in sizes)


class MLP(nnx.Module):
    """``[N, *shape]`` -> ``[N, hidden[-1]]``; an activation follows each layer;
    ``layer_norm`` normalises before it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: Sequence[int],
        activation_name: str,
        *,
        layer_norm: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.activation = activation(activation_name)
        sizes = [prod(shape), *hidden]
        self.layers = nnx.List(
            linear(i, o, 2**0.5, dtype=dtype, rngs=rngs) for i, o in pairwise(sizes)
        )
        self.norms = norms(hidden, on=layer_norm, dtype=dtype, rngs=rngs)
        self.out_size = sizes[-1]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.activation(norm(layer(x)))
        return x
