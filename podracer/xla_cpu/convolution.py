"""A convolution that is fast on CPUs: its gradients inside loops, and all of it on large batches.

XLA's CPU backend runs a convolution by its fast kernels only if the axes are in standard order, and
reorders them only outside of loops. The gradients of a convolution are convolutions with other
orders of axes, and all of Anakin's learning is inside loops: there they ran 11 to 33 times slower
than outside. This module writes the gradients out with the axes in standard order. The kernels take
up to twice as long for each image of a large batch as for each of a few, so they get a few at a
time. benchmarks/README.md has the measurements. Other platforms run JAX's own convolutions.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import Array

Pairs = tuple[tuple[int, int], ...]
AXES = ("NHWC", "HWIO", "NHWC")
# The largest number of images at a time.
BLOCK = 16


def _blocks(*arrays: Array) -> list[Array]:
    """Arrays ``[N, ...]`` as few equal blocks ``[blocks, size, ...]``; the last is filled with
    zeros."""
    count = len(arrays[0])
    blocks = max(1, -(-count // BLOCK))
    size = -(-count // blocks)

    def divide(a: Array) -> Array:
        a = jnp.pad(a, [(0, blocks * size - count)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(blocks, size, *a.shape[1:])

    return [divide(a) for a in arrays]


def _together(blocks: Array, count: int) -> Array:
    """The first ``count`` elements of an array of blocks."""
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], *blocks.shape[2:])[:count]


def _native(x: Array, kernel: Array, *, strides: tuple[int, ...], padding: Pairs) -> Array:
    """JAX's own convolution."""
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=AXES)


def _blockwise(x: Array, kernel: Array, *, strides: tuple[int, ...], padding: Pairs) -> Array:
    """The convolution of one block of images after another."""
    convolve = partial(_native, kernel=kernel, strides=strides, padding=padding)
    y = lax.map(convolve, *_blocks(x))
    return _together(y, len(x))


def _standard_gradients(
    x: Array, kernel: Array, dy: Array, *, strides: tuple[int, ...], padding: Pairs
) -> tuple[Array, Array]:
    """Gradients of x and kernel, by two convolutions of NHWC by HWIO."""
    # For each spatial axis: kernel size, padding before, input size, and the size of dy once it is
    # dilated by the stride.
    spans = [(size - 1) * stride + 1 for size, stride in zip(dy.shape[1:3], strides, strict=True)]
    sizes = list(
        zip(kernel.shape[:2], (low for low, _ in padding), x.shape[1:3], spans, strict=True)
    )
    dx = lax.conv_general_dilated(
        dy,
        kernel[::-1, ::-1].swapaxes(2, 3),
        (1, 1),
        [(k - 1 - low, n + low - span) for k, low, n, span in sizes],
        lhs_dilation=strides,
        dimension_numbers=AXES,
    )
    # The sum is over the batch, so batch and channels change places.
    dkernel = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        dy.transpose(1, 2, 0, 3),
        (1, 1),
        [(low, k - 1 - n - low + span) for k, low, n, span in sizes],
        rhs_dilation=strides,
        dimension_numbers=AXES,
    )
    return dx, dkernel.transpose(1, 2, 0, 3)


def _blockwise_gradients(
    x: Array, kernel: Array, dy: Array, *, strides: tuple[int, ...], padding: Pairs
) -> tuple[Array, Array]:
    """Gradients of x and kernel, from one block of images after another."""

    def add(total: Array, block: list[Array]) -> tuple[Array, Array]:
        x, dy = block
        dx, dkernel = _standard_gradients(x, kernel, dy, strides=strides, padding=padding)
        return total + dkernel, dx

    # In float32 at least: in bfloat16 a sum of many blocks would stop growing.
    zeros = jnp.zeros(kernel.shape, jnp.promote_types(kernel.dtype, jnp.float32))
    dkernel, dx = lax.scan(add, zeros, _blocks(x, dy))
    return _together(dx, len(x)), dkernel.astype(kernel.dtype)


def _native_gradients(
    x: Array, kernel: Array, dy: Array, *, strides: tuple[int, ...], padding: Pairs
) -> tuple[Array, Array]:
    """JAX's own gradients of x and kernel."""
    return jax.vjp(partial(_native, strides=strides, padding=padding), x, kernel)[1](dy)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def _convolve(x: Array, kernel: Array, strides: tuple[int, ...], padding: Pairs) -> Array:
    sizes = {"strides": strides, "padding": padding}
    return lax.platform_dependent(
        x, kernel, cpu=partial(_blockwise, **sizes), default=partial(_native, **sizes)
    )


def _save(
    x: Array, kernel: Array, strides: tuple[int, ...], padding: Pairs
) -> tuple[Array, tuple[Array, Array]]:
    return _convolve(x, kernel, strides, padding), (x, kernel)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _backward(
    strides: tuple[int, ...], padding: Pairs, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    sizes = {"strides": strides, "padding": padding}
    return lax.platform_dependent(
        *saved,
        dy,
        cpu=partial(_blockwise_gradients, **sizes),
        default=partial(_native_gradients, **sizes),
    )


_convolve.defvjp(_save, _backward)


def convolve(
    x: Array, kernel: Array, strides: tuple[int, ...], padding: str | Pairs, **unused: Any
) -> Array:
    """Replaces ``jax.lax.conv_general_dilated`` in ``flax.nnx.Conv``.

    Args:
      x: images, ``[N, H, W, C]``.
      kernel: filters, ``[height, width, C, channels]``.
      strides: the stride of each spatial axis.
      padding: "SAME", "VALID", or (before, after) for each spatial axis.
      **unused: other arguments that Flax passes, all at values that have no effect.

    Returns:
      ``[N, H', W', channels]``.

    Raises:
      ValueError: one of the other arguments would have an effect.
    """
    dilations = (unused.get("lhs_dilation"), unused.get("rhs_dilation"))
    if any(set(d or (1,)) != {1} for d in dilations) or unused.get("feature_group_count", 1) != 1:
        raise ValueError("convolve has neither dilation nor feature groups")
    if unused.get("precision") is not None or unused.get("preferred_element_type") is not None:
        raise ValueError("convolve computes in the type of its arguments, at JAX's own precision")
    if isinstance(padding, str):
        padding = tuple(lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding))
    return _convolve(x, kernel, tuple(strides), tuple((low, high) for low, high in padding))
