"""Any Gymnasium environment, each in a *process* of its own (as BatchPPO did, arXiv 1709.02878).

Gymnasium's own asynchronous vector environment, in its autoreset mode *next step*: the step after
an episode's end ignores its action, has reward 0 and arrives at the first observation.
"""

import importlib
import multiprocessing
import os
import signal
import warnings
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


def _in_processes(name: str, options: Mapping[str, Any], count: int) -> Any:
    """``count`` environments, a process each."""
    gymnasium = _import()
    parent = os.getpid()

    # Nested, it is sent to the processes by its code: they need not import podracer, and JAX.
    def make_one() -> Any:
        # Ctrl-C, which a terminal tells all processes, is left to the parent: it saves the run
        # first. (Gymnasium makes one environment there as well, to see its spaces.)
        if os.getpid() != parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return gymnasium.make(name, **options)

    # It tells that a pool is closed in the middle of a step: so are those that hang.
    warnings.filterwarnings("ignore", ".*Calling `close` while waiting", module="gymnasium")
    # A fork of a process that runs JAX's threads can hang, so processes are forks of a server
    # that has imported what they need.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gymnasium"])
    return gymnasium.vector.AsyncVectorEnv(
        [make_one] * count,
        context="forkserver",
        autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
    )


def _in_this_process(name: str, options: Mapping[str, Any]) -> Any:
    """One environment, where its pictures and errors need not travel."""
    gymnasium = _import()
    return gymnasium.vector.SyncVectorEnv(
        [partial(gymnasium.make, name, **options)],
        autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
    )


class VectorPool:
    """A vector of Gymnasium's environments, see ``types.Pool``."""

    def __init__(self, name: str, envs: Any, seeds: Sequence[int]):
        self._name, self._envs = name, envs
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

    def render(self) -> np.ndarray:
        """See ``types.DrawnPool``; it has to be made with ``render_mode="rgb_array"``."""
        try:
            return np.asarray(self._envs.render()[0])
        except _import().error.Error as error:
            raise ConfigError(f"gymnasium:{self._name} can't be drawn: {error}") from error

    def close(self) -> None:
        # By force: a process that hangs or has died must not keep the others, and Gymnasium would
        # wait for what it has to say.
        for process in getattr(self._envs, "processes", ()):
            process.kill()
        for pipe in getattr(self._envs, "parent_pipes", ()):
            if pipe is not None:
                pipe.close()
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
    modes = one.metadata.get("render_modes", ())
    one.close()

    def pool(seeds: Sequence[int], threads: int) -> VectorPool:
        del threads
        return VectorPool(name, _in_processes(name, kwargs, len(seeds)), seeds)

    def drawn(seed: int) -> VectorPool:
        options = {**kwargs, "render_mode": "rgb_array"}
        return VectorPool(name, _in_this_process(name, options), [seed])

    env = spaces.host_environment(f"gymnasium:{name}", observation, action, pool)
    return env._replace(make_drawn=drawn) if "rgb_array" in modes else env
