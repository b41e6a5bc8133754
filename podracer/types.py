"""The types that all parts of podracer share.

Arrays are time-major, ``[T, B, ...]``: ``T`` steps of ``B`` environments. State that goes through
``jit`` is a frozen ``PyTreeNode``; functions that belong together are a ``NamedTuple``, as in
optax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

Array = jax.Array
ArrayTree = Any
# The type of a record's field: an array on a device, a numpy array, or the shape of an array.
Leaf = Any
Device = Any
Params = Any
Carry = Any
# The key of the mask of legal actions in an observation, see ``Spec``.
ACTION_MASK = "action_mask"
# The key of the environment's own state in an observation, see ``Spec.model``.
MODEL_STATE = "model_state"
# A row of metrics, by name.
Row = dict[str, int | float]
# Combines a tree of arrays over all devices; the identity on one.
Reduce = Callable[[ArrayTree], ArrayTree]


class TimeStep(struct.PyTreeNode):
    """What an environment returns on *arriving* at time t.

    Attributes:
      observation: ``[..., *shape]``, or a dictionary of arrays, see ``Spec``.
      reward: ``[...]`` float32, of the transition t-1 -> t, also where it ended an episode and this
        observation opens the next one; 0 after a reset alone.
      discount: ``[...]`` float32, 0 if the transition t-1 -> t terminated the episode, else 1, also
        where the episode was truncated. The agent's discount factor is not included. In a game of
        two players, -1 instead of 1 says that the other one is to move: values are always those
        of the player to move, and rewards those of the one who moved.
      first: ``[...]`` bool, whether this observation opens an episode.
    """

    observation: ArrayTree
    reward: Leaf
    discount: Leaf
    first: Leaf


class Trajectory(struct.PyTreeNode):
    """T transitions of B environments, as the learner receives them.

    Attributes:
      timestep: ``[T+1, B, ...]``; the last one is used to bootstrap.
      action: ``[T, B, ...]``.
      extras: ``[T, B, ...]``, further outputs of ``Agent.act`` (behaviour log-probabilities, ...).
      carry: ``[B, ...]``, the agent's carry before t = 0.
      env_id: ``[B]`` int32, the environments' global numbers. With remote workers, an environment
        may occur several times, with consecutive unrolls in their order.
    """

    timestep: TimeStep
    action: Leaf
    extras: ArrayTree
    carry: Carry
    env_id: Leaf


_SECOND: Any = 1
# The axis of the environments in each field of a trajectory.
ENVS_AXIS = Trajectory(_SECOND, _SECOND, _SECOND, carry=0, env_id=0)


class Weights(struct.PyTreeNode):
    """Everything that an actor needs to act, and that is published to actors.

    Attributes:
      params: the network's parameters.
      stats: running statistics (observation and reward normalisation), the same on all devices.
    """

    params: Params
    stats: ArrayTree


class TrainState(struct.PyTreeNode):
    """The learner's state.

    Attributes:
      weights: the current weights.
      target: see ``Target``; ``()`` for agents without one.
      opt_state: the optimizer's state.
      step: ``[]`` int32, the number of *updates* done. Environment steps are counted on the host,
        as Python integers: a pod takes 2^31 of them within minutes, but never 2^31 updates.
    """

    weights: Weights
    target: ArrayTree
    opt_state: ArrayTree
    step: Array


class Discrete(NamedTuple):
    """``num_actions`` actions, each an int32 scalar."""

    num_actions: int


class Box(NamedTuple):
    """Actions of ``shape`` with inclusive bounds of that shape, infinite where unbounded."""

    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray


class Spec(NamedTuple):
    """What an agent needs to know about an environment.

    Attributes:
      observation: shape and dtype of one observation, or a dictionary of shapes and dtypes, which
        may contain further dictionaries. Where actions are discrete, its key ``ACTION_MASK`` may
        hold ``[num_actions]`` bool, whether each action is legal. Agents then take no other action.
      action: the action space.
      frames: number of frames in the last axis of an observation, the newest one last, of which the
        others were the newest ones of the steps before; 1 if observations share no frames, and for
        dictionaries.
      players: 2 in a game whose rewards sum to zero and in which the agent makes all moves.
      model: ``(state, action) -> (state, timestep)``, the environment as a function of the state
        that observations hold under ``MODEL_STATE``; None if they don't.
    """

    observation: ArrayTree
    action: Discrete | Box
    frames: int = 1
    players: int = 1
    model: Callable[[ArrayTree, Array], tuple[ArrayTree, TimeStep]] | None = None


class Simulator(NamedTuple):
    """An environment as a function of a state that a search can hold.

    Attributes:
      state: ``(state of the environment) ->`` the state of the simulator.
      step: ``(state, action) -> (state, timestep)``. What follows the end of an episode has no
        effect.
    """

    state: Callable[[ArrayTree], ArrayTree]
    step: Callable[[ArrayTree, Array], tuple[ArrayTree, TimeStep]]


class Environment(NamedTuple):
    """One environment written in JAX: pure functions of a single, unbatched instance.

    Attributes:
      spec: observation and action spaces.
      reset: ``(key) -> (state, timestep)``.
      step: ``(key, state, action) -> (state, timestep)``; resets itself at the end of an episode,
        in the same step or in the next one (see ``agents/returns.py``).
      render: ``(state) -> [H, W, 3]`` uint8, an image drawn on the host; None if the environment
        can't be drawn.
      observe: ``(observation) -> observation``, turns an observation of the suite's own environment
        into one as agents see it.
      refresh: ``(key, state) -> state``, called before each unroll: prepares what is too expensive
        to compute in each step. None if there is nothing to prepare.
      evaluation: the environment of evaluations, where it is another one, such as a game against
        an opponent; else None.
      simulator: for agents that search in the environment; None if its own step is all there is.
    """

    spec: Spec
    reset: Callable[[Array], tuple[ArrayTree, TimeStep]]
    step: Callable[[Array, ArrayTree, Array], tuple[ArrayTree, TimeStep]]
    render: Callable[[ArrayTree], np.ndarray] | None = None
    observe: Callable[[ArrayTree], ArrayTree] = lambda observation: observation
    refresh: Callable[[Array, ArrayTree], ArrayTree] | None = None
    evaluation: Environment | None = None
    simulator: Simulator | None = None


class HostStep(NamedTuple):
    """What a pool of host environments returns on *arriving*; numpy arrays, ``[B, ...]`` each.

    Attributes:
      timestep: its observation is encoded for the transfer to the device, see ``HostEnvironment``.
        Every step returns new arrays and never writes to them again, so that a device may use them
        without a copy.
      raw_reward: float32, the reward before any clipping. Reported returns are sums of it.
      game_over: bool, whether a whole game ends with this step. A lost life that the agent sees as
        the end of an episode does not end the game.
    """

    timestep: TimeStep
    raw_reward: np.ndarray
    game_over: np.ndarray


class Pool(Protocol):
    """B host environments that are stepped together, with next-step autoreset: the step after an
    episode's end ignores its action and arrives at the first observation of the next episode."""

    def reset(self) -> HostStep:
        """Begins an episode in every environment."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """Takes actions ``[B, ...]``, in the environment's own units."""
        ...

    def close(self) -> None:
        """Releases processes, threads and memory."""
        ...


class RenderablePool(Pool, Protocol):
    """A pool that can draw its first environment."""

    def render(self) -> np.ndarray:
        """An image ``[H, W, 3]`` uint8 of the first environment."""
        ...


class HostEnvironment(NamedTuple):
    """A kind of environment that is stepped on the host, in pools of any size.

    Attributes:
      spec: observation and action spaces, as agents see them.
      make_pool: ``(seeds, threads) -> Pool`` with one environment per seed. ``threads`` is the
        number of threads that step them; pools without threads ignore it.
      transfer_spec: shape and dtype of one observation as it is transferred from host to device.
      decode_observation: ``(transferred [B, ...], previous observation [B, ...]) -> observation
        [B, ...]``, on the device.
      make_renderable: ``(seed) -> RenderablePool`` of one environment; None where it can't be
        drawn.
      observe: turns one observation as the suite's own environment returns it into one as agents
        see it. Unlike ``decode_observation`` it needs no previous observation.
      in_processes: whether each environment has a process of its own, so that a large pool needs
        much memory.
    """

    spec: Spec
    make_pool: Callable[[Sequence[int], int], Pool]
    transfer_spec: ArrayTree
    decode_observation: Callable[[ArrayTree, ArrayTree], ArrayTree]
    make_renderable: Callable[[int], RenderablePool] | None = None
    observe: Callable[[ArrayTree], ArrayTree] = lambda observation: observation
    in_processes: bool = False


class Devices(NamedTuple):
    """How the devices that learn work together; by default there is only one.

    Attributes:
      number: ``() ->`` the number of this device.
      mean: the mean of a tree of arrays over devices.
      max: the maximum of a tree of arrays over devices.
    """

    number: Callable[[], Array | int] = lambda: 0
    mean: Reduce = lambda tree: tree
    max: Reduce = lambda tree: tree


class GradientSteps(NamedTuple):
    """How an update is divided into gradient steps.

    Attributes:
      per_update: gradient steps of an update.
      transitions: transitions that a gradient step learns from, over all devices.
      parts: gradient steps divide evenly over devices if the number of devices divides this one.
      text: the same in words.
    """

    per_update: int
    transitions: int
    parts: int
    text: str


class LossAux(NamedTuple):
    """What a loss returns in addition to its value.

    Attributes:
      metrics: scalars by name; averaged over devices and gradient steps.
      priorities: ``[items]``, the new priorities of the batch's items, or ``()`` for agents without
        them.
      stop: ``[]`` float32; if its mean over devices is positive, this gradient step and the
        remaining ones of the update are skipped. ``()`` for losses that never skip.
    """

    metrics: dict[str, Array]
    priorities: Array | tuple[()] = ()
    stop: Array | tuple[()] = ()


class Act(Protocol):
    """Chooses actions. ``keys`` is ``[B]``, one per environment, so that the experience of an
    environment does not depend on how environments are spread over devices."""

    def __call__(
        self,
        weights: Weights,
        carry: Carry,
        timestep: TimeStep,
        keys: Array,
        *,
        greedy: bool = False,
    ) -> tuple[Carry, Array, ArrayTree]:
        """Returns the new carry, actions ``[B, ...]`` and extras ``[B, ...]``."""
        ...


class Source(NamedTuple):
    """Where the batches of gradient steps come from: minibatches of a rollout, or a replay buffer.

    The functions are called on each device for its own environments. In ``state``, the first axis
    of every array is that of these environments, over which it is sharded.

    Attributes:
      steps: number of gradient steps of an update.
      init: ``(trajectory) -> state`` before the first update, all zeros. Of the trajectory, only
        shapes and dtypes are used.
      add: ``(state, train_state, trajectory, key) -> (source, stats)``, called once per update with
        a new trajectory. ``source`` is the state during the update; ``stats`` are the statistics to
        act with next.
      sample: ``(source, train_state, key, i) -> (batch, ticket, metrics)``, the batch of gradient
        step ``i`` of the update; ``ticket`` says which items it consists of.
      update: ``(source, ticket, priorities) -> source``, with new priorities of the batch's items.
      finish: ``(source) -> (state, metrics)`` after the last gradient step of an update. The
        metrics are the same on all devices.
      ready: ``(source) -> [] bool``, whether there is enough to learn from, the same on all
        devices. Until then, updates have no gradient steps. None if there always is.
      begin: number of updates before the first one with gradient steps.
      capacity: environment steps that the state holds at most, over all devices; 0 if it holds none
        from one update to the next.
    """

    steps: int
    init: Callable[[Trajectory], ArrayTree]
    add: Callable[[ArrayTree, TrainState, Trajectory, Array], tuple[ArrayTree, ArrayTree]]
    sample: Callable[
        [ArrayTree, TrainState, Array, Array], tuple[ArrayTree, ArrayTree, dict[str, Array]]
    ]
    update: Callable[[ArrayTree, ArrayTree, Array | tuple[()]], ArrayTree]
    finish: Callable[[ArrayTree], tuple[ArrayTree, dict[str, Array]]]
    ready: Callable[[ArrayTree], Array] | None = None
    begin: int = 0
    capacity: int = 0


class Target(NamedTuple):
    """What a loss reads besides the parameters, and what follows them: a target network, or the
    coefficient of a penalty that adapts.

    Attributes:
      init: ``(params) -> target``.
      update: ``(target, params, metrics, step) -> target`` after gradient step number ``step``,
        counted from 1 as if all updates of the run had them. ``metrics`` are those of this step,
        the same on all devices.
    """

    init: Callable[[Params], ArrayTree]
    update: Callable[[ArrayTree, Params, dict[str, Array], Array], ArrayTree]


class Agent(NamedTuple):
    """An algorithm, as a record of pure functions.

    Attributes:
      init: ``(key) -> Weights``.
      carry: ``(env_ids [B]) -> Carry``, the carry before the first step. Ids are global, so that
        differences between environments (such as exploration) do not depend on the devices.
      act: see ``Act``.
      source: where the batches of ``loss`` come from.
      loss: ``(params, train_state, batch, key) -> (scalar, LossAux)``, to be minimised.
      target: None for agents without one.
      labels: ``(params) ->`` a tree of the same structure that names the group of each parameter.
        Each group has an optimizer of its own. None if there is only one group.
      rates: each group of ``labels`` with the factor of its learning rate.
    """

    init: Callable[[Array], Weights]
    carry: Callable[[Array], Carry]
    act: Act
    source: Source
    loss: Callable[[Params, TrainState, ArrayTree, Array], tuple[Array, LossAux]]
    target: Target | None = None
    labels: Callable[[Params], ArrayTree] | None = None
    rates: tuple[tuple[str, float], ...] = ()
