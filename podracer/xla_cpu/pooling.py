"""The max-pool of the residual network, with a gradient that is fast on CPUs.

XLA's CPU backend computes the gradient of a pool one element after another: on the 84 x 84 frames
of Atari it took more than a third of a gradient step (benchmarks/README.md). This module takes the
maximum along one axis and then along the other, from whole slices. Other platforms run JAX's own.
"""

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import Array

HEIGHT, WIDTH = 1, 2


def _window(x: Array, axis: int) -> tuple[list[Array], int]:
    """The first, second and third element of every window along ``axis``, padded as by "SAME".

    The second result is the number of elements of padding before x.
    """
    size = x.shape[axis]
    out = -(-size // 2)
    padding = 2 * out + 1 - size
    before = padding // 2
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (before, padding - before, 0)
    x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), pads)
    return [lax.slice_in_dim(x, i, i + 2 * out - 1, 2, axis) for i in range(3)], before


def _pool_axis(x: Array, axis: int) -> Array:
    (first, second, third), _ = _window(x, axis)
    return jnp.maximum(jnp.maximum(first, second), third)


def _pool_axis_gradient(x: Array, dy: Array, axis: int) -> Array:
    """Gives each element of ``dy`` to the first largest element of its window."""
    (first, second, third), before = _window(x, axis)
    is_first = (first >= second) & (first >= third)
    is_second = ~is_first & (second >= third)

    def take(mask: Array, shift: int) -> Array:
        """``dy`` where the mask is true, with a 0 before it (1) or after it (0)."""
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (shift, 1 - shift, 0)
        return lax.pad(jnp.where(mask, dy, 0), jnp.zeros((), dy.dtype), pads)

    # A window's third element is the first of the next: both are at the even places.
    even = take(is_first, 0) + take(~(is_first | is_second), 1)
    odd = take(is_second, 0)
    dx = jnp.stack([even, odd], axis + 1)
    dx = dx.reshape(*x.shape[:axis], 2 * even.shape[axis], *x.shape[axis + 1 :])
    return lax.slice_in_dim(dx, before, before + x.shape[axis], axis=axis)


def _by_axes(x: Array) -> Array:
    return _pool_axis(_pool_axis(x, WIDTH), HEIGHT)


def _by_axes_gradient(x: Array, dy: Array) -> Array:
    rows = _pool_axis(x, WIDTH)
    return _pool_axis_gradient(x, _pool_axis_gradient(rows, dy, HEIGHT), WIDTH)


def _native(x: Array) -> Array:
    """JAX's own pool."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _native_gradient(x: Array, dy: Array) -> Array:
    """JAX's own gradient."""
    (dx,) = jax.vjp(_native, x)[1](dy)
    return dx


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """The maximum of windows of 3 x 3 at every second row and column, padded as by "SAME".

    Args:
      x: images, ``[N, H, W, C]``, of a type of floating-point numbers.

    Returns:
      ``[N, ceil(H / 2), ceil(W / 2), C]``. Of equal elements of a window, the first, row by row,
      gets the gradient, as in JAX.
    """
    return lax.platform_dependent(x, cpu=_by_axes, default=_native)


def _save(x: Array) -> tuple[Array, Array]:
    return max_pool(x), x


def _backward(x: Array, dy: Array) -> tuple[Array]:
    return (lax.platform_dependent(x, dy, cpu=_by_axes_gradient, default=_native_gradient),)


max_pool.defvjp(_save, _backward)
