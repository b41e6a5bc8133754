"""MuZero's model of an environment: representation, dynamics and prediction
(https://arxiv.org/abs/1911.08265, appendix F and G)."""

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import ConfigError
from podracer.nets import conv, heads, masks
from podracer.nets.blocks import Blocks
from podracer.nets.mlp import MLP, linear
from podracer.nets.network import DTYPES, Branch, NetworkConfig, as_functions
from podracer.types import Array, ArrayTree, Box, Discrete, Params, Spec

STATES = ("vector", "planes")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Settings of a model.

    Attributes:
      state: what the model's states are: a "vector", computed by the network's torso; or "planes"
        [height, width, channels], computed from images by residual convolutions.
      size: numbers of a "vector".
      hidden: sizes of the layers of dynamics and prediction between a "vector" and their outputs.
      channels: channels of "planes".
      blocks: residual blocks of representation, dynamics and prediction, each, for "planes".
      halvings: how often height and width of images are halved, for "planes".
      remat: compute what is inside the residual blocks again for the gradient, instead of storing
        it, for "planes": less memory, and about a third more computation.
    """

    state: str = "vector"
    size: int = 64
    hidden: tuple[int, ...] = (64,)
    channels: int = 32
    blocks: int = 2
    halvings: int = 0
    remat: bool = False

    def __post_init__(self):
        if self.state not in STATES:
            raise ConfigError(f"the model's state must be one of {STATES}, got {self.state!r}")
        if min((self.size, self.channels, self.blocks, *self.hidden)) <= 0 or self.halvings < 0:
            raise ConfigError(
                "the model's size, hidden, channels and blocks must be positive, and halvings not "
                f"negative, got {self.size}, {self.hidden}, {self.channels}, {self.blocks} and "
                f"{self.halvings}"
            )


class Model(NamedTuple):
    """A model of an environment, as pure functions of the parameters ``{"representation",
    "dynamics", "prediction"}``. Planes are scaled to [0, 1]; vectors have a root mean square of 1.

    Attributes:
      init: ``(key) -> params``.
      represent: ``(params, observation [B, ...]) -> state [B, ...]``.
      step: ``(params, state, action [B, ...]) -> (next state, reward logits [B, atoms])``.
      predict: ``(params, state) -> (policy, value logits [B, atoms])``, with a policy as that of
        ``heads.policy_head``.
    """

    init: Callable[[Array], Params]
    represent: Callable[[Params, ArrayTree], Array]
    step: Callable[[Params, Array, Array], tuple[Array, Array]]
    predict: Callable[[Params, Array], tuple[ArrayTree, Array]]


def scale(state: Array) -> Array:
    """Scales each state ``[B, H, W, channels]`` to [0, 1], appendix G of the paper.

    The extremes are sums over the places where they are. The gradient of ``jnp.max`` looks for
    equal numbers instead; a compiler may compute the state again for that, rounded otherwise, and
    where none is equal then, the gradient is 0 / 0.
    """
    flat = state.reshape(state.shape[0], -1)

    def at(place: Array) -> Array:
        return (flat * jax.nn.one_hot(place, flat.shape[1])).sum(-1, keepdims=True)

    low, high = at(flat.argmin(-1)), at(flat.argmax(-1))
    return ((flat - low) / (high - low + 1e-5)).reshape(state.shape)


def normalize(state: Array) -> Array:
    """Divides each state ``[B, size]`` by its root mean square. Its numbers remain around 0: scaled
    to [0, 1], they would all be near 0.5, of which dense layers learn more slowly."""
    return state * jax.lax.rsqrt(jnp.square(state).mean(-1, keepdims=True) + 1e-5)


def _output(in_size: int, out_size: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """The last layer of a distribution, which is uniform at first. In float32, as those of other
    networks."""
    return linear(in_size, out_size, 0.0, dtype=jnp.float32, rngs=rngs)


class Sizes(NamedTuple):
    """What dynamics and prediction have in common.

    Attributes:
      state: the shape of a state: ``(size,)``, or ``(height, width, channels)``.
      action: the space of actions.
      atoms: number of values that rewards and values are distributions over.
      network: settings of the network.
      config: settings of the model.
    """

    state: tuple[int, ...]
    action: Discrete | Box
    atoms: int
    network: NetworkConfig
    config: ModelConfig

    @property
    def dtype(self) -> jnp.dtype:
        """What layers compute in."""
        return DTYPES[self.network.dtype]

    @property
    def action_size(self) -> int:
        """Numbers that an action is for dynamics."""
        space = self.action
        return space.num_actions if isinstance(space, Discrete) else prod(space.shape)

    def encode(self, action: Array) -> Array:
        """Actions ``[B, ...]`` as ``[B, action_size]``: a one among zeros, or the numbers of a
        continuous action, clipped as environments clip them."""
        if isinstance(self.action, Discrete):
            return jax.nn.one_hot(action, self.action.num_actions)
        return jnp.clip(action, -1, 1).reshape(action.shape[0], self.action_size)

    def mlp(self, shape: tuple[int, ...], rngs: nnx.Rngs) -> MLP:
        """The layers between inputs of a shape and a distribution."""
        return MLP(
            shape,
            self.config.hidden,
            self.network.activation,
            layer_norm=self.network.layer_norm,
            dtype=self.dtype,
            rngs=rngs,
        )

    def atoms_head(self, size: int, rngs: nnx.Rngs) -> nnx.Module:
        """The last layer of a reward or a value."""
        return _output(size, self.atoms, rngs=rngs)

    def policy_head(self, size: int, rngs: nnx.Rngs) -> nnx.Module:
        """The last layer of a policy."""
        if isinstance(self.action, Discrete):
            return _output(size, self.action.num_actions, rngs=rngs)
        std = self.network.initial_log_std
        return heads.GaussianHead(size, self.action, std, dtype=jnp.dtype(jnp.float32), rngs=rngs)


class VectorRepresentation(nnx.Module):
    """Observations ``[B, ...]`` -> states ``[B, size]``: a torso and a dense layer."""

    def __init__(self, spec: Spec, network: NetworkConfig, config: ModelConfig, *, rngs: nnx.Rngs):
        self.branch = Branch(spec, network, rngs=rngs)
        dtype = DTYPES[network.dtype]
        self.dense = linear(self.branch.out_size, config.size, 1.0, dtype=dtype, rngs=rngs)

    def __call__(self, observation: ArrayTree) -> Array:
        # Branches take [T, B, ...]: here T = 1.
        now = jax.tree.map(lambda x: x[None], observation)
        _, x = self.branch((), now, None)
        return normalize(self.dense(x[0]).astype(jnp.float32))


class VectorDynamics(nnx.Module):
    """States ``[B, size]`` and actions ``[B]`` -> next states and reward logits.

    The first layer takes all products of the action's numbers and a one with the state's numbers
    and a one, so that it has weights for each discrete action, and weights for all actions. If it
    took both side by side, the action would change little of what it computes, and rewards and
    values would hardly depend on the action before much is learned.
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.encode, self.dtype = sizes.encode, sizes.dtype
        (size,) = sizes.state
        self.layers = sizes.mlp((sizes.action_size + 1, size + 1), rngs)
        self.change = linear(self.layers.out_size, size, 1.0, dtype=self.dtype, rngs=rngs)
        self.reward = sizes.atoms_head(self.layers.out_size, rngs)

    def __call__(self, state: Array, action: Array) -> tuple[Array, Array]:
        one = jnp.ones_like(state[:, :1])
        rows = jnp.concatenate([one, self.encode(action)], -1)
        columns = jnp.concatenate([one, state], -1)
        x = self.layers((rows[:, :, None] * columns[:, None]).astype(self.dtype))
        return normalize(state + self.change(x).astype(jnp.float32)), self.reward(x)


class VectorPrediction(nnx.Module):
    """States ``[B, size]`` -> policy and value logits, each by layers of its own."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.dtype = sizes.dtype
        self.layers, self.outputs = nnx.List(), nnx.List()
        for head in (sizes.policy_head, sizes.atoms_head):
            layers = sizes.mlp(sizes.state, rngs)
            self.layers.append(layers)
            self.outputs.append(head(layers.out_size, rngs))

    def __call__(self, state: Array) -> tuple[ArrayTree, ...]:
        x = state.astype(self.dtype)
        pairs = zip(self.layers, self.outputs, strict=True)
        return tuple(output(layers(x)) for layers, output in pairs)


class PlanesRepresentation(nnx.Module):
    """Images ``[B, H, W, C]`` -> states ``[B, H', W', channels]``."""

    def __init__(
        self, shape: tuple[int, ...], network: NetworkConfig, config: ModelConfig, *, rngs: nnx.Rngs
    ):
        height, width, channels = conv.image_shape("planes", shape)
        self.dtype = DTYPES[network.dtype]
        layers: list[nnx.Module] = []
        for i in range(config.halvings + 1):
            stride = 1 if i == config.halvings else 2
            layer = conv.conv(
                channels,
                config.channels,
                3,
                stride,
                padding="SAME",
                dtype=self.dtype,
                rngs=rngs,
            )
            layers.append(layer)
            channels = config.channels
            height, width = -(-height // stride), -(-width // stride)
        self.layers = nnx.List(layers)
        self.blocks = Blocks(
            config.channels, config.blocks, config.remat, dtype=self.dtype, rngs=rngs
        )
        self.shape = (height, width, config.channels)

    def __call__(self, observation: Array) -> Array:
        x = observation.astype(self.dtype)
        x = x / 255 if observation.dtype == jnp.uint8 else x
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return scale(self.blocks(x).astype(jnp.float32))


class PlanesDynamics(nnx.Module):
    """States ``[B, H, W, channels]`` and actions -> next states and reward logits. Each
    number of an encoded action is a plane: of ones among zeros, where actions are discrete."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.encode, self.dtype = sizes.encode, sizes.dtype
        channels = sizes.state[-1]
        self.conv = conv.conv(
            channels + sizes.action_size, channels, 3, padding="SAME", dtype=self.dtype, rngs=rngs
        )
        config = sizes.config
        self.blocks = Blocks(channels, config.blocks, config.remat, dtype=self.dtype, rngs=rngs)
        self.reward = PlanesOutput(sizes, sizes.atoms_head, rngs=rngs)

    def __call__(self, state: Array, action: Array) -> tuple[Array, Array]:
        x = state.astype(self.dtype)
        planes = self.encode(action).astype(self.dtype)[:, None, None]
        planes = jnp.broadcast_to(planes, (*x.shape[:3], planes.shape[-1]))
        y = self.blocks(jax.nn.relu(x + self.conv(jnp.concatenate([x, planes], -1))))
        return scale(y.astype(jnp.float32)), self.reward(y)


class PlanesOutput(nnx.Module):
    """States ``[B, H, W, channels]`` -> what a last layer makes of them: a 1 x 1 convolution to 16
    channels, dense layers, and that layer."""

    def __init__(
        self, sizes: Sizes, head: Callable[[int, nnx.Rngs], nnx.Module], *, rngs: nnx.Rngs
    ):
        *place, channels = sizes.state
        self.conv = linear(channels, 16, 2**0.5, dtype=sizes.dtype, rngs=rngs)
        self.layers = sizes.mlp((*place, 16), rngs)
        self.output = head(self.layers.out_size, rngs)

    def __call__(self, x: Array) -> Any:
        return self.output(self.layers(jax.nn.relu(self.conv(x))))


class PlanesPrediction(nnx.Module):
    """States ``[B, H, W, channels]`` -> policy and value logits."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.dtype = sizes.dtype
        channels, config = sizes.state[-1], sizes.config
        self.blocks = Blocks(channels, config.blocks, config.remat, dtype=self.dtype, rngs=rngs)
        self.policy = PlanesOutput(sizes, sizes.policy_head, rngs=rngs)
        self.value = PlanesOutput(sizes, sizes.atoms_head, rngs=rngs)

    def __call__(self, state: Array) -> tuple[ArrayTree, Array]:
        x = self.blocks(state.astype(self.dtype))
        return self.policy(x), self.value(x)


def _modules(
    spec: Spec, atoms: int, network: NetworkConfig, config: ModelConfig
) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
    """What builds the parts of a model, by their names."""
    sizes = Sizes((config.size,), spec.action, atoms, network, config)
    if config.state == "vector":
        return {
            "representation": lambda rngs: VectorRepresentation(spec, network, config, rngs=rngs),
            "dynamics": lambda rngs: VectorDynamics(sizes, rngs=rngs),
            "prediction": lambda rngs: VectorPrediction(sizes, rngs=rngs),
        }
    leaves = jax.tree.leaves(masks.split(spec.observation)[0])
    if len(leaves) != 1:
        raise ConfigError(
            f"a model whose state is 'planes' takes one image, but this environment observes "
            f"{len(leaves)} arrays; use state='vector'"
        )

    def representation(rngs: nnx.Rngs) -> PlanesRepresentation:
        return PlanesRepresentation(tuple(leaves[0].shape), network, config, rngs=rngs)

    planes = sizes._replace(state=nnx.eval_shape(lambda: representation(nnx.Rngs(0))).shape)
    return {
        "representation": representation,
        "dynamics": lambda rngs: PlanesDynamics(planes, rngs=rngs),
        "prediction": lambda rngs: PlanesPrediction(planes, rngs=rngs),
    }


def make_model(spec: Spec, network: NetworkConfig, config: ModelConfig, atoms: int) -> Model:
    """Builds a model.

    Args:
      spec: observation and action spaces.
      network: settings of the network: torso, activation and dtype.
      config: settings of the model.
      atoms: number of values that rewards and values are distributions over.

    Raises:
      ConfigError: the network has a core, or can't take the observations.
    """
    masks.check(spec)
    if network.recurrent:
        raise ConfigError(
            f"network.core={network.core!r}: a model's states are computed from one observation; "
            "use network.core='none', and for environments that need memory agent='r2d2' or "
            "agent='ppo'"
        )
    modules = _modules(spec, atoms, network, config)
    functions = {name: as_functions(make) for name, make in modules.items()}

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(functions))
        return {name: f(k) for k, (name, (f, _)) in zip(keys, functions.items(), strict=True)}

    def represent(params: Params, observation: ArrayTree) -> Array:
        if config.state == "planes":
            (observation,) = jax.tree.leaves(masks.split(observation)[0])
        return functions["representation"][1](params["representation"], observation)

    def step(params: Params, state: Array, action: Array) -> tuple[Array, Array]:
        return functions["dynamics"][1](params["dynamics"], state, action)

    def predict(params: Params, state: Array) -> tuple[ArrayTree, Array]:
        return functions["prediction"][1](params["prediction"], state)

    return Model(init, represent, step, predict)
