"""Convolutional torsos for images ``[N, H, W, C]``: one for MinAtar, two for Atari, a tiny one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets.mlp import MLP, linear, norms
from podracer.xla_cpu.convolution import convolve

# (channels, kernel, stride) of each layer, and the size of the dense layer after them.
LAYERS = {
    # MinAtar, https://arxiv.org/abs/1903.03176, section 3.
    "minatar": (((16, 3, 1),), 128),
    # IMPALA's shallow model, https://arxiv.org/abs/1802.01561, figure 3: that of the first DQN.
    "shallow": (((16, 8, 4), (32, 4, 2)), 256),
    # Nature DQN, https://www.nature.com/articles/nature14236, Methods.
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
}


def image_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of an observation, if it is an image; else raises ``ConfigError``."""
    if len(shape) != 3:
        raise ConfigError(
            f"network.torso={name!r} needs observations [height, width, channels], got shape "
            f"{tuple(shape)}; use torso='mlp'"
        )
    return shape


def conv(
    in_channels: int,
    channels: int,
    kernel: int,
    stride: int = 1,
    padding: str = "VALID",
    *,
    use_bias: bool = True,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A square convolution: float32 parameters, orthogonal init, computing in ``dtype``."""
    return nnx.Conv(
        in_channels,
        channels,
        (kernel, kernel),
        strides=stride,
        padding=padding,
        use_bias=use_bias,
        kernel_init=nnx.initializers.orthogonal(2**0.5),
        conv_general_dilated=convolve,
        dtype=dtype,
        rngs=rngs,
    )


class Pixels(nnx.Module):
    """An MLP on every fourth pixel of every fourth row. It is so small that only the environments
    limit the speed of a run."""

    def __init__(
        self,
        shape: tuple[int, ...],
        hidden: Sequence[int],
        activation: str,
        *,
        layer_norm: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape("pixels", shape)
        few = (-(-height // 4), -(-width // 4), channels)
        self.mlp = MLP(few, hidden, activation, layer_norm=layer_norm, dtype=dtype, rngs=rngs)
        self.out_size = self.mlp.out_size

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(x[:, ::4, ::4])


class Conv(nnx.Module):
    """Convolutions without padding, then one dense layer, each followed by an activation;
    ``layer_norm`` normalises before it, the channels of each pixel and the dense layer."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        activation: Callable[[jax.Array], jax.Array],
        *,
        layer_norm: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape(name, shape)
        layers, self.out_size = LAYERS[name]
        self.activation = activation
        convs = []
        for out, kernel, stride in layers:
            if min(height, width) < kernel:
                raise ConfigError(
                    f"network.torso={name!r} has a {kernel} x {kernel} kernel, too large for "
                    f"observations of shape {tuple(shape)}"
                )
            convs.append(conv(channels, out, kernel, stride, dtype=dtype, rngs=rngs))
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
            channels = out
        self.convs = nnx.List(convs)
        size = height * width * channels
        self.dense = linear(size, self.out_size, 2**0.5, dtype=dtype, rngs=rngs)
        sizes = (*(out for out, _, _ in layers), self.out_size)
        self.norms = norms(sizes, on=layer_norm, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        *of_convs, of_dense = self.norms
        for layer, norm in zip(self.convs, of_convs, strict=True):
            x = self.activation(norm(layer(x)))
        return self.activation(of_dense(self.dense(x.reshape(x.shape[0], -1))))
