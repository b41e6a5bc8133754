"""Environments on the host that go wrong on purpose, or tell what was done to them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import dummy
from podracer.types import Discrete, HostEnvironment, HostStep, Spec, TimeStep

LENGTH = 7


class EchoPool:
    """Rewards name the action taken and the step it was taken at: ``scale`` * step + action.

    Episodes of seven steps, truncated; the observation is [step of the episode, environment].
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


class Broken:
    """A counting pool that goes wrong at its ``at``-th step, and forgets it when it is rebuilt."""

    def __init__(self, pool: Any, at: int, how: str):
        self._pool, self._at, self._how, self._steps = pool, at, how, 0

    def reset(self) -> HostStep:
        return self._pool.reset()

    def step(self, action: np.ndarray) -> HostStep:
        self._steps += 1
        step = self._pool.step(action)
        if self._steps != self._at:
            return step
        if self._how == "raise":
            raise OSError(f"the simulator has crashed at {time.time()}")
        if self._how == "hang":
            time.sleep(3600)
        observation = step.timestep.observation
        if self._how == "nan":
            observation = np.full_like(observation, np.nan)
        elif self._how == "shape":
            observation = observation[:-1]
        return step._replace(timestep=step.timestep.replace(observation=observation))

    def close(self) -> None:
        pass


class Delayed:
    """A pool that takes random time over its steps."""

    def __init__(self, pool: Any, rng: np.random.Generator):
        self._pool, self._rng = pool, rng
        self.reset = pool.reset
        self.close = pool.close

    def step(self, action: np.ndarray) -> HostStep:
        time.sleep(self._rng.uniform(0, 0.002))
        return self._pool.step(action)


def host(make: Callable[[Sequence[int]], Any], actions: int = 2) -> HostEnvironment:
    """An environment of pools that observe two numbers."""
    observation = jax.ShapeDtypeStruct((2,), jnp.float32)
    spec = Spec(observation, Discrete(actions))
    return HostEnvironment(spec, lambda seeds, _: make(seeds), observation, lambda sent, _: sent)


def make(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """A suite of environments: "raise", "nan", "shape" and "hang", each at the 20th step."""
    del kwargs, params, newest_frame
    return host(lambda seeds: Broken(dummy.CountingPool(seeds), 20, name))
