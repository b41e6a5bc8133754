"""The vocabulary that every part of podracer speaks.

Arrays are time-major, ``[T, B, ...]``: ``T`` steps of ``B`` environments. What goes through ``jit``
as state is a frozen ``PyTreeNode``; a set of functions that belong together is a ``NamedTuple``,
as in optax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

Array = jax.Array
ArrayTree = Any
# A record's field: an array on a device, a numpy array on the host, or the shape of one.
Leaf = Any
Device = Any
Params = Any
Carry = Any
# The mean of a tree of arrays over all devices; the identity on one.
Mean = Callable[[ArrayTree], ArrayTree]


class TimeStep(struct.PyTreeNode):
    """What an environment says on *arriving* at time t.

    Attributes:
      observation: ``[..., *shape]``.
      reward: ``[...]`` float32, for the transition t-1 -> t; 0 where the episode has just begun.
      discount: ``[...]`` float32, 0 if the transition t-1 -> t terminated the episode and 1 if it
        goes on or was only truncated. The agent's own discount is not in it.
      first: ``[...]`` bool, this observation opens an episode.
    """

    observation: ArrayTree
    reward: Leaf
    discount: Leaf
    first: Leaf


class Trajectory(struct.PyTreeNode):
    """T transitions of B environments, as the learner receives them.

    Attributes:
      timestep: ``[T+1, B, ...]``; the last one is there to bootstrap from.
      action: ``[T, B, ...]``.
      extras: ``[T, B, ...]``, what the agent wants remembered (behaviour log-probabilities, ...).
      carry: ``[B, ...]``, the agent's memory on entering t = 0.
    """

    timestep: TimeStep
    action: Leaf
    extras: ArrayTree
    carry: Carry


class Weights(struct.PyTreeNode):
    """All an actor needs in order to act, and all that is ever published to one.

    Attributes:
      params: the network's parameters.
      stats: running statistics (observation and reward normalisation); the same on all devices.
    """

    params: Params
    stats: ArrayTree


class TrainState(struct.PyTreeNode):
    """All the learner owns.

    Attributes:
      weights: what acts.
      target: an older or averaged copy of the parameters, ``()`` for agents that use none.
      opt_state: the optimizer's state.
      step: ``[]`` int32, the number of *updates* done. Environment steps are counted on the host,
        as Python integers: a pod takes 2^31 of them within minutes, but 2^31 updates never.
    """

    weights: Weights
    target: Params
    opt_state: ArrayTree
    step: Array


class Discrete(NamedTuple):
    """``num_actions`` choices, given to the environment as an int32 scalar."""

    num_actions: int


class Box(NamedTuple):
    """A vector of ``shape`` with inclusive bounds of that shape; infinite where there is none."""

    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray


class Spec(NamedTuple):
    """What an agent has to know of an environment.

    Attributes:
      observation: shape and dtype of one observation.
      action: the action space.
    """

    observation: jax.ShapeDtypeStruct
    action: Discrete | Box


class Environment(NamedTuple):
    """One environment written in JAX: pure functions of a single, unbatched instance.

    Attributes:
      spec: observation and action spaces.
      reset: ``(key) -> (state, timestep)``.
      step: ``(key, state, action) -> (state, timestep)``; begins a new episode by itself. How it
        does so (in the same step or in the next) is its own affair: see ``returns.py``.
      render: ``(state) -> [H, W, 3]`` uint8, a picture drawn on the host; None where there is none.
    """

    spec: Spec
    reset: Callable[[Array], tuple[ArrayTree, TimeStep]]
    step: Callable[[Array, ArrayTree, Array], tuple[ArrayTree, TimeStep]]
    render: Callable[[ArrayTree], np.ndarray] | None = None


class HostStep(NamedTuple):
    """What a pool of environments on the host says on arriving; numpy arrays, ``[B, ...]`` each.

    Attributes:
      timestep: its observation is as *sent*, see ``HostEnvironment.receive``. The arrays are new
        ones at every step and never written again, so that a device may take them without a copy.
      score: float32, the reward before any clipping: what returns are reported in.
      over: bool, a whole game ends here, and its score with it. Not so where an agent is told
        that an episode ended and the game goes on, as with lost lives.
    """

    timestep: TimeStep
    score: np.ndarray
    over: np.ndarray


class Pool(Protocol):
    """B environments on the host, stepped at once. Begins new episodes in the *next* step: the one
    after an end ignores its action and arrives at the first observation."""

    def reset(self) -> HostStep:
        """Begins an episode in every environment."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """Takes actions ``[B, ...]``, in the environment's own units."""
        ...

    def close(self) -> None:
        """Lets go of processes, threads and memory."""
        ...


class DrawnPool(Pool, Protocol):
    """A pool that can be looked at."""

    def render(self) -> np.ndarray:
        """A picture ``[H, W, 3]`` uint8 of its first environment."""
        ...


class HostEnvironment(NamedTuple):
    """Environments on the host, in pools of any number.

    Attributes:
      spec: observation and action spaces, as agents see them.
      make: ``(seeds, threads) -> Pool`` of as many environments as there are seeds, whose work is
        spread over so many threads, where the pool has any.
      sent: shape and dtype of one observation as it travels from host to device.
      receive: ``(sent [B, ...], previous observation [B, ...]) -> observation [B, ...]``, on the
        device.
      make_drawn: ``(seed) -> DrawnPool`` of one environment; None where there is nothing to see.
    """

    spec: Spec
    make: Callable[[Sequence[int], int], Pool]
    sent: ArrayTree
    receive: Callable[[ArrayTree, Array], Array]
    make_drawn: Callable[[int], DrawnPool] | None = None


class LossAux(NamedTuple):
    """What a loss reports beside its value.

    Attributes:
      metrics: scalars by name; averaged over devices and gradient steps.
      priorities: ``[items]``, new replay priorities, or ``()`` for agents without replay.
      stop: ``[]`` float32; if its mean over devices is positive, this gradient step and the rest of
        the update's are skipped. ``()`` for losses that never ask for it.
    """

    metrics: dict[str, Array]
    priorities: Array | tuple[()] = ()
    stop: Array | tuple[()] = ()


class Act(Protocol):
    """Chooses actions. ``keys`` is ``[B]``, one an environment, so that what an environment lives
    through does not depend on how environments are spread over devices."""

    def __call__(
        self,
        weights: Weights,
        carry: Carry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[Carry, Array, ArrayTree]:
        """Returns the new memory, actions ``[B, ...]`` and extras ``[B, ...]``."""
        ...


class Agent(NamedTuple):
    """An algorithm: a record of pure functions. Loops and learner know nothing else of it.

    Attributes:
      init: ``(key) -> Weights``.
      carry: ``(env_ids [B]) -> Carry``, memory before the first step. Global environment ids, so
        that what differs between environments (exploration, say) is right on any device.
      act: see ``Act``.
      prepare: ``(train_state, trajectory) -> (batch, stats)``, once a rollout. The leading axis of
        ``batch`` is what the learner shuffles and splits; ``stats`` are the statistics to act with
        next.
      loss: ``(params, train_state, batch, key) -> (scalar, LossAux)``, to be minimised.
    """

    init: Callable[[Array], Weights]
    carry: Callable[[Array], Carry]
    act: Act
    prepare: Callable[[TrainState, Trajectory], tuple[ArrayTree, ArrayTree]]
    loss: Callable[[Params, TrainState, ArrayTree, Array], tuple[Array, LossAux]]
