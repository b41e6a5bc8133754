"""Host environments that fail on purpose, or whose rewards show what was done to them."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import dummy
from podracer.types import Discrete, HostEnvironment, HostStep, Spec, TimeStep

# Steps of an ``EchoPool``'s episode.
LENGTH = 7
# Ends all hangs.
RELEASED = threading.Event()


class EchoPool:
    """The reward of a step is ``scale`` times its number in the episode, plus the action.

    Episodes have seven steps and are truncated; the observation is [step of the episode,
    environment].
    """

    def __init__(self, seeds: Sequence[int], scale: float = 10.0):
        self._step = np.zeros(len(seeds))
        self._batch, self._scale = len(seeds), scale

    def _arrive(self, reward: np.ndarray) -> HostStep:
        observation = np.stack([self._step, np.arange(self._batch)], -1).astype(np.float32)
        reward = reward.astype(np.float32)
        ones = np.ones(self._batch, np.float32)
        timestep = TimeStep(observation, reward, ones, self._step == 0)
        return HostStep(timestep, reward, self._step == LENGTH)

    def reset(self) -> HostStep:
        self._step[:] = 0
        return self._arrive(np.zeros(self._batch))

    def step(self, action: np.ndarray) -> HostStep:
        over = self._step == LENGTH
        reward = np.where(over, 0, self._scale * self._step + action)
        self._step = np.where(over, 0, self._step + 1)
        return self._arrive(reward)

    def close(self) -> None:
        pass


class BrokenPool:
    """A pool whose ``at``-th step fails in the given way.

    ``how`` is "raise", "nan" or "shape", or a function to call.
    """

    def __init__(self, pool: Any, at: int, how: str | Callable[[], None]):
        self._pool, self._at, self._how, self._steps = pool, at, how, 0

    def reset(self) -> HostStep:
        return self._pool.reset()

    def step(self, action: np.ndarray) -> HostStep:
        self._steps += 1
        step = self._pool.step(action)
        if self._steps != self._at:
            return step
        if callable(self._how):
            self._how()
        if self._how == "raise":
            raise OSError(f"the simulator has crashed at {time.time()}")
        observation = step.timestep.observation
        if self._how == "nan":
            observation = np.full_like(observation, np.nan)
        elif self._how == "shape":
            observation = observation[:-1]
        return step._replace(timestep=step.timestep.replace(observation=observation))

    def close(self) -> None:
        pass


class DelayedPool:
    """A pool whose steps take random time."""

    def __init__(self, pool: Any, rng: np.random.Generator):
        self._pool, self._rng = pool, rng
        self.reset = pool.reset
        self.close = pool.close

    def step(self, action: np.ndarray) -> HostStep:
        time.sleep(self._rng.uniform(0, 0.002))
        return self._pool.step(action)


def make_environment(make_pool: Callable[[Sequence[int]], Any]) -> HostEnvironment:
    """An environment with two actions that observes two numbers, of pools without threads."""
    observation = jax.ShapeDtypeStruct((2,), jnp.float32)
    spec = Spec(observation, Discrete(2))
    return HostEnvironment(spec, lambda seeds, _: make_pool(seeds), observation, lambda x, _: x)


def broken(at: int, how: str | Callable[[], None]) -> HostEnvironment:
    """An environment whose pools all fail at their ``at``-th step, and work again when rebuilt."""
    return make_environment(lambda seeds: BrokenPool(dummy.CountingPool(seeds), at, how))
