"""What all networks are made of: their settings, and branches of torso and core.

Modules are Flax NNX, split once into parameters and structure. Outside this folder a network is a
record of pure functions of a plain dictionary of arrays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import ConfigError, unknown
from podracer.nets import conv, masks, mlp, recurrent, resnet
from podracer.types import Array, ArrayTree, Carry, Params, Spec

TORSOS = ("mlp", "pixels", *conv.LAYERS, "resnet")
CORES = ("none", *recurrent.CELLS)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Settings of the network.

    Attributes:
      torso: "mlp", or for images [H, W, C] "minatar", "shallow", "nature", "resnet" or the tiny
        "pixels". Of a dictionary of observations, "mlp" takes all of them, one after another in the
        order of their names; the others take the one image, and the rest is appended to what they
        return.
      hidden: sizes of the layers of an "mlp" or "pixels"; () passes the flat observation through.
      activation: activation of the hidden layers, except in "resnet", which always uses ReLU.
      layer_norm: whether each layer of the torso, and each dense layer of MuZero's model, is
        normalised before its activation (https://arxiv.org/abs/1607.06450); not in "resnet". D4PG
        with "mlp" and MuZero's "planes" have no such torso.
      core: the recurrent layer after the torso: "none", "gru" or "lstm".
      core_size: units of the core.
      core_timescale: steps over which the core should remember at first, by biases of its gates
        between 0 and the logarithm of this number (https://arxiv.org/abs/1804.11188); 0 leaves
        Flax's initial ones.
      shared: whether policy and value share torso and core; otherwise each has its own.
      initial_log_std: initial log standard deviation of a Gaussian policy, in units in which the
        action space is [-1, 1]; must be 0 for discrete actions.
      dtype: the type that layers compute in, "float32" or "bfloat16"; parameters, carry and outputs
        are always float32.
    """

    torso: str = "mlp"
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = False
    core: str = "none"
    core_size: int = 128
    core_timescale: int = 0
    shared: bool = False
    initial_log_std: float = 0.0
    dtype: str = "float32"

    def __post_init__(self):
        for kind, name, known in (
            ("network torso", self.torso, TORSOS),
            ("network core", self.core, CORES),
            ("activation", self.activation, mlp.ACTIVATIONS),
            ("network dtype", self.dtype, DTYPES),
        ):
            if name not in known:
                raise unknown(kind, name, known)
        if min((*self.hidden, self.core_size)) <= 0:
            raise ConfigError(
                "network sizes must be positive, got "
                f"network.hidden={self.hidden} and network.core_size={self.core_size}"
            )
        if self.layer_norm and self.torso == "resnet":
            raise ConfigError(
                "network.layer_norm=True is for the other torsos; set network.layer_norm=False "
                "for network.torso='resnet', which has no normalisation"
            )
        if self.core_timescale != 0 and self.core_timescale < 3:
            raise ConfigError(
                f"network.core_timescale must be 0 or at least 3 steps, got {self.core_timescale}"
            )

    @property
    def recurrent(self) -> bool:
        """Whether there is a core, so that the network must be trained on whole sequences."""
        return self.core != "none"


def _torso(shape: tuple[int, ...], config: NetworkConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    if config.torso == "resnet":
        return resnet.ResNet(shape, dtype=dtype, rngs=rngs)
    layers: Any = {"layer_norm": config.layer_norm, "dtype": dtype, "rngs": rngs}
    if config.torso == "mlp":
        return mlp.MLP(shape, config.hidden, config.activation, **layers)
    if config.torso == "pixels":
        return conv.Pixels(shape, config.hidden, config.activation, **layers)
    return conv.Conv(config.torso, shape, mlp.activation(config.activation), **layers)


def _image(torso: str, leaves: Sequence[jax.ShapeDtypeStruct]) -> int | None:
    """The number of the leaf that goes through the torso alone; None if all go through it."""
    if torso == "mlp":
        return None
    if len(leaves) == 1:
        # The torso itself says which shape it needs.
        return 0
    images = [i for i, leaf in enumerate(leaves) if len(leaf.shape) == 3]
    if len(images) != 1:
        raise ConfigError(
            f"network.torso={torso!r} takes one observation [height, width, channels], but this "
            f"environment observes a dictionary with {len(images)} of them, of shapes "
            f"{[leaf.shape for leaf in leaves]}; use torso='mlp'"
        )
    return images[0]


def _concatenate(parts: Sequence[Array]) -> Array:
    """Arrays ``[N, ...]``, flattened and side by side."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], -1)


class Branch(nnx.Module):
    """Observations ``[T, B, ...]`` -> features ``[T, B, out_size]``: a torso, then the core.

    Observations are a single array or a dictionary, whose action mask is left out.
    """

    def __init__(self, spec: Spec, config: NetworkConfig, extra: int = 0, *, rngs: nnx.Rngs):
        """``extra``: number of further features that are appended to those of the torso."""
        masks.check(spec)
        self.dtype = DTYPES[config.dtype]
        leaves = jax.tree.leaves(masks.split(spec.observation)[0])
        sizes = [prod(leaf.shape) for leaf in leaves]
        self.image = _image(config.torso, leaves)
        if self.image is None:
            self.torso = _torso((sum(sizes),), config, self.dtype, rngs)
        else:
            self.torso = _torso(leaves[self.image].shape, config, self.dtype, rngs)
            extra += sum(sizes) - sizes[self.image]
        size = self.torso.out_size + extra
        self.core = recurrent.make_core(
            config.core,
            size,
            config.core_size,
            config.core_timescale,
            dtype=self.dtype,
            rngs=rngs,
        )
        self.out_size = config.core_size if self.core else size

    def __call__(
        self, carry: Carry, observation: ArrayTree, first: Array | None, extra: Array | None = None
    ) -> tuple[Carry, Array]:
        """``first [T, B]`` resets the core; without a core it may be None."""
        time, batch = jax.tree.leaves(observation)[0].shape[:2]

        def fold(x: Array) -> Array:
            # The torso has no carry, so time is folded into the batch, which makes convolutions
            # faster.
            x = x.reshape(time * batch, *x.shape[2:])
            return x.astype(self.dtype) / 255 if x.dtype == jnp.uint8 else x.astype(self.dtype)

        parts = [fold(x) for x in jax.tree.leaves(masks.split(observation)[0])]
        if self.image is None:
            x = self.torso(_concatenate(parts))
        else:
            image = parts.pop(self.image)
            x = _concatenate([self.torso(image), *parts])
        x = x.reshape(time, batch, -1)
        if extra is not None:
            x = jnp.concatenate([x, extra.astype(self.dtype)], -1)
        if self.core is None:
            return carry, x
        assert first is not None
        return self.core(carry, x, first)


def initial_carry(config: NetworkConfig, batch: int) -> Carry:
    """The carry of a branch at the start of an episode, ``[batch, ...]``; ``()`` without a core."""
    if not config.recurrent:
        return ()
    return recurrent.initial_carry(config.core, config.core_size, batch)


def as_functions(
    make: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Callable[[Array], Params], Callable[..., Any]]:
    """A module as pure functions: ``(key) -> params``, and ``(params, *inputs) -> outputs``.

    Args:
      make: builds the module.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key))))

    def apply(params: Params, *inputs: Any) -> Any:
        module: Any = nnx.merge(graphdef, _with_values(state, params))
        return module(*inputs)

    return init, apply


def _with_values(state: nnx.State, params: Params) -> nnx.State:
    """An NNX state of the same structure, holding the arrays of a plain dictionary."""
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return state
