"""Gymnasium environments, each in a *process* of its own (as in BatchPPO, arXiv 1709.02878).

They are stepped by Gymnasium's ``AsyncVectorEnv`` with *next-step* autoreset: the step after an
episode's end ignores its action, has reward 0 and arrives at the first observation.
"""

import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from podracer.envs import spaces
from podracer.envs.arguments import import_own
from podracer.errors import ConfigError, unknown
from podracer.types import ACTION_MASK, ArrayTree, HostEnvironment, HostStep, TimeStep

# The axis of an image's channels, as env_params.channels specifies it.
CHANNELS = ("first", "last")
PARAMS = ("channels", "frames", "pixels")

# Makes one environment.
Maker = Callable[[], Any]


class Pixels(NamedTuple):
    """Observations that are drawn, instead of the environment's own.

    Attributes:
      size: height and width.
      frames: how many of the last images are stacked.
    """

    size: int
    frames: int


def _import() -> ModuleType:
    return importlib.import_module("gymnasium")


def _maker(name: str, options: Mapping[str, Any], pixels: Pixels | None) -> Maker:
    """A function that makes the environment, with stacked gray images ``[frames, size, size]`` of
    it as observations if ``pixels`` says so."""
    gymnasium = _import()

    # Nested functions are pickled by value, so that the processes import neither podracer nor JAX.
    def make_one() -> Any:
        if frames == 0:
            return gymnasium.make(name, **options)
        # Without a screen and a sound card, pygame would print warnings.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        env = gymnasium.make(name, **{**options, "render_mode": "rgb_array"})

        def draw(observation: Any) -> np.ndarray:
            del observation
            image = Image.fromarray(env.render()).convert("L")
            return np.asarray(image.resize([size, size], Image.Resampling.BOX))

        # Nothing is drawn before the first reset, unlike with Gymnasium's AddRenderObservation:
        # pygame would be started in threads of the trainer, which read the spaces.
        space = gymnasium.spaces.Box(0, 255, (size, size), np.uint8)
        drawn = gymnasium.wrappers.TransformObservation(env, draw, space)
        return gymnasium.wrappers.FrameStackObservation(drawn, frames)

    size, frames = pixels or (0, 0)
    return make_one


def _in_processes(make: Maker, count: int) -> Any:
    """``count`` environments, each in a process of its own."""
    gymnasium = _import()
    parent = os.getpid()

    def make_one() -> Any:
        # A terminal's Ctrl-C and a batch system's SIGTERM reach all processes; the parent handles
        # them, and saves the run first. (Gymnasium makes one environment in the parent as well, to
        # read its spaces.)
        if os.getpid() != parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Thread(target=end_with_parent, daemon=True).start()
        return make()

    def end_with_parent() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    # Pools that hang are closed in the middle of a step, about which Gymnasium warns.
    warnings.filterwarnings("ignore", ".*Calling `close` while waiting", module="gymnasium")
    # A fork of a process that runs JAX's threads can hang, so processes are forks of a server
    # that has imported what they need.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gymnasium"])
    envs = gymnasium.vector.AsyncVectorEnv(
        [make_one] * count,
        context="forkserver",
        autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
    )
    # If they were not closed, multiprocessing would send them SIGTERM at the end, and wait for ever
    # for one that hangs. This comes before.
    multiprocessing.util.Finalize(envs, _kill, args=(envs.processes,), exitpriority=0)
    return envs


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()


def _in_this_process(make: Maker) -> Any:
    """One environment without a process of its own, to be drawn."""
    gymnasium = _import()
    return gymnasium.vector.SyncVectorEnv(
        [make], autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP
    )


class VectorPool:
    """A Gymnasium vector environment as a ``types.Pool``."""

    def __init__(self, name: str, envs: Any, seeds: Sequence[int]):
        self._name, self._envs = name, envs
        self._seeds = [int(seed) for seed in seeds]
        self._ended = np.zeros(len(seeds), bool)

    def reset(self) -> HostStep:
        # Later resets continue the environments' own random numbers.
        observation, _ = self._envs.reset(seed=self._seeds)
        self._seeds = None
        zeros = np.zeros(self._envs.num_envs, np.float32)
        self._ended = np.ones(self._envs.num_envs, bool)
        return self._arrive(observation, zeros, zeros.astype(bool), zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        observation, reward, terminated, truncated, _ = self._envs.step(action)
        return self._arrive(observation, reward.astype(np.float32), terminated, truncated)

    def _arrive(
        self,
        observation: ArrayTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> HostStep:
        first, self._ended = self._ended, terminated | truncated
        discount = (~terminated).astype(np.float32)
        timestep = TimeStep(spaces.to_transfer_dtype(observation), reward, discount, first)
        return HostStep(timestep, reward, self._ended)

    def render(self) -> np.ndarray:
        """See ``types.RenderablePool``; needs environments with ``render_mode="rgb_array"``."""
        try:
            return np.asarray(self._envs.render()[0])
        except _import().error.Error as error:
            raise ConfigError(f"gymnasium:{self._name} can't be drawn: {error}") from error

    def close(self) -> None:
        # Gymnasium would wait for an answer from a process that hangs or has died.
        _kill(getattr(self._envs, "processes", ()))
        for pipe in getattr(self._envs, "parent_pipes", ()):
            if pipe is not None:
                pipe.close()
        self._envs.close(terminate=True)


def _channels_first(name: str, space: Any, params: Mapping[str, Any]) -> bool:
    """Whether images are ``[C, H, W]``: by env_params.channels, else by Gymnasium's convention.

    Raises:
      ConfigError: env_params.channels is impossible, or is missing although the shape suggests that
        the environment breaks the convention.
    """
    channels, images = params.get("channels"), spaces.images(space)
    if channels is None:
        for image in images:
            if image.shape[0] < image.shape[2]:
                raise ConfigError(
                    f"gymnasium:{name} observes images of shape {image.shape}; if these are "
                    "[channels, height, width], set config.env_params.channels=first, and if they "
                    "are [height, width, channels], set config.env_params.channels=last"
                )
        return False
    if channels not in CHANNELS or not images:
        raise ConfigError(
            f"env_params.channels={channels!r} must be first or last, and is for uint8 images of "
            f"three axes; gymnasium:{name} observes {space}"
        )
    return channels == "first"


def _pixels(name: str, params: Mapping[str, Any]) -> Pixels | None:
    """What env_params.pixels and env_params.frames ask for.

    Raises:
      ConfigError: they are impossible.
    """
    size, frames = params.get("pixels"), params.get("frames")
    if size is None:
        if frames is not None:
            raise ConfigError(
                f"env_params.frames={frames!r} stacks drawn images; set env_params.pixels to their "
                f"size as well, so that gymnasium:{name} is observed as images"
            )
        return None
    frames = 3 if frames is None else frames
    for key, value, least in (("pixels", size, 8), ("frames", frames, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"env_params.{key} must be an integer from {least}, got {value!r}")
    if "channels" in params:
        raise ConfigError(
            "env_params.channels is for an environment's own images; those of env_params.pixels "
            "are gray"
        )
    return Pixels(size, frames)


def _is_of(spec: Any, module: str) -> bool:
    """Whether a module has registered a class of its own as this environment."""
    entry = spec.entry_point
    return module == (entry.partition(":")[0] if isinstance(entry, str) else entry.__module__)


def _check_observation(name: str, space: Any, method: str, observation: Any) -> None:
    utils = _import().vector.utils
    try:
        utils.write_to_shared_memory(space, 0, observation, utils.create_shared_memory(space, 1))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"gymnasium:{name} has the observation_space {space}, but {method} returned an "
            f"observation of the shape {jax.tree.map(np.shape, observation)}"
        ) from error


def _check_count(name: str, method: str, returned: Any, values: str) -> None:
    found = len(returned) if isinstance(returned, tuple | list) else 1
    if found != len(values.split(", ")):
        raise ConfigError(
            f"gymnasium:{name}: {method} returned {found} value{'s' * (found > 1)}; it must return "
            f"{values} (Gymnasium's interface since version 0.26)"
        )


def _legal_action(space: Any, observation: Any) -> Any:
    mask = observation.get(ACTION_MASK) if isinstance(observation, Mapping) else None
    return space.sample() if mask is None else space.sample(mask=np.asarray(mask, np.int8))


def _check(name: str, env: Any) -> None:
    """Resets and steps an environment once, and checks what it returns, so that a run does not fail
    later, in the processes.

    Raises:
      ConfigError: it is not what Gymnasium's interface or the observation space says.
    """
    observed, action = env.observation_space, env.action_space
    wrappers = _import().wrappers
    # Gymnasium's own wrappers would fail first, with errors of their own.
    while isinstance(
        env, wrappers.TimeLimit | wrappers.OrderEnforcing | wrappers.PassiveEnvChecker
    ):
        env = env.env
    returned = env.reset(seed=0)
    _check_count(name, "reset", returned, "observation, info")
    _check_observation(name, observed, "reset", returned[0])
    returned = env.step(_legal_action(action, returned[0]))
    _check_count(name, "step", returned, "observation, reward, terminated, truncated, info")
    _check_observation(name, observed, "step", returned[0])
    kinds = {"reward": "one number", "terminated": "True or False", "truncated": "True or False"}
    for (what, kind), value in zip(kinds.items(), returned[1:4], strict=True):
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"gymnasium:{name}: step returned {what}={value!r}; it must be {kind}"
            )


def _make_one(name: str, kwargs: Mapping[str, Any], pixels: Pixels | None) -> Any:
    """An environment, to read its spaces.

    Raises:
      ConfigError: it can't be made, or can't be drawn if ``pixels`` needs that.
    """
    gymnasium = _import()
    module, colon, _ = name.partition(":")
    if colon:
        import_own(f"gymnasium:{name}", module)
    try:
        one = _maker(name, kwargs, None)()
        if pixels is None:
            return one
        modes = one.metadata.get("render_modes", ())
        if "rgb_array" not in modes:
            raise ConfigError(
                f"env_params.pixels={pixels.size} needs images of gymnasium:{name}, but its render "
                f"modes {list(modes)} lack 'rgb_array'"
            )
        one.close()
        return _maker(name, kwargs, pixels)()
    except (gymnasium.error.NameNotFound, gymnasium.error.VersionNotFound) as error:
        module, colon, own = name.rpartition(":")
        if colon:
            known = [x for x, spec in gymnasium.registry.items() if _is_of(spec, module)]
            if not known:
                raise ConfigError(
                    f"the module {module!r} registers no environment; call gymnasium.register in it"
                ) from error
            raise unknown(f"gymnasium environment of module {module!r}", own, known) from error
        hint = f"; one that your own module registers is gymnasium:MODULE:{name}"
        raise ConfigError(
            f"{unknown('gymnasium environment', name, gymnasium.registry)}{hint}"
        ) from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(
            f"gymnasium:{name} can't be made with env_kwargs={dict(kwargs)}: {error}"
        ) from error


def make(
    name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any], *, newest_frame: bool = False
) -> HostEnvironment:
    """An environment that is registered with Gymnasium.

    Args:
      name: Gymnasium's id, such as "LunarLander-v3"; "module:Id" if a module registers it.
      kwargs: keyword arguments of its constructor.
      params: ``channels``, the axis of the channels in images: "first" or "last". Without it they
        are the last axis, Gymnasium's convention, unless the shape contradicts that. ``pixels``
        observes gray images that the environment draws, instead of its own observations, with this
        height and width; ``frames`` of them (by default 3) are stacked, so that speeds can be seen.
      newest_frame: not supported here.

    Raises:
      ConfigError: no such environment or argument, a package that it needs is not installed, a
        space that agents can't act in or observe, images whose channels could be either axis, or
        ``pixels`` of an environment that can't be drawn.
    """
    if newest_frame:
        raise ConfigError(f"gymnasium:{name} has no stacked frames for sebulba.newest_frame")
    for key in params.keys() - set(PARAMS):
        found = unknown(f"parameter of gymnasium:{name} in env_params", key, PARAMS)
        raise ConfigError(f"{found}; its constructor's arguments are set by env_kwargs")
    pixels = _pixels(name, params)
    one = _make_one(name, kwargs, pixels)
    observation, action = one.observation_space, one.action_space
    modes = one.metadata.get("render_modes", ())

    def pool(seeds: Sequence[int], threads: int) -> VectorPool:
        del threads
        return VectorPool(name, _in_processes(_maker(name, kwargs, pixels), len(seeds)), seeds)

    def drawn(seed: int) -> VectorPool:
        options = {**kwargs, "render_mode": "rgb_array"}
        return VectorPool(name, _in_this_process(_maker(name, options, pixels)), [seed])

    channels_first = pixels is not None or _channels_first(name, observation, params)
    env = spaces.host_environment(
        f"gymnasium:{name}", observation, action, pool, channels_first=channels_first
    )
    env = env._replace(in_processes=True)
    _check(name, one)
    one.close()
    if pixels:
        env = env._replace(spec=env.spec._replace(frames=pixels.frames))
    return env._replace(make_renderable=drawn) if "rgb_array" in modes else env
