"""Environments with known answers: they reveal mistakes that learning curves hide.

``counting`` reveals mix-ups of resets, steps and the batch axis, without any learning (after
the dummy environment of danijar/embodied). The other environments are probes: their values can be
computed by hand, and each adds one thing that an agent must get right (after Andy Jones,
https://andyljones.com/posts/rl-debugging.html). Those that observe dictionaries are in
``envs/bandits.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import bandits
from podracer.envs.bandits import Bandit
from podracer.errors import ConfigError, check_kwargs, unknown
from podracer.types import (
    Array,
    ArrayTree,
    Box,
    Discrete,
    Environment,
    HostEnvironment,
    HostStep,
    Spec,
    TimeStep,
)


def _spec(
    shape: tuple[int, ...], continuous: bool, actions: int = 2, dtype: jnp.dtype = jnp.float32
) -> Spec:
    action = Box((1,), -np.ones(1), np.ones(1)) if continuous else Discrete(actions)
    return Spec(jax.ShapeDtypeStruct(shape, dtype), action)


def _start(observation: Array) -> TimeStep:
    return TimeStep(observation, jnp.float32(0), jnp.float32(1), jnp.bool_(True))


def counting(
    length: int = 5,
    vary: int = 3,
    truncate: bool = False,
    next_step: bool = False,
    continuous: bool = False,
) -> Environment:
    """Counts its steps: the observation is ``[count since the episode began, episode length]``.

    So ``count[t+1] == (count[t] + 1) * ~first[t+1]`` for any unroll of any agent, across unrolls
    too. The reward is the new count; actions have no effect. Each episode is one step longer than
    the previous one, up to ``length + vary`` and then ``length`` again; the first length is random.

    Args:
      length: steps of the shortest episode.
      vary: how many steps longer the longest episode is.
      truncate: episodes are truncated instead of terminated.
      next_step: an episode begins in the step after the previous one's end instead of in the same.
      continuous: the action space is a box [-1, 1] instead of two discrete actions.
    """

    def reset(key: Array) -> tuple[Array, TimeStep]:
        state = jnp.stack([0, length + jax.random.randint(key, (), 0, vary + 1)])
        return state, _start(state.astype(jnp.float32))

    def step(key: Array, state: Array, action: Array) -> tuple[Array, TimeStep]:
        del key, action
        count, end = state[0] + 1, state[1]
        ended = count == end
        first = count > end if next_step else ended
        longer = length + (end - length + 1) % (vary + 1)
        state = jnp.where(first, jnp.stack([0, longer]), jnp.stack([count, end]))
        discount = 0.0 if not truncate else 1.0
        timestep = TimeStep(
            state.astype(jnp.float32),
            jnp.where(count > end, 0, count).astype(jnp.float32),
            jnp.where(ended, discount, 1.0),
            first,
        )
        return state, timestep

    return Environment(_spec((2,), continuous), reset, step)


class CountingPool:
    """``counting(next_step=True)`` on the host, in numpy; seeds determine the first lengths."""

    def __init__(
        self, seeds: Sequence[int], length: int = 5, vary: int = 3, truncate: bool = False
    ):
        self._length, self._vary, self._truncate = length, vary, truncate
        self._end = length + np.asarray(seeds) % (vary + 1)
        self._count = np.zeros_like(self._end)

    def reset(self) -> HostStep:
        self._count[:] = 0
        return self._arrive(np.ones(len(self._end), bool))

    def step(self, action: np.ndarray) -> HostStep:
        del action
        first = self._count == self._end
        longer = self._length + (self._end - self._length + 1) % (self._vary + 1)
        self._end = np.where(first, longer, self._end)
        self._count = np.where(first, 0, self._count + 1)
        return self._arrive(first)

    def _arrive(self, first: np.ndarray) -> HostStep:
        ended = self._count == self._end
        observation = np.stack([self._count, self._end], -1).astype(np.float32)
        reward = self._count.astype(np.float32)
        discount = np.where(ended & (not self._truncate), 0, 1).astype(np.float32)
        return HostStep(TimeStep(observation, reward, discount, first), reward, ended)

    def close(self) -> None:
        pass


def _host_counting(
    length: int = 5, vary: int = 3, truncate: bool = False, continuous: bool = False
) -> HostEnvironment:
    """``counting`` on the host, with the same arguments."""
    spec = _spec((2,), continuous)

    def pool(seeds: Sequence[int], threads: int) -> CountingPool:
        del threads
        return CountingPool(seeds, length, vary, truncate)

    return HostEnvironment(spec, pool, spec.observation, lambda observation, _: observation)


Reward = Callable[[Array, Array], Array]


def _probe(
    observe: Callable[[Array], Array],
    reward: Reward,
    *,
    length: int = 1,
    continuous: bool = False,
) -> Environment:
    """Episodes of ``length`` steps with one reward, at the last step, for the first observation.

    Args:
      observe: ``(key) -> first observation``; all others are zeros.
      reward: ``(first observation, action) -> reward`` of the last step.
      length: steps of an episode.
      continuous: the action space is a box [-1, 1] instead of two discrete actions.
    """

    def reset(key: Array) -> tuple[tuple[Array, Array], TimeStep]:
        observation = observe(key)
        return (observation, jnp.int32(0)), _start(observation)

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[ArrayTree, TimeStep]:
        cue, count = state
        count = count + 1
        ended = count == length
        (new_cue, zero), start = reset(key)
        timestep = TimeStep(
            jnp.where(ended, start.observation, jnp.zeros_like(cue)),
            jnp.where(ended, reward(cue, jnp.squeeze(action)), 0.0).astype(jnp.float32),
            1 - ended.astype(jnp.float32),
            ended,
        )
        return jax.tree.map(
            lambda n, o: jnp.where(ended, n, o), (new_cue, zero), (cue, count)
        ), timestep

    first = jax.eval_shape(observe, jax.random.key(0))
    return Environment(_spec(first.shape, continuous, dtype=first.dtype), reset, step)


def _sign(key: Array) -> Array:
    return jax.random.rademacher(key, (1,), jnp.float32)


def one(continuous: bool = False) -> Environment:
    """One step, reward 1: V = 1. Shows a value loss that does not learn."""
    return _probe(
        lambda key: jnp.zeros(1), lambda cue, action: jnp.float32(1), continuous=continuous
    )


def sign(continuous: bool = False) -> Environment:
    """One step, reward = observation = +-1: V(x) = x. Shows values that ignore observations."""
    return _probe(_sign, lambda cue, action: cue[0], continuous=continuous)


def delayed(continuous: bool = False) -> Environment:
    """Two steps, observation 1 then 0, reward 1 at the end: V(0) = 1, V(1) = gamma."""
    return _probe(
        lambda key: jnp.ones(1), lambda cue, action: jnp.float32(1), length=2, continuous=continuous
    )


def _agree(cue: Array, action: Array, *, continuous: bool) -> Array:
    """The reward: 1 if the action is 1 for cue +1 or 0 for cue -1; continuous: cue / 2 is best."""
    if continuous:
        return 1 - (jnp.clip(action, -1, 1) - 0.5 * cue[0]) ** 2
    return jnp.where(action == (cue[0] > 0), 1.0, -1.0)


def choice(continuous: bool = False) -> Environment:
    """One step, whose best action depends on the observation: best return 1."""
    return _probe(_sign, partial(_agree, continuous=continuous), continuous=continuous)


def memory(length: int = 3, continuous: bool = False) -> Environment:
    """As ``choice``, but the cue is seen in the first step only.

    The best return is 1 with a recurrent network, and without one 0 (continuous actions: 0.75).
    """
    return _probe(
        _sign, partial(_agree, continuous=continuous), length=length, continuous=continuous
    )


def _stripe(key: Array) -> Array:
    """An image ``[8, 8, 1]`` with one bright column."""
    column = jax.random.randint(key, (), 0, 8)
    return jnp.zeros((8, 8, 1), jnp.uint8).at[:, column].set(255)


def stripe(continuous: bool = False) -> Environment:
    """``choice`` from pixels: one step, whose best action is the half of the image with a bright
    column, or, continuous, the place of the column between -1 and 1."""

    def reward(image: Array, action: Array) -> Array:
        place = jnp.argmax(image[0, :, 0]) / 3.5 - 1
        if continuous:
            return 1 - (jnp.clip(action, -1, 1) - place) ** 2
        return jnp.where(action == (place > 0), 1.0, -1.0)

    return _probe(_stripe, reward, continuous=continuous)


BANDITS: dict[str, Callable[..., Bandit]] = {f.__name__: f for f in (bandits.parts, bandits.masked)}
PROBES: dict[str, Callable[..., Environment]] = {
    f.__name__: f for f in (counting, one, sign, delayed, choice, memory, stripe)
}
ENVIRONMENTS: dict[str, Callable[..., Environment | Bandit]] = {**PROBES, **BANDITS}
HOST_ENVIRONMENTS = ("counting", *BANDITS)


def make_host(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """One of ``HOST_ENVIRONMENTS``; ``kwargs`` are its arguments."""
    if name not in HOST_ENVIRONMENTS:
        raise unknown("dummy host environment", name, HOST_ENVIRONMENTS)
    if params or newest_frame:
        raise ConfigError(
            f"dummy:{name} has no env_params and no frames for sebulba.newest_frame; its arguments "
            "are env_kwargs"
        )
    if name in BANDITS:
        check_kwargs(f"dummy:{name}", BANDITS[name], kwargs)
        return bandits.make_host(BANDITS[name](**kwargs))
    check_kwargs(f"dummy:{name}", _host_counting, kwargs)
    return _host_counting(**kwargs)


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """One of ``ENVIRONMENTS``; ``kwargs`` are its arguments, and ``params`` must be empty."""
    if name not in ENVIRONMENTS:
        raise unknown("dummy environment", name, ENVIRONMENTS)
    if params:
        raise ConfigError(
            f"dummy:{name} has no env_params, got {dict(params)}; its arguments are env_kwargs"
        )
    check_kwargs(f"dummy:{name}", ENVIRONMENTS[name], kwargs)
    made = ENVIRONMENTS[name](**kwargs)
    return bandits.make(made) if isinstance(made, Bandit) else made
