"""Environments of envpool: Atari, MuJoCo, Procgen, Football, Box2D and more, stepped in C++.

A pool begins an episode in the step after the last one's end (*next step*): that step ignores its
action, has reward 0 and arrives at the first observation. So an observation is the first of an
episode iff the arrival before it was an end. Whether an end was a truncation is told by
``elapsed_step`` and, where there is one, ``terminated``; the pool's own flag has missed some, but
knows of limits that an option of the game sets. Where lost lives end episodes (``episodic_life``),
the agent sees an end with discount 0, while the game's score goes on until the game is over.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import spaces
from podracer.errors import ConfigError, unknown
from podracer.types import Array, HostEnvironment, HostStep, TimeStep

# Options that are ours to give, and what sets them.
OURS = {
    "num_envs": "num_envs",
    "batch_size": "num_envs",
    "num_threads": "sebulba.pool_threads",
    "seed": "seed",
    "env_seed": "seed",
    "max_num_players": "",
    "base_path": "",
}


def _import() -> ModuleType:
    # Gymnasium tells that it casts envpool's float64 bounds: nothing a user can do about.
    warnings.filterwarnings("ignore", ".*precision lowered by casting", module="gymnasium")
    try:
        return importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        raise ConfigError(
            "environments 'envpool:...' need the package envpool, 1 GB with its games; "
            "pip install -e '.[sebulba]'"
        ) from error


class EnvPool:
    """A synchronous pool, see ``types.Pool``.

    Attributes:
      newest: send the newest of stacked frames alone, and stack them on the device.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        seeds: Sequence[int],
        threads: int,
        *,
        newest: bool,
    ):
        self.newest = newest
        self._name = name
        self._pool = _import().make(
            name,
            env_type="gymnasium",
            num_envs=len(seeds),
            num_threads=threads,
            # One for each environment: envpool would count up from a single one.
            env_seed=list(seeds),
            **options,
        )
        self._max_steps = self._pool.spec.config.max_episode_steps or np.inf
        self._ended = np.zeros(len(seeds), bool)

    def reset(self) -> HostStep:
        observation, info = self._pool.reset()
        zeros = np.zeros(len(self._ended), np.float32)
        self._ended = np.ones(len(zeros), bool)
        info = {**info, "reward": zeros}
        no_end = zeros.astype(bool)
        return self._arrive(observation, zeros, no_end, no_end, info)

    def step(self, action: np.ndarray) -> HostStep:
        observation, reward, terminated, truncated, info = self._pool.step(action)
        return self._arrive(observation, reward, terminated, truncated, info)

    def _arrive(
        self,
        observation: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        info: dict[str, Any],
    ) -> HostStep:
        ended = terminated | truncated
        first, self._ended = self._ended, ended
        limit = ended & (info["elapsed_step"] >= self._max_steps)
        # At the limit only games with a word of their own tell a termination: by both flags.
        over = np.asarray(info.get("terminated", terminated & (truncated | ~limit)), bool)
        truncated = (limit | truncated) & ~over
        sent: Any = spaces.as_sent(observation)
        if self.newest:
            # A game begins with one frame, repeated. (A lost life begins an episode as well, but
            # the stack of frames goes on.)
            fresh = first.copy()
            fresh[first] = (sent[first] == sent[first, -1:]).all((1, 2, 3))
            sent = {"frame": np.ascontiguousarray(sent[:, -1]), "fresh": fresh}
        discount = (~ended | truncated).astype(np.float32)
        reward = reward.astype(np.float32, copy=False)
        score = np.asarray(info.get("reward", reward), np.float32)
        return HostStep(TimeStep(sent, reward, discount, first), score, over | truncated)

    def render(self) -> np.ndarray:
        """See ``types.DrawnPool``; the options have to say ``render_mode="rgb_array"``."""
        try:
            return self._pool.render()[0]
        except RuntimeError as error:
            raise ConfigError(f"envpool:{self._name} can't be drawn: {error}") from error

    def close(self) -> None:
        self._pool.close()


def _stack(sent: dict[str, Array], previous: Array) -> Array:
    """The newest frames ``[B, H, W]`` put on the previous stack ``[B, H, W, frames]``."""
    frame = sent["frame"][..., None]
    shifted = jnp.concatenate([previous[..., 1:], frame], -1)
    return jnp.where(sent["fresh"][:, None, None, None], frame, shifted)


def _newest(env: HostEnvironment, name: str, frames: int) -> HostEnvironment:
    """The same environment, sent frame by frame, of which it stacks so many."""
    height, width, channels = env.spec.observation.shape
    if channels != frames:
        raise ConfigError(
            f"sebulba.newest_frame needs single gray frames, but {name} has {channels} channels "
            f"for a stack of {frames}: colours"
        )
    sent = {
        "frame": jax.ShapeDtypeStruct((height, width), jnp.uint8),
        "fresh": jax.ShapeDtypeStruct((), jnp.bool_),
    }
    return env._replace(sent=sent, receive=_stack)


def _check_options(
    name: str, kwargs: Mapping[str, Any], options: set[str], newest_frame: bool
) -> None:
    for key in kwargs:
        if OURS.get(key):
            raise ConfigError(f"env_kwargs has {key!r}, which is set by {OURS[key]}")
        if key not in options:
            raise unknown(f"option of envpool:{name} in env_kwargs", key, options)
    if newest_frame and "stack_num" not in options:
        raise ConfigError(
            f"sebulba.newest_frame is for environments that stack frames; envpool:{name} has no "
            "option stack_num"
        )


def make(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """An environment that envpool has.

    Args:
      name: envpool's id, as "Pong-v5".
      kwargs: envpool's options, as ``episodic_life``.
      params: none; the options are all there is.
      newest_frame: send the newest of stacked frames alone, and stack them on the device.

    Raises:
      ConfigError: no such environment or option, a space agents can't act in or observe, or envpool
        or what it needs is not installed. One environment is made once, to find out.
    """
    envpool = _import()
    known = envpool.list_all_envs()
    if name not in known:
        raise unknown("envpool environment", name, known)
    if params:
        raise ConfigError(f"envpool:{name} has no env_params, got {dict(params)}; use env_kwargs")

    def pool(seeds: Sequence[int], threads: int) -> EnvPool:
        return EnvPool(name, kwargs, seeds, threads, newest=newest_frame)

    def drawn(seed: int) -> EnvPool:
        return EnvPool(name, {**kwargs, "render_mode": "rgb_array"}, [seed], 1, newest=newest_frame)

    try:
        options = set(envpool.make_spec(name).config._fields) - set(OURS)
        _check_options(name, kwargs, options, newest_frame)
        spec = envpool.make_spec(name, **kwargs)
        pool([0], 1).close()
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        # An option of the wrong type, or a library of the system that some games need.
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"envpool:{name} can't be made with env_kwargs={dict(kwargs)}: {reason}"
        ) from error
    env = spaces.host_environment(
        f"envpool:{name}", spec.gymnasium_observation_space, spec.gymnasium_action_space, pool
    )
    env = env._replace(make_drawn=drawn)
    return _newest(env, f"envpool:{name}", spec.config.stack_num) if newest_frame else env
