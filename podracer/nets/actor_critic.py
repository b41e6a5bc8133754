"""Policy and value networks, from a ``Spec`` and a ``NetworkConfig``."""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx

from podracer.errors import ConfigError
from podracer.nets import heads, masks
from podracer.nets.network import DTYPES, Branch, NetworkConfig, as_functions, initial_carry
from podracer.types import Array, ArrayTree, Carry, Discrete, Params, Spec

# Makes what stands in the place of the values: ``(size of the features, dtype, rngs) -> module``.
ValueHead = Callable[..., nnx.Module]


class Network(NamedTuple):
    """Policy and value as pure functions.

    Attributes:
      init: ``(key) -> params``.
      initial_carry: ``(batch size) -> Carry``, the recurrent state at the start of an episode;
        ``()`` without a core.
      apply: ``(params, carry, observation [T, B, ...], first [T, B]) -> (carry, policy, value)``
        with distribution parameters ``[T, B, ...]`` and values ``[T, B]``. Illegal actions have a
        probability of zero.
      distribution: makes a distribution from the policy's output.
      recurrent: whether there is a core, so that the network must be trained on whole sequences.
    """

    init: Callable[[Array], Params]
    initial_carry: Callable[[int], Carry]
    apply: Callable[[Params, Carry, ArrayTree, Array], tuple[Carry, ArrayTree, Array]]
    distribution: heads.Distribution
    recurrent: bool


class ActorCritic(nnx.Module):
    """A policy head and a value head, on a shared branch or on one branch each."""

    def __init__(self, spec: Spec, config: NetworkConfig, value_head: ValueHead, *, rngs: nnx.Rngs):
        self.actor = Branch(spec, config, rngs=rngs)
        self.critic = None if config.shared else Branch(spec, config, rngs=rngs)
        size, dtype = self.actor.out_size, DTYPES[config.dtype]
        self.policy = heads.policy_head(
            size, spec.action, config.initial_log_std, dtype=dtype, rngs=rngs
        )
        self.value = value_head(size, dtype=dtype, rngs=rngs)

    def __call__(
        self, carry: Carry, observation: ArrayTree, first: Array
    ) -> tuple[Carry, ArrayTree, Array]:
        carries = list(carry) or [(), ()]
        carries[0], x = self.actor(carries[0], observation, first)
        y = x
        if self.critic is not None:
            carries[1], y = self.critic(carries[1], observation, first)
        policy = masks.restrict(self.policy(x), observation)
        return (tuple(carries) if carry else ()), policy, self.value(y)


def make_network(
    spec: Spec, config: NetworkConfig, value_head: ValueHead = heads.ValueHead
) -> Network:
    """Builds policy and value networks.

    Args:
      spec: observation and action spaces.
      config: settings of the network.
      value_head: makes the value head, or another one in its place.

    Raises:
      ConfigError: the torso can't take the observations, an action mask is not one, or a setting
        for continuous actions is given where actions are discrete.
    """
    if isinstance(spec.action, Discrete) and config.initial_log_std != 0:
        raise ConfigError(
            f"network.initial_log_std={config.initial_log_std} is for continuous actions, but this "
            f"environment has {spec.action.num_actions} discrete ones; leave it at 0"
        )
    init, apply = as_functions(lambda rngs: ActorCritic(spec, config, value_head, rngs=rngs))

    def initial_carries(batch: int) -> Carry:
        carry = initial_carry(config, batch)
        return (carry,) * (1 if config.shared else 2) if config.recurrent else ()

    return Network(init, initial_carries, apply, heads.distribution(spec.action), config.recurrent)
