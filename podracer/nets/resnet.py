"""The deep residual torso of IMPALA, https://arxiv.org/abs/1802.01561, figure 3 (right)."""

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.nets.conv import conv, image_shape
from podracer.nets.mlp import linear
from podracer.xla_cpu.pooling import max_pool

CHANNELS = (16, 32, 32)
OUT_SIZE = 256


class Residual(nnx.Module):
    """x + conv(relu(conv(relu(x)))), of the same shape."""

    def __init__(self, channels: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.convs = nnx.List(
            conv(channels, channels, 3, padding="SAME", dtype=dtype, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for layer in self.convs:
            y = layer(jax.nn.relu(y))
        return x + y


class ResNet(nnx.Module):
    """Three sections of convolution, halving max-pool and two residual blocks; then 256 units."""

    def __init__(self, shape: tuple[int, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs):
        height, width, channels = image_shape("resnet", shape)
        convs, blocks = [], []
        for out in CHANNELS:
            convs.append(
                conv(channels, out, 3, padding="SAME", use_bias=False, dtype=dtype, rngs=rngs)
            )
            blocks.append(nnx.List(Residual(out, dtype=dtype, rngs=rngs) for _ in range(2)))
            height, width, channels = -(-height // 2), -(-width // 2), out
        self.convs, self.blocks = nnx.List(convs), nnx.List(blocks)
        self.biases = nnx.List(nnx.Param(jnp.zeros(out, jnp.float32)) for out in CHANNELS)
        size = height * width * channels
        self.dense = linear(size, OUT_SIZE, 2**0.5, dtype=dtype, rngs=rngs)
        self.out_size = OUT_SIZE

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, bias, section in zip(self.convs, self.biases, self.blocks, strict=True):
            x = max_pool(layer(x))
            # The bias commutes with the pool; here its gradient sums a quarter as many elements.
            x = x + bias.astype(x.dtype)
            for block in section:
                x = block(x)
        x = jax.nn.relu(x).reshape(x.shape[0], -1)
        return jax.nn.relu(self.dense(x))
