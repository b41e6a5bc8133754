"""Any Gymnasium environment, each in a *process* of its own (as BatchPPO did, arXiv 1709.02878).

Gymnasium's own asynchronous vector environment, in its autoreset mode *next step*: the step after
an episode's end ignores its action, has reward 0 and arrives at the first observation.
"""

import importlib
import multiprocessing
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from podracer.envs import spaces
from podracer.errors import ConfigError, unknown
from podracer.types import HostEnvironment, HostStep, TimeStep


def _import() -> ModuleType:
    return importlib.import_module("gymnasium")


class Processes:
    """A process an environment, see ``types.Pool``."""

    def __init__(self, name: str, options: Mapping[str, Any], seeds: Sequence[int]):
        gymnasium = _import()
        # A fork of a process that runs JAX's threads can hang, so processes are forks of a server
        # that has imported what they need.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["gymnasium"])
        self._envs = gymnasium.vector.AsyncVectorEnv(
            [partial(gymnasium.make, name, **options)] * len(seeds),
            context="forkserver",
            autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
        )
        self._seeds = [int(seed) for seed in seeds]
        self._ended = np.zeros(len(seeds), bool)

    def reset(self) -> HostStep:
        observation, _ = self._envs.reset(seed=self._seeds)
        zeros = np.zeros(len(self._seeds), np.float32)
        self._ended = np.ones(len(self._seeds), bool)
        return self._arrive(observation, zeros, zeros.astype(bool), zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        observation, reward, terminated, truncated, _ = self._envs.step(action)
        return self._arrive(observation, reward.astype(np.float32), terminated, truncated)

    def _arrive(
        self,
        observation: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> HostStep:
        first, self._ended = self._ended, terminated | truncated
        discount = (~terminated).astype(np.float32)
        timestep = TimeStep(spaces.as_sent(observation), reward, discount, first)
        return HostStep(timestep, reward, self._ended)

    def close(self) -> None:
        # By force: a process that hangs or has died must not keep the others.
        self._envs.close(terminate=True)


def make(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """An environment that Gymnasium registers.

    Args:
      name: Gymnasium's id, as "LunarLander-v3", or "module:Id" where a module registers it.
      kwargs: for its constructor.
      params: none.
      newest_frame: impossible here.

    Raises:
      ConfigError: no such environment or argument, a package it needs is not installed, or a space
        agents can't act in or observe.
    """
    gymnasium = _import()
    if params or newest_frame:
        raise ConfigError(
            f"gymnasium:{name} has neither env_params, got {dict(params)}, nor frames for "
            "sebulba.newest_frame"
        )
    try:
        one = gymnasium.make(name, **kwargs)
    except (gymnasium.error.NameNotFound, gymnasium.error.VersionNotFound) as error:
        raise unknown("gymnasium environment", name, gymnasium.registry) from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(
            f"gymnasium:{name} can't be made with env_kwargs={dict(kwargs)}: {error}"
        ) from error
    observation, action = one.observation_space, one.action_space
    one.close()

    def pool(seeds: Sequence[int], threads: int) -> Processes:
        del threads
        return Processes(name, kwargs, seeds)

    return spaces.host_environment(f"gymnasium:{name}", observation, action, pool)
