"""Residual blocks of the images that MuZero's states can be
(https://arxiv.org/abs/1911.08265, appendix F)."""

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.nets import conv
from podracer.types import Array


class Block(nnx.Module):
    """A residual block ``[B, H, W, channels]`` -> the same shape, with normalised layers."""

    def __init__(self, channels: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.convs, self.norms = nnx.List(), nnx.List()
        for _ in range(2):
            layer = conv.conv(
                channels, channels, 3, padding="SAME", use_bias=False, dtype=dtype, rngs=rngs
            )
            self.convs.append(layer)
            self.norms.append(nnx.LayerNorm(channels, dtype=dtype, rngs=rngs))

    def __call__(self, x: Array) -> Array:
        y = jax.nn.relu(self.norms[0](self.convs[0](x)))
        return jax.nn.relu(x + self.norms[1](self.convs[1](y)))


class Blocks(nnx.Module):
    """Residual blocks, one after another in a loop, so that a program does not grow with them.
    Their parameters are stacked: ``[blocks, ...]``."""

    def __init__(self, channels: int, count: int, remat: bool, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        parts = [nnx.split(Block(channels, dtype=dtype, rngs=rngs)) for _ in range(count)]
        graphdef = parts[0][0]
        # One after another: two CPU devices of jaxlib 0.10 can't factor a batch of matrices.
        state = jax.tree.map(lambda *x: jnp.stack(x), *(state for _, state in parts))
        self.stacked = nnx.merge(graphdef, state)
        self.remat = remat

    def __call__(self, x: Array) -> Array:
        graphdef, state = nnx.split(self.stacked)

        def step(x: Array, block: nnx.State) -> tuple[Array, None]:
            return nnx.merge(graphdef, block)(x), None

        return jax.lax.scan(jax.checkpoint(step) if self.remat else step, x, state)[0]
