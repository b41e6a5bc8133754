"""A ring of the last steps of every environment, and items that are read from it.

Every environment has a ring of *slots*, one for each step. An *item* begins at every
``stride``-th slot and is a sequence of ``length`` transitions. It is complete once the step after
its last transition has arrived, and until a step that it needs is overwritten. Items cross the ends
of episodes; agents treat these by the one rule of ``agents/returns.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.types import Array, ArrayTree, TimeStep, TrainState, Trajectory


class Step(struct.PyTreeNode):
    """What is kept of a step, ``[B, slots, ...]``.

    Attributes:
      timestep: the arrival. Of a stack of frames, only the newest one is kept.
      fresh: bool, whether a stack of frames consists of one repeated frame, as at the beginning of
        a game; ``()`` for other observations.
      action: the action taken.
      extras: further values that the agent has chosen to keep.
    """

    timestep: TimeStep
    fresh: Array | tuple[()]
    action: Array
    extras: ArrayTree


class Kept(NamedTuple):
    """What a replay buffer keeps of a trajectory, besides time steps and actions.

    Attributes:
      extras: ``[T, B, ...]``.
      carry: ``[B, ...]``, before the first step.
    """

    extras: ArrayTree = ()
    carry: ArrayTree = ()


class Window(NamedTuple):
    """Items, as they were kept; n of them, of L transitions each.

    Attributes:
      timestep: ``[L+1, n, ...]`` without its observation, which is ``()``.
      action: ``[L+1, n, ...]``.
      extras: ``[L+1, n, ...]``.
      carry: ``[n, ...]``, the agent's carry before the unroll in which an item begins.
      importance: ``[n]`` float32, the factors of the items' losses, 0 where a draw found no item.
      observe: ``(offsets [k] or [k, n]) -> observations [k, n, ...]`` at these steps of the items.
    """

    timestep: TimeStep
    action: Array
    extras: ArrayTree
    carry: ArrayTree
    importance: Array
    observe: Callable[[Array], ArrayTree]


class Item(NamedTuple):
    """What an agent's items are.

    Attributes:
      length: transitions of an item (L).
      stride: an item begins at every ``stride``-th step; 1, or the length of an unroll.
      keep: what is kept of a trajectory, besides time steps and actions.
      read: ``(train_state, window) -> batch``, what the loss reads.
      update_stats: ``(train_state, trajectory) -> stats``, the statistics to act with next.
      initial_priority: ``(train_state, window) -> [n]``, priorities of new items; None gives them
        the largest priority so far, at least 1.
      valid: ``(window) -> [n]`` bool, whether there is anything to learn from an item; others are
        never drawn. None if there always is.
    """

    length: int
    stride: int
    read: Callable[[TrainState, Window], ArrayTree]
    update_stats: Callable[[TrainState, Trajectory], ArrayTree]
    keep: Callable[[Trajectory], Kept] = lambda trajectory: Kept()
    initial_priority: Callable[[TrainState, Window], Array] | None = None
    valid: Callable[[Window], Array] | None = None


class RingState(struct.PyTreeNode):
    """The contents of a ring; the first axis of every array is that of the environments.

    Attributes:
      steps: the steps.
      carry: the agent's carry before each unroll, ``[B, slots / unroll length, ...]``.
      count: ``[B]`` int32, the number of unrolls of each environment that were written.
    """

    steps: Step
    carry: ArrayTree
    count: Array


class Written(NamedTuple):
    """Unrolls that were written, ``[n]`` each.

    Attributes:
      env: number of the environment on this device.
      number: number of unrolls of this environment up to this one.
      later: number of unrolls of this environment that were written after this one.
    """

    env: Array
    number: Array
    later: Array


class Changed(NamedTuple):
    """What n unrolls have changed, each of them k + m items.

    Attributes:
      env: ``[n, k + m]``, the numbers of the items' environments; behind the last one for items
        that a later unroll has changed again.
      new: ``[n, k]``, the numbers of the items that the unroll made complete.
      exist: ``[n, k]`` bool, whether they exist: there are none from before the first step.
      gone: ``[n, m]``, the numbers of the items that are incomplete now.
    """

    env: Array
    new: Array
    exist: Array
    gone: Array


class Ring(NamedTuple):
    """The sizes of a ring, and what is done with it.

    Attributes:
      item: what an item is.
      slots: slots of an environment, a multiple of the length of an unroll.
      unroll_length: steps of an unroll (T).
      frames: frames of a stacked observation; 1 for other observations.
    """

    item: Item
    slots: int
    unroll_length: int
    frames: int

    @property
    def unrolls(self) -> int:
        """Number of unrolls of an environment that are kept."""
        return self.slots // self.unroll_length

    @property
    def items(self) -> int:
        """Number of items of an environment, complete or not."""
        return self.slots // self.item.stride

    @property
    def _per_unroll(self) -> int:
        """Number of items that begin in an unroll."""
        return self.unroll_length // self.item.stride

    @property
    def _late(self) -> int:
        """Number of the newest items, which lack later steps."""
        return self.item.length // self.item.stride

    @property
    def _early(self) -> int:
        """Number of the oldest items, which lack the frames before them."""
        return -(-(self.frames - 1) // self.item.stride)

    @property
    def first_unrolls(self) -> int:
        """Number of unrolls after which every environment has an item."""
        return (self._late + self._early) // self._per_unroll + 1

    @property
    def least_unrolls(self) -> int:
        """Number of unrolls that have to be kept, so that items are complete before they are
        overwritten."""
        return -(-(self._late + self._early) // self._per_unroll) + 1

    def init(self, trajectory: Trajectory, envs: int) -> RingState:
        """An empty ring of this many environments for such trajectories."""
        kept = jax.eval_shape(self._kept, trajectory)

        def allocate(length: int, tree: ArrayTree) -> ArrayTree:
            return jax.tree.map(lambda x: jnp.zeros((envs, length, *x.shape[2:]), x.dtype), tree)

        steps, carry = map(allocate, (self.slots, self.unrolls), kept)
        return RingState(steps, carry, jnp.zeros(envs, jnp.int32))

    def write(
        self, state: RingState, trajectory: Trajectory, env: Array
    ) -> tuple[RingState, Written]:
        """Writes each unroll over the oldest one of its environment.

        Args:
          state: the ring.
          trajectory: the unrolls of n environments.
          env: ``[n]``, the numbers of these environments on this device; one that occurs several
            times has several unrolls, in their order.
        """
        same = env[:, None] == env
        later = jnp.triu(same, 1).sum(1)
        number = state.count[env] + jnp.tril(same, -1).sum(1)
        # What later unrolls would overwrite is not written: the order of writes is undefined.
        to = jnp.where(later < self.unrolls, env, state.count.size)

        def put(past: Array, new: Array) -> Array:
            at = (number % self.unrolls * new.shape[1])[:, None] + jnp.arange(new.shape[1])
            return past.at[to[:, None], at].set(new)

        steps, carry = jax.tree.map(put, (state.steps, state.carry), self._kept(trajectory))
        count = state.count.at[env].add(1)
        return RingState(steps, carry, count), Written(env, number + 1, later)

    def age(self, state: RingState, env: Array, item: Array) -> Array:
        """The age of items in unrolls of their environment, a fraction; that of the newest step is
        0."""
        newest = state.count[env] % self.unrolls * self.unroll_length - 1
        return (newest - item * self.item.stride) % self.slots / self.unroll_length

    def changed_items(self, written: Written) -> Changed:
        """What new unrolls have changed."""
        per_unroll, late, early = self._per_unroll, self._late, self._early
        env, number, later = (x[:, None] for x in written)
        # Items are numbered from the first one that begins after the unroll.
        new = jnp.arange(per_unroll) - per_unroll - late
        gone = jnp.arange(-late, early)
        end = number % self.unrolls * per_unroll
        # As if slots were numbered from the first step on; after a full round, all items exist.
        exist = jnp.minimum(number, self.unrolls + 1) * per_unroll + new >= early
        # Items of the last unroll of an environment are numbered from later * per_unroll on.
        unchanged = new - later * per_unroll >= early - self.items
        last = jnp.broadcast_to(later == 0, (env.size, gone.size))
        behind = jnp.iinfo(jnp.int32).max
        envs = jnp.where(jnp.concatenate([unchanged, last], 1), env, behind)
        return Changed(envs, (end + new) % self.items, exist, (end + gone) % self.items)

    def read(self, state: RingState, env: Array, item: Array, importance: Array) -> Window:
        """Reads items, given the numbers ``[n]`` of their environments and their own."""
        start, steps = item * self.item.stride, state.steps
        slots = (start + jnp.arange(self.item.length + 1)[:, None]) % self.slots

        def observe(offsets: Array) -> ArrayTree:
            slots = (start + (offsets[:, None] if offsets.ndim == 1 else offsets)) % self.slots
            if self.frames > 1:
                return self._stack(steps, env[:, None], slots[..., None])
            return jax.tree.map(lambda x: x[env, slots], steps.timestep.observation)

        others = steps.replace(timestep=steps.timestep.replace(observation=()))
        read = jax.tree.map(lambda x: x[env, slots], others)
        carry = jax.tree.map(lambda x: x[env, start // self.unroll_length], state.carry)
        return Window(read.timestep, read.action, read.extras, carry, importance, observe)

    def _stack(self, steps: Step, env: Array, slots: Array) -> Array:
        """Observations ``[k, n, ..., frames]`` at the slots ``[k, n, 1]`` of ``env [n, 1]``."""
        lags = jnp.arange(self.frames)
        fresh: Any = steps.fresh
        fresh = fresh[env, (slots - lags) % self.slots]
        # Before a fresh stack, its own frame is repeated.
        oldest = jnp.where(fresh.any(-1), fresh.argmax(-1), self.frames - 1)
        past = (slots - jnp.minimum(lags[::-1], oldest[..., None])) % self.slots
        return jnp.moveaxis(steps.timestep.observation[env, past], 2, -1)

    def _kept(self, trajectory: Trajectory) -> tuple[Step, ArrayTree]:
        """What is kept of a trajectory: steps ``[B, T, ...]`` and carry ``[B, 1, ...]``."""
        timestep = jax.tree.map(lambda x: x[:-1], trajectory.timestep)
        fresh = ()
        if self.frames > 1:
            stack = timestep.observation
            same = (stack == stack[..., -1:]).all(tuple(range(2, stack.ndim)))
            fresh = timestep.first & same
            timestep = timestep.replace(observation=stack[..., -1])
        kept = self.item.keep(trajectory)
        steps = Step(timestep, fresh, trajectory.action, kept.extras)
        steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)
        return steps, jax.tree.map(lambda x: x[:, None], kept.carry)
