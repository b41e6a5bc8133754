"""On-policy batches: one unroll, dealt out to minibatches, in several passes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree, Devices, Source, TrainState, Trajectory


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How often and in which parts an unroll is learned from.

    Attributes:
      num_epochs: passes over each batch of experience.
      num_minibatches: gradient steps per pass.
      whole_episodes: whether each unroll begins new episodes, and only those that end within it are
        learned from, as in BatchPPO (https://arxiv.org/abs/1709.02878). An environment in which
        none ends is learned from as if its unroll were the whole episode, bootstrapped at its end.
        ``unroll_length`` should be the length of the longest episode and one more, because a
        truncated episode shows its end one step later.
    """

    num_epochs: int
    num_minibatches: int
    whole_episodes: bool

    def __post_init__(self):
        if min(self.num_epochs, self.num_minibatches) <= 0:
            raise ConfigError(
                "num_epochs and num_minibatches must be positive, got "
                f"{self.num_epochs} and {self.num_minibatches}"
            )


class Rollout(struct.PyTreeNode):
    """The batch of an update.

    Attributes:
      items: what the agent learns from; the first axis of every array is that of the items.
      order: ``[epochs * minibatches, items / minibatches]`` int32, the items of each gradient step.
    """

    items: ArrayTree
    order: Array


# ``(train_state, trajectory) -> (items, stats)``: what the loss reads, and the statistics to act
# with next.
Prepare = Callable[[TrainState, Trajectory], tuple[ArrayTree, ArrayTree]]


def shuffle(key: Array, items: int, minibatches: int, device_index: Array | int) -> Array:
    """Deals items out to minibatches: ``[minibatches, items / minibatches]`` indices.

    The shuffle is stratified: of each group of ``minibatches`` neighbouring items, one goes to each
    minibatch, drawn with a key that depends on the group's *global* number. A minibatch over all
    devices therefore holds the same items however they are spread over devices, which is not true
    of a permutation of each device's items, and is spread evenly over time and environments.

    Groups are put in order by comparing all pairs of their random numbers. On a CPU this takes a
    quarter of the time that sorting them takes (see benchmarks/README.md).

    Args:
      key: random key, the same on all devices.
      items: number of items on this device, a multiple of ``minibatches``.
      minibatches: number of minibatches.
      device_index: number of this device; the items of device 0 come first.
    """
    groups = items // minibatches
    ids = device_index * groups + jnp.arange(groups)
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (minibatches,)))(ids)
    place = jnp.arange(minibatches)
    equal = (bits[:, :, None] == bits[:, None, :]) & (place[:, None] > place)
    rank = ((bits[:, :, None] > bits[:, None, :]) | equal).sum(-1)
    order = jnp.where(rank[:, None, :] == place[:, None], place, 0).sum(-1)
    return (jnp.arange(groups)[:, None] * minibatches + order).T


def make_source(prepare: Prepare, config: RolloutConfig, devices: Devices) -> Source:
    """A source that deals each unroll out, without replacement within a pass.

    Args:
      prepare: turns an unroll into items, once per update.
      config: number of passes and of minibatches.
      devices: the devices that learn.

    Raises:
      ConfigError: (from ``add``) the minibatches do not divide the items.
    """
    epochs, minibatches = config.num_epochs, config.num_minibatches

    def add(
        state: tuple[()], train_state: TrainState, trajectory: Trajectory, key: Array
    ) -> tuple[Rollout, ArrayTree]:
        del state
        items, stats = prepare(train_state, trajectory)
        count = jax.tree.leaves(items)[0].shape[0]
        if count % minibatches:
            below = max(x for x in range(1, minibatches) if count % x == 0)
            raise ConfigError(
                f"num_minibatches={minibatches} does not divide the {count} items a device learns "
                "from (an item is a transition, or the whole unroll of an environment for "
                f"recurrent networks and V-trace); {below} would"
            )

        def deal(key: Array) -> Array:
            # Not the key itself, so that seeds give the same shuffles as in earlier versions.
            shuffle_key, _ = jax.random.split(key)
            return shuffle(shuffle_key, count, minibatches, devices.number())

        order = jax.lax.map(deal, jax.random.split(key, epochs))
        return Rollout(items, order.reshape(epochs * minibatches, -1)), stats

    def sample(
        source: Rollout, train_state: TrainState, key: Array, i: Array
    ) -> tuple[ArrayTree, tuple[()], dict[str, Array]]:
        del train_state, key
        if minibatches == 1:
            return source.items, (), {}
        order = source.order[i]
        return jax.tree.map(lambda x: x[order], source.items), (), {}

    return Source(
        steps=epochs * minibatches,
        init=lambda trajectory: (),
        add=add,
        sample=sample,
        update=lambda source, ticket, priorities: source,
        finish=lambda source: ((), {}),
    )
