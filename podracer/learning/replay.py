"""Replay buffers: the last steps of every environment, on the learner's devices.

A ring buffer for each environment holds the steps (``learning/ring.py``); items are drawn from it
uniformly or in proportion to their priorities (``learning/priorities.py``).
"""

import dataclasses
from math import gcd
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct

from podracer.errors import ConfigError
from podracer.learning import priorities as priorities_lib
from podracer.learning.priorities import TINY, Drawn, Layout, Priorities
from podracer.learning.ring import Item, Ring, RingState, Window, Written
from podracer.learning.scalars import OFF_AT_ZERO, is_on
from podracer.types import (
    Array,
    ArrayTree,
    Devices,
    GradientSteps,
    Source,
    TrainState,
    Trajectory,
)

# The settings that can't change when a run is resumed.
FIXED = ("replay.capacity", "replay.batch", "replay.priority_exponent")

# Added to priorities, so that every item can be drawn again.
LEAST_PRIORITY = 1e-6


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Settings of the replay buffer; agents without one ignore them.

    Attributes:
      capacity: steps that are kept, over all environments and devices, rounded down to whole
        unrolls.
      begin: environment steps before learning begins, over all environments, rounded up to whole
        unrolls; at least until each environment has an item.
      batch: items of a gradient step, over all devices.
      gradient_steps: gradient steps after each unroll.
      priority_exponent: alpha of prioritised experience replay
        (https://arxiv.org/abs/1511.05952): items are drawn with a probability proportional to their
        priority to this power; 0 draws uniformly within each group of environments.
      importance_exponent: beta of prioritised experience replay: losses of items are weighted by
        their probability to the power of minus this, relative to the largest weight of the batch;
        ignored if items are drawn uniformly.
    """

    capacity: int = 100_000
    begin: int = 1_000
    batch: int = 256
    gradient_steps: int = 1
    priority_exponent: float = dataclasses.field(default=0.0, metadata=OFF_AT_ZERO)
    importance_exponent: float = 0.4

    def __post_init__(self):
        for key in ("capacity", "begin", "batch", "gradient_steps"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"replay.{key} must be positive, got {getattr(self, key)}")
        for key in ("priority_exponent", "importance_exponent"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"replay.{key} must be in [0, 1], got {getattr(self, key)}")
        if self.begin > self.capacity:
            raise ConfigError(
                f"replay.begin={self.begin} must not be more than replay.capacity={self.capacity}"
            )


def gradient_steps(
    config: ReplayConfig, num_envs: int, num_unrolls: int, unroll_length: int, transitions: int
) -> GradientSteps:
    """How an update is divided into gradient steps.

    Args:
      config: settings of the replay.
      num_envs: number of environments, over all devices.
      num_unrolls: number of unrolls of an update, over all devices.
      unroll_length: steps of an unroll.
      transitions: transitions of an item that are learned from.
    """
    steps = f"{config.gradient_steps} gradient step" + "s" * (config.gradient_steps > 1)
    ratio = config.gradient_steps * config.batch * transitions / (num_unrolls * unroll_length)
    return GradientSteps(
        config.gradient_steps,
        config.batch * transitions,
        gcd(num_envs, config.batch),
        f"{steps} of {config.batch:,} items; replay ratio {ratio:.3g}",
    )


class ReplayState(struct.PyTreeNode):
    """A replay buffer; the first axis of every array is that of the environments.

    Attributes:
      ring: the steps.
      priorities: of the items.
      largest: ``[B]`` float32, the largest priority that a loss has set, raised to
        ``priority_exponent``; 0 before any has.
    """

    ring: RingState
    priorities: Priorities
    largest: Array


class Replay(NamedTuple):
    """The functions of a replay buffer on one device, and what they share.

    Attributes:
      config: settings.
      devices: the devices that learn.
      num_envs: number of environments, over all devices.
      num_unrolls: number of unrolls of an update, over all devices.
      ring: where steps are.
      layout: where priorities are.
    """

    config: ReplayConfig
    devices: Devices
    num_envs: int
    num_unrolls: int
    ring: Ring
    layout: Layout

    @property
    def prioritised(self) -> bool:
        """Whether items have different priorities."""
        return is_on(self.config.priority_exponent)

    def init(self, trajectory: Trajectory) -> ReplayState:
        """An empty replay for such trajectories, see ``Source.init``."""
        envs = trajectory.action.shape[1] * self.num_envs // self.num_unrolls
        if envs % self.layout.envs:
            raise ConfigError(
                f"replay.batch={self.config.batch} and the {self.num_envs} environments have the "
                f"greatest common divisor {self.layout.groups}, so that batches are drawn from "
                f"that many groups of environments, which devices with {envs} environments each "
                f"would have to split; use a number of devices that divides {self.layout.groups}, "
                "or another replay.batch"
            )
        priorities = priorities_lib.init(self.layout, envs)
        return ReplayState(self.ring.init(trajectory, envs), priorities, jnp.zeros(envs))

    def add(
        self, state: ReplayState, train_state: TrainState, trajectory: Trajectory, key: Array
    ) -> tuple[ReplayState, ArrayTree]:
        """Writes unrolls over the oldest ones of their environments, see ``Source.add``."""
        del key
        stats = self.ring.item.update_stats(train_state, trajectory)
        env = trajectory.env_id - self.devices.number() * state.largest.size
        ring, written = self.ring.write(state.ring, trajectory, env)
        return self._set_first_priorities(state.replace(ring=ring), train_state, written), stats

    def sample(
        self, state: ReplayState, train_state: TrainState, key: Array, i: Array
    ) -> tuple[ArrayTree, Drawn, dict[str, Array]]:
        """Draws a batch, see ``Source.sample``."""
        del i
        drawn = priorities_lib.draw(state.priorities, self.layout, key, self.devices.number())
        metrics = {"replay/age": self.ring.age(state.ring, drawn.env, drawn.item).mean()}
        # A probability of 0 marks a draw from a group without items.
        importance = (drawn.probability > 0).astype(jnp.float32)
        if self.prioritised:
            importance = self._importance(drawn.probability)
            metrics["replay/importance"] = importance.mean()
            priority = drawn.priority ** (1 / self.config.priority_exponent)
            metrics["replay/priority"] = priority.mean()
        window = self.ring.read(state.ring, drawn.env, drawn.item, importance)
        return self.ring.item.read(train_state, window), drawn, metrics

    def update(
        self, state: ReplayState, drawn: Drawn, priorities: Array | tuple[()]
    ) -> ReplayState:
        """Sets the priorities of the items of a batch, see ``Source.update``."""
        if not self.prioritised:
            return state
        values = self._raised(jnp.asarray(priorities))
        values = jnp.where(drawn.probability > 0, values, 0.0)
        return state.replace(
            priorities=priorities_lib.assign(state.priorities, drawn.env, drawn.item, values),
            largest=state.largest.at[drawn.env].max(values),
        )

    def finish(self, state: ReplayState) -> tuple[ReplayState, dict[str, Array]]:
        """Reports how full the buffer is, see ``Source.finish``."""
        unrolls = self.ring.unrolls
        added = state.ring.count.mean()
        return state, {"replay/fill": jnp.minimum(added, unrolls) / unrolls}

    @property
    def begin(self) -> int:
        """Number of updates after which learning begins."""
        updates = -(-self.config.begin // (self.num_unrolls * self.ring.unroll_length))
        return max(updates, -(-self.ring.first_unrolls * self.num_envs // self.num_unrolls))

    def ready(self, state: ReplayState) -> Array:
        """Whether enough steps were added, see ``Source.ready``."""
        # A sum of whole numbers is exact, where the compiler rounds their mean.
        added = state.ring.count.sum(dtype=jnp.float32)
        return added >= self.begin * self.num_unrolls * state.ring.count.size // self.num_envs

    def _importance(self, probability: Array) -> Array:
        """Weights of the items of a batch, of which the largest over all devices is 1."""
        power = -self.config.importance_exponent
        # A probability of 0 marks a draw from a group without items.
        weight = jnp.where(probability > 0, probability**power, 0.0)
        return weight / jnp.maximum(self.devices.max(weight.max()), TINY)

    def _set_first_priorities(
        self, state: ReplayState, train_state: TrainState, written: Written
    ) -> ReplayState:
        """Gives the items that new unrolls made complete their first priorities, and takes away
        those of the items that they overwrote."""
        changed = self.ring.changed_items(written)
        complete = changed.new.shape[1]
        envs, new = changed.env[:, :complete].ravel(), changed.new.ravel()
        window = self.ring.read(state.ring, envs, new, jnp.ones(envs.shape))
        values = self._first_priorities(state, train_state, window)
        if self.ring.item.valid is not None:
            values = jnp.where(self.ring.item.valid(window), values, 0.0)
        values = jnp.where(changed.exist, values.reshape(changed.new.shape), 0.0)
        values = jnp.pad(values, ((0, 0), (0, changed.gone.shape[1])))
        items = jnp.concatenate([changed.new, changed.gone], 1)
        changes = (changed.env, items, values)
        priorities = priorities_lib.assign(state.priorities, *map(jnp.ravel, changes))
        return state.replace(priorities=priorities)

    def _raised(self, priorities: Array) -> Array:
        """Priorities raised to ``priority_exponent``, positive, so that every item can be drawn
        again. Those of an agent that diverges are the least: it may copy another one, but its
        replay stays."""
        finite = jnp.where(jnp.isfinite(priorities), priorities, 0.0)
        return (finite + LEAST_PRIORITY) ** self.config.priority_exponent

    def _first_priorities(
        self, state: ReplayState, train_state: TrainState, window: Window
    ) -> Array:
        """The priorities of new items."""
        if not self.prioritised:
            return jnp.ones(window.importance.shape)
        if self.ring.item.initial_priority is None:
            largest = jnp.maximum(self.devices.max(state.largest.max()), 1.0)
            return jnp.broadcast_to(largest, window.importance.shape)
        return self._raised(self.ring.item.initial_priority(train_state, window))


def make_source(
    item: Item,
    config: ReplayConfig,
    devices: Devices,
    *,
    num_envs: int,
    num_unrolls: int,
    unroll_length: int,
    frames: int,
) -> Source:
    """A source that keeps many unrolls and draws batches of items from them.

    Args:
      item: what an item is, and how it is read.
      config: sizes, and how items are drawn.
      devices: the devices that learn.
      num_envs: number of environments, over all devices.
      num_unrolls: number of unrolls of an update, over all devices.
      unroll_length: steps of an unroll (T).
      frames: see ``Spec.frames``.

    Raises:
      ConfigError: the capacity is too small; or, from ``init``, the devices can't share the draws.
    """
    per_unroll = num_envs * unroll_length
    ring = Ring(item, config.capacity // per_unroll * unroll_length, unroll_length, frames)
    if ring.unrolls < ring.least_unrolls:
        raise ConfigError(
            f"replay.capacity={config.capacity:,} keeps {ring.slots} steps of each of {num_envs:,} "
            f"environments, but an item of {item.length + frames - 1} steps needs "
            f"{ring.least_unrolls * unroll_length}; set it to at least "
            f"{ring.least_unrolls * per_unroll:,}"
        )
    layout = priorities_lib.make_layout(num_envs, config.batch, ring.items)
    replay = Replay(config, devices, num_envs, num_unrolls, ring, layout)
    return Source(
        steps=config.gradient_steps,
        init=replay.init,
        add=replay.add,
        sample=replay.sample,
        update=replay.update,
        finish=replay.finish,
        ready=replay.ready,
        begin=replay.begin - 1,
        capacity=ring.slots * num_envs,
    )
