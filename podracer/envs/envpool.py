"""Environments of envpool: Atari, MuJoCo, Procgen, Football, Box2D and more, stepped in C++.

envpool resets in the step after an episode's end (*next-step* autoreset): that step ignores its
action, has reward 0 and arrives at the first observation. So an observation is the first of an
episode iff the previous arrival was an end.

An end is a truncation according to ``elapsed_step`` and, where the environment reports it,
``info["terminated"]``. The pool's own truncation flag is not enough, because it misses some
truncations, but only it covers limits that are set by an option of the environment. Where a lost
life ends an episode (``episodic_life``), the agent sees an end with discount 0, and the game's
score continues until the game is over.
"""

import contextlib
import importlib
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import spaces
from podracer.errors import ConfigError, missing_extra, unknown
from podracer.types import Array, ArrayTree, HostEnvironment, HostStep, TimeStep

# Options of envpool that podracer sets, and the config keys that determine them.
OWN_OPTIONS = {
    "num_envs": "num_envs",
    "batch_size": "num_envs",
    "num_threads": "sebulba.pool_threads",
    "seed": "seed",
    "env_seed": "seed",
    "max_num_players": "",
    "base_path": "",
}


def _import() -> ModuleType:
    # Gymnasium warns that it casts envpool's float64 bounds, which a user can't change.
    warnings.filterwarnings("ignore", ".*precision lowered by casting", module="gymnasium")
    try:
        return importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        raise missing_extra("sebulba", "an environment 'envpool:...'") from error


@contextlib.contextmanager
def _signals_left_to_the_run() -> Iterator[None]:
    """Processes and threads that are started in this context never receive SIGINT and SIGTERM.

    Each ViZDoom environment is a process. Ctrl-C reaches a terminal's whole group of processes, and
    envpool aborts when one of them has ended. They handle these signals themselves, so it doesn't
    help to ignore them; but they inherit which ones are blocked.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class EnvPool:
    """A synchronous pool, see ``types.Pool``.

    Attributes:
      newest: whether only the newest of the stacked frames is transferred to the device.
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
        module = _import()
        with _signals_left_to_the_run():
            self._pool = module.make(
                name,
                env_type="gymnasium",
                num_envs=len(seeds),
                num_threads=threads,
                # A seed for each environment: from a single seed, envpool would count up.
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
        observation: ArrayTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        info: dict[str, Any],
    ) -> HostStep:
        ended = terminated | truncated
        first, self._ended = self._ended, ended
        limit = ended & (info["elapsed_step"] >= self._max_steps)
        # At the step limit, an end is a termination only if the environment says so itself: in
        # info, or by setting both flags.
        terminated = np.asarray(info.get("terminated", terminated & (truncated | ~limit)), bool)
        truncated = (limit | truncated) & ~terminated
        transfer: Any = spaces.to_transfer_dtype(observation)
        if self.newest:
            # A game begins with a stack of one repeated frame. (A lost life begins an episode too,
            # but its stack still holds the frames before it.)
            fresh = first.copy()
            fresh[first] = (transfer[first] == transfer[first, -1:]).all((1, 2, 3))
            transfer = {"frame": np.ascontiguousarray(transfer[:, -1]), "fresh": fresh}
        discount = (~ended | truncated).astype(np.float32)
        reward = reward.astype(np.float32, copy=False)
        raw_reward = np.asarray(info.get("reward", reward), np.float32)
        return HostStep(
            TimeStep(transfer, reward, discount, first), raw_reward, terminated | truncated
        )

    def render(self) -> np.ndarray:
        """See ``types.RenderablePool``; needs the option ``render_mode="rgb_array"``."""
        try:
            return self._pool.render()[0]
        except RuntimeError as error:
            raise ConfigError(f"envpool:{self._name} can't be drawn: {error}") from error

    def close(self) -> None:
        self._pool.close()


def _stack(transferred: dict[str, Array], previous: Array) -> Array:
    """The newest frames ``[B, H, W]`` appended to the previous stacks ``[B, H, W, frames]``."""
    frame = transferred["frame"][..., None]
    shifted = jnp.concatenate([previous[..., 1:], frame], -1)
    return jnp.where(transferred["fresh"][:, None, None, None], frame, shifted)


def _newest(env: HostEnvironment, name: str, frames: int) -> HostEnvironment:
    """The same environment, but only the newest of ``frames`` stacked frames is transferred."""
    height, width, channels = env.spec.observation.shape
    if channels != frames:
        raise ConfigError(
            f"sebulba.newest_frame needs gray frames, but {name} has {channels} channels for "
            f"{frames} stacked frames: colours"
        )
    transfer_spec = {
        "frame": jax.ShapeDtypeStruct((height, width), jnp.uint8),
        "fresh": jax.ShapeDtypeStruct((), jnp.bool_),
    }
    return env._replace(transfer_spec=transfer_spec, decode_observation=_stack)


def _channels_first(spec: Any) -> bool:
    """Whether an environment's images are ``[C, H, W]``; envpool's specs do not say so directly.

    Procgen has an option for it. Atari, ViZDoom (options img_*) and MuJoCo's pixels (render_*) are
    channels first; Football and CarRacing, which have neither, are channels last.
    """
    if not spaces.images(spec.gymnasium_observation_space):
        return False
    config = spec.config
    scaled = hasattr(config, "img_height") or hasattr(config, "render_height")
    return bool(getattr(config, "channel_first", scaled))


def _check_options(
    name: str, kwargs: Mapping[str, Any], options: set[str], newest_frame: bool
) -> None:
    for key in kwargs:
        if OWN_OPTIONS.get(key):
            raise ConfigError(f"env_kwargs has {key!r}, which is set by {OWN_OPTIONS[key]}")
        if key not in options:
            raise unknown(f"option of envpool:{name} in env_kwargs", key, options)
    if newest_frame and "stack_num" not in options:
        raise ConfigError(
            f"sebulba.newest_frame needs an environment that stacks frames; envpool:{name} has no "
            "option stack_num"
        )


def _check_players(name: str, players: int) -> None:
    # envpool returns an observation for each of them.
    if players > 1:
        raise ConfigError(f"envpool:{name} is a game of {players} players; agents play alone")


def make(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """An environment of envpool. One instance is made here, to find errors immediately.

    Args:
      name: envpool's id, such as "Pong-v5".
      kwargs: envpool's options, such as ``episodic_life``.
      params: must be empty; options are in ``kwargs``.
      newest_frame: transfer only the newest of the stacked frames, and stack them on the device.

    Raises:
      ConfigError: no such environment or option, a space that agents can't act in or observe,
        several players, or envpool or a library that it needs is not installed.
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
        options = set(envpool.make_spec(name).config._fields) - set(OWN_OPTIONS)
        _check_options(name, kwargs, options, newest_frame)
        spec = envpool.make_spec(name, **kwargs)
        _check_players(name, spec.config.max_num_players)
        pool([0], 1).close()
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        # An option of the wrong type, or a missing system library.
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"envpool:{name} can't be made with env_kwargs={dict(kwargs)}: {reason}"
        ) from error
    env = spaces.host_environment(
        f"envpool:{name}",
        spec.gymnasium_observation_space,
        spec.gymnasium_action_space,
        pool,
        channels_first=_channels_first(spec),
    )
    # Of coloured frames, the last axis holds several channels each.
    frames = getattr(spec.config, "stack_num", 1)
    if getattr(env.spec.observation, "shape", ())[-1:] != (frames,):
        frames = 1
    env = env._replace(make_renderable=drawn, spec=env.spec._replace(frames=frames))
    return _newest(env, f"envpool:{name}", spec.config.stack_num) if newest_frame else env
