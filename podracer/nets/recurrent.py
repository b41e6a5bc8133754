"""Recurrent cores: a Flax cell scanned over time, whose carry is reset where an episode begins."""

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.types import Array, Carry

CELLS = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}
# The factors of the initial biases of a cell's gates, in the order of its layer: r, z, n of a GRU,
# and i, f, g, o of an LSTM.
GATES = {"gru": (0, 1, 0), "lstm": (-1, 1, 0, 0)}


def bias_init(core: str, timescale: int) -> nnx.Initializer:
    """Initial biases with which a cell forgets over times up to ``timescale`` steps.

    The chrono initialisation of https://arxiv.org/abs/1804.11188, equations 14 and 15. With
    ``timescale`` 0, biases are zeros: such a cell forgets half of its memory in each step, and
    gradients do not reach far.
    """
    if timescale == 0:
        return nnx.initializers.zeros_init()

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        size = shape[0] // len(GATES[core])
        bias = jnp.log(jax.random.uniform(key, (size,), dtype, 1.0, timescale - 1.0))
        return jnp.concatenate([factor * bias for factor in GATES[core]])

    return init


def initial_carry(core: str, size: int, batch: int) -> Carry:
    """Zeros ``[B, size]``: one array for a GRU, the pair (cell, hidden) for an LSTM."""
    zeros = jnp.zeros((batch, size))
    return (zeros, zeros) if core == "lstm" else zeros


class Recurrent(nnx.Module):
    """A GRU or LSTM over ``[T, B, in_size]``."""

    def __init__(
        self,
        core: str,
        in_size: int,
        size: int,
        timescale: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.cell = CELLS[core](
            in_size, size, bias_init=bias_init(core, timescale), dtype=dtype, rngs=rngs
        )

    def __call__(self, carry: Carry, x: Array, first: Array) -> tuple[Carry, Array]:
        """Returns the carry ``[B, size]`` after the last step, and outputs ``[T, B, size]``.

        Args:
          carry: the carry before the first step, ``[B, size]``.
          x: inputs, ``[T, B, in_size]``.
          first: ``[T, B]`` bool, where the carry is zeroed before the step.
        """

        def step(carry: Carry, inputs: tuple[Array, Array]) -> tuple[Carry, Array]:
            x, first = inputs
            carry = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), carry)
            new, y = self.cell(carry, x)
            # The carry stays float32 between steps, whatever the cell computes in.
            return jax.tree.map(lambda n, m: n.astype(m.dtype), new, carry), y

        return jax.lax.scan(step, carry, (x, first))


def make_core(
    core: str, in_size: int, size: int, timescale: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> Recurrent | None:
    """The core of that name, or None for "none"; see ``bias_init`` for ``timescale``."""
    if core == "none":
        return None
    return Recurrent(core, in_size, size, timescale, dtype=dtype, rngs=rngs)
