"""Policy and value networks, from a ``Spec`` and a ``NetworkConfig``.

Modules are Flax NNX, split once into parameters and structure. Outside this folder a network is a
record of pure functions of a plain dictionary of arrays.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import ConfigError, unknown
from podracer.nets import conv, heads, mlp, recurrent, resnet
from podracer.types import Array, ArrayTree, Carry, Discrete, Params, Spec

TORSOS = ("mlp", "pixels", *conv.LAYERS, "resnet")
CORES = ("none", *recurrent.CELLS)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Settings of the network.

    Attributes:
      torso: "mlp", or for images [H, W, C] "minatar", "shallow", "nature", "resnet" or the tiny
        "pixels".
      hidden: sizes of the layers of an "mlp" or "pixels"; () passes the flat observation through.
      activation: activation of the hidden layers, except in "resnet", which always uses ReLU.
      core: the recurrent layer after the torso: "none", "gru" or "lstm".
      core_size: units of the core.
      shared: whether policy and value share torso and core; otherwise each has its own.
      initial_log_std: initial log standard deviation of a Gaussian policy, in units in which the
        action space is [-1, 1]; must be 0 for discrete actions.
      dtype: the type that layers compute in, "float32" or "bfloat16"; parameters, carry and outputs
        are always float32.
    """

    torso: str = "mlp"
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    core: str = "none"
    core_size: int = 128
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


class Network(NamedTuple):
    """Policy and value as pure functions.

    Attributes:
      init: ``(key) -> params``.
      initial_carry: ``(batch size) -> Carry``, the recurrent state at the start of an episode;
        ``()`` without a core.
      apply: ``(params, carry, observation [T, B, ...], first [T, B]) -> (carry, policy, value)``
        with distribution parameters ``[T, B, ...]`` and values ``[T, B]``.
      distribution: makes a distribution from the policy's output.
      recurrent: whether there is a core, so that the network must be trained on whole sequences.
    """

    init: Callable[[Array], Params]
    initial_carry: Callable[[int], Carry]
    apply: Callable[[Params, Carry, Array, Array], tuple[Carry, ArrayTree, Array]]
    distribution: heads.Distribution
    recurrent: bool


def _torso(spec: Spec, config: NetworkConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    shape = spec.observation.shape
    if config.torso == "mlp":
        return mlp.MLP(shape, config.hidden, config.activation, dtype=dtype, rngs=rngs)
    if config.torso == "pixels":
        return conv.Pixels(shape, config.hidden, config.activation, dtype=dtype, rngs=rngs)
    if config.torso == "resnet":
        return resnet.ResNet(shape, dtype=dtype, rngs=rngs)
    activation = mlp.activation(config.activation)
    return conv.Conv(config.torso, shape, activation, dtype=dtype, rngs=rngs)


class Branch(nnx.Module):
    """Observations ``[T, B, ...]`` -> features ``[T, B, out_size]``: a torso, then the core."""

    def __init__(self, spec: Spec, config: NetworkConfig, *, rngs: nnx.Rngs):
        self.dtype = DTYPES[config.dtype]
        self.torso = _torso(spec, config, self.dtype, rngs)
        self.core = recurrent.make_core(
            config.core, self.torso.out_size, config.core_size, dtype=self.dtype, rngs=rngs
        )
        self.out_size = config.core_size if self.core else self.torso.out_size

    def __call__(self, carry: Carry, observation: Array, first: Array) -> tuple[Carry, Array]:
        time, batch = first.shape
        # The torso has no carry, so time is folded into the batch, which makes convolutions faster.
        x = observation.reshape(time * batch, *observation.shape[2:])
        x = x.astype(self.dtype) / 255 if x.dtype == jnp.uint8 else x.astype(self.dtype)
        x = self.torso(x).reshape(time, batch, -1)
        return (carry, x) if self.core is None else self.core(carry, x, first)


class ActorCritic(nnx.Module):
    """A policy head and a value head, on a shared branch or on one branch each."""

    def __init__(self, spec: Spec, config: NetworkConfig, *, rngs: nnx.Rngs):
        self.actor = Branch(spec, config, rngs=rngs)
        self.critic = None if config.shared else Branch(spec, config, rngs=rngs)
        size, dtype = self.actor.out_size, DTYPES[config.dtype]
        self.policy = heads.policy_head(
            size, spec.action, config.initial_log_std, dtype=dtype, rngs=rngs
        )
        self.value = heads.ValueHead(size, dtype=dtype, rngs=rngs)

    def __call__(
        self, carry: Carry, observation: Array, first: Array
    ) -> tuple[Carry, ArrayTree, Array]:
        carries = list(carry) or [(), ()]
        carries[0], x = self.actor(carries[0], observation, first)
        y = x
        if self.critic is not None:
            carries[1], y = self.critic(carries[1], observation, first)
        return (tuple(carries) if carry else ()), self.policy(x), self.value(y)


def make_network(spec: Spec, config: NetworkConfig) -> Network:
    """Builds policy and value networks.

    Args:
      spec: observation and action spaces.
      config: settings of the network.

    Raises:
      ConfigError: the torso can't take the observations, or a setting for continuous actions is
        given where actions are discrete.
    """
    if isinstance(spec.action, Discrete) and config.initial_log_std != 0:
        raise ConfigError(
            f"network.initial_log_std={config.initial_log_std} is for continuous actions, but this "
            f"environment has {spec.action.num_actions} discrete ones; leave it at 0"
        )
    abstract = nnx.eval_shape(lambda: ActorCritic(spec, config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    branches = 1 if config.shared else 2

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(ActorCritic(spec, config, rngs=nnx.Rngs(key))))

    def initial_carry(batch: int) -> Carry:
        if config.core == "none":
            return ()
        return (recurrent.initial_carry(config.core, config.core_size, batch),) * branches

    def apply(
        params: Params, carry: Carry, observation: Array, first: Array
    ) -> tuple[Carry, ArrayTree, Array]:
        module = nnx.merge(graphdef, _with_values(state, params))
        return module(carry, observation, first)

    return Network(
        init, initial_carry, apply, heads.distribution(spec.action), config.core != "none"
    )


def _with_values(state: nnx.State, params: Params) -> nnx.State:
    """An NNX state of the same structure, holding the arrays of a plain dictionary."""
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return state
