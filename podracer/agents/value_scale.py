"""The scale on which large values are less far apart, and values as distributions over it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import rlax

from podracer.types import Array


def rescale(x: Array) -> Array:
    """h(x) of https://arxiv.org/abs/1805.11593, proposition A.2, with epsilon = 1/1000."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x


def unscale(x: Array) -> Array:
    """The inverse of ``rescale``."""
    shifted = jnp.abs(x) + 1 + 1e-3
    # (sqrt(1 + 4e-3 s) - 1) / 2e-3 without the difference of two numbers that are almost the same.
    root = 2 * shifted / (jnp.sqrt(1 + 4e-3 * shifted) + 1)
    return jnp.sign(x) * (root**2 - 1)


class Support(NamedTuple):
    """Values as distributions over numbers that are equally far apart on the scale of ``rescale``
    (MuZero, https://arxiv.org/abs/1911.08265, appendix F).

    Attributes:
      largest: the largest value; the least is minus that.
      atoms: how many numbers there are. If it is odd, 0 is one of them.
    """

    largest: float
    atoms: int

    @property
    def _end(self) -> float:
        with jax.ensure_compile_time_eval():
            return float(rescale(jnp.float32(self.largest)))

    def encode(self, value: Array) -> Array:
        """The distributions ``[..., atoms]`` over two neighbours whose means, on the scale of
        ``rescale``, are those of values ``[...]``."""
        scaled = rescale(value)
        return jnp.asarray(rlax.transform_to_2hot(scaled, -self._end, self._end, self.atoms))

    def decode(self, logits: Array) -> Array:
        """The values ``[...]`` of distributions with logits ``[..., atoms]``."""
        places = jnp.linspace(-self._end, self._end, self.atoms)
        return unscale((jax.nn.softmax(logits) * places).sum(-1))
