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


class MLP(nnx.Module):
    """``[N, *shape]`` -> ``[N, hidden[-1]]``; an activation follows each layer."""

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: Sequence[int],
        activation_name: str,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.activation = activation(activation_name)
        sizes = [prod(shape), *hidden]
        self.layers = nnx.List(
            linear(i, o, 2**0.5, dtype=dtype, rngs=rngs) for i, o in pairwise(sizes)
        )
        self.out_size = sizes[-1]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = self.activation(layer(x))
        return x
