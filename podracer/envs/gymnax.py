"""Environments of gymnax 1.0, and those that users write for it or for earlier versions.

gymnax resets in the step in which an episode ends. That hides the final observation, from which a
truncated episode bootstraps. So this adapter calls an environment's own ``step_env``, ``reset_env``
and ``is_truncated``, and ``autoreset.py`` resets it. ``old_gymnax.py`` stands in for
``is_truncated`` where an environment has none.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.error import URLError

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import old_gymnax, spaces
from podracer.envs.arguments import change_fields, import_own
from podracer.envs.autoreset import Arrival, AutoresetState, Episodes, autoreset
from podracer.errors import ConfigError, TransientError, check_kwargs, missing_extra, unknown
from podracer.types import Array, ArrayTree, Box, Environment, Spec

# Only gymnax's drawing needs these, and they take longer to import than everything else together.
PLOTTING = ("matplotlib.pyplot", "seaborn")


def _defer(name: str) -> None:
    """Makes the module of this name load when it is first used, not when it is imported."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def import_gymnax() -> ModuleType:
    """Imports gymnax without the seconds that its plotting libraries take."""
    if "gymnax" not in sys.modules:
        for name in PLOTTING:
            _defer(name)
    return importlib.import_module("gymnax")


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with gymnax.

    Args:
      name: gymnax's id, such as "CartPole-v1".
      kwargs: keyword arguments of its constructor.
      params: values for fields of its parameters; other fields keep their defaults.

    Raises:
      ConfigError: no such environment, argument or parameter, or a space that agents can't act in.
      TransientError: the environment's data can't be downloaded at present.
    """
    gymnax = import_gymnax()
    if name not in gymnax.registered_envs:
        raise unknown("gymnax environment", name, gymnax.registered_envs)
    try:
        env, _ = gymnax.make(name, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"gymnax:{name} does not take env_kwargs={dict(kwargs)}: {error}"
        ) from error
    except URLError as error:
        raise TransientError(
            f"gymnax:{name} downloads its data set when it is made, and that failed: "
            f"{error.reason}; the same command may work later"
        ) from error
    return adapt(env, f"gymnax:{name}", params)


def load(path: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """A user's own environment: a subclass of ``gymnax.environments.environment.Environment``, or a
    class with the interface that gymnax had before version 1.0.

    Args:
      path: import path, as "module:Class".
      kwargs: keyword arguments of its constructor.
      params: values for fields of its parameters; other fields keep their defaults.

    Raises:
      ConfigError: no such module or class, a class that is not a gymnax environment (which
        is not called), arguments or parameters that it does not take, or an environment that
        contradicts itself.
    """
    module_name, _, attribute = path.partition(":")
    module = import_own(path, module_name)
    if not hasattr(module, attribute):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise unknown(f"environment of module {module_name!r}", attribute, classes)
    cls = getattr(module, attribute)
    base = import_gymnax().environments.environment.Environment
    if not (isinstance(cls, type) and (issubclass(cls, base) or old_gymnax.is_old(cls))):
        raise ConfigError(
            f"env={path!r} is not a gymnax environment; it must be a class derived from "
            "gymnax.environments.environment.Environment (gymnax 1.0), or one with "
            f"{', '.join(old_gymnax.METHODS)} (earlier versions)"
        )
    check_kwargs(path, cls, kwargs)
    env = cls(**kwargs)
    changed = change_fields(path, env.default_params, params)
    try:
        _check(env, path, changed)
    except NotImplementedError as error:
        # What gymnax's base class does in place of each method that a class does not define.
        method = traceback.extract_tb(error.__traceback__)[-1].name
        raise ConfigError(f"env={path!r} does not define {method}") from error
    if getattr(cls, "is_truncated", None) is base.is_truncated:
        _check_limit(env, path, changed)
    made = adapt(env, path, params)
    drawing = next((each for each in cls.__mro__ if "render" in vars(each)), None)
    # What a class of gymnax's own returns is a figure, and not an image.
    if drawing is None or drawing.__module__.startswith("gymnax."):
        return made
    return made._replace(render=lambda state: _image(path, env.render(state.env, changed)))


def _image(name: str, drawn: Any) -> np.ndarray:
    image = np.asarray(drawn)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ConfigError(
            f"env={name!r}: render returns {image.dtype}{list(image.shape)}; it must return an "
            "image uint8[height, width, 3]"
        )
    return image


def _shapes(tree: ArrayTree) -> Any:
    return jax.tree.map(np.shape, tree)


def _dtypes(tree: ArrayTree) -> Any:
    return jax.tree.map(lambda x: str(x.dtype), tree)


def _shapes_of_space(space: Any) -> Any:
    if hasattr(space, "spaces"):
        return {key: _shapes_of_space(inner) for key, inner in space.spaces.items()}
    return tuple(getattr(space, "shape", ()))


def _check(env: Any, name: str, params: Any) -> None:
    """Checks that the methods of an environment agree with each other, without running them.

    Raises:
      ConfigError: they don't.
    """
    key = jax.random.key(0)
    observation, state = jax.eval_shape(env.reset_env, key, params)
    space = spaces.action_space(env.action_space(params), name)
    number, shape = (jnp.float32, space.shape) if isinstance(space, Box) else (jnp.int32, ())
    action = jax.ShapeDtypeStruct(shape, number)
    after = jax.eval_shape(env.step_env, key, state, action, params)
    if len(after) != 5:
        raise ConfigError(
            f"env={name!r}: step_env returns {len(after)} values; they must be observation, state, "
            "reward, end and a dictionary"
        )
    declared, found = _shapes_of_space(env.observation_space(params)), _shapes(observation)
    if isinstance(observation, jax.ShapeDtypeStruct | dict) and declared != found:
        raise ConfigError(
            f"env={name!r} has an observation_space of shape {declared}, but reset_env observes "
            f"{found}"
        )
    for what, first, later in (("observation", observation, after[0]), ("state", state, after[1])):
        for quality, of in (("shape", _shapes), ("dtype", _dtypes)):
            if of(first) != of(later):
                raise ConfigError(
                    f"env={name!r}: the {what} of reset_env has the {quality} {of(first)}, that of "
                    f"step_env {of(later)}"
                )
    for what, scalar in (("reward", after[2]), ("end of the episode", after[3])):
        if np.shape(scalar):
            raise ConfigError(
                f"env={name!r}: the {what} of step_env has the shape {np.shape(scalar)}; it must "
                "be a single number, of shape ()"
            )
    _check_truncation(env, name, state, params)


def _check_truncation(env: Any, name: str, state: ArrayTree, params: Any) -> None:
    if old_gymnax.is_old(env):
        return
    truncated = jax.eval_shape(env.is_truncated, state, params)
    if truncated.shape or truncated.dtype != bool:
        raise ConfigError(
            f"env={name!r}: is_truncated returns {truncated.dtype}{list(truncated.shape)}; it must "
            "return a single bool, such as jnp.bool_(False)"
        )


def _check_limit(env: Any, name: str, params: Any) -> None:
    """Checks that episodes of an environment that inherits gymnax' limit have more than one step.

    Raises:
      ConfigError: they don't.
    """
    if params.max_steps_in_episode == env.default_params.max_steps_in_episode == 1:
        raise ConfigError(
            f"env={name!r} inherits is_truncated of gymnax, which ends each episode after "
            "max_steps_in_episode=1 step; define is_truncated, or max_steps_in_episode in its "
            "parameters"
        )


def _make_render(env: Any, name: str, params: Any) -> Callable[[AutoresetState], np.ndarray]:
    """``(state) -> image`` with gymnax's own drawing code, which is imported when it is first used.

    The function raises ``ConfigError`` if gymnax can't draw the environment, or if a package that
    it needs is not installed.
    """

    def render(state: AutoresetState) -> np.ndarray:
        # Classic control is drawn by pygame, which would otherwise open a screen and a sound card.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        vis_gym = importlib.import_module("gymnax.visualize.vis_gym")
        if env.name not in vis_gym.SUPPORTED_GYM_ENVS:
            return _plot(env, name, params, state.env)
        try:
            return vis_gym.render_gym_frame(env.name, state.env, params)
        except importlib.import_module("gymnasium").error.DependencyNotInstalled as error:
            raise missing_extra("render", f"drawing {name}") from error

    return render


def _plot(env: Any, name: str, params: Any, state: ArrayTree) -> np.ndarray:
    """An image of a state as gymnax plots it, without title and margins."""
    visualizer = importlib.import_module("gymnax.visualize").Visualizer(env, params, [state])
    importlib.import_module("matplotlib.pyplot").close(visualizer.fig)
    visualizer.init()
    # gymnax silently plots nothing if it does not know the environment.
    if not hasattr(visualizer, "im"):
        raise ConfigError(f"{name} can't be drawn: gymnax has no drawing of it")
    visualizer.fig.set_size_inches(4, 4)
    visualizer.ax.set_position((0, 0, 1, 1))
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    canvas = agg.FigureCanvasAgg(visualizer.fig)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _one_hot(space: Any, observation: ArrayTree) -> ArrayTree:
    """Integers in [0, n) become one-hot: they are not quantities."""
    if isinstance(observation, dict):
        inner = getattr(space, "spaces", {})
        return {key: _one_hot(inner.get(key), x) for key, x in observation.items()}
    classes = getattr(space, "n", None)
    return observation if classes is None else jax.nn.one_hot(observation, classes)


def _ending(env: Any, state: ArrayTree, done: Array, params: Any) -> tuple[Array, Array]:
    """Whether an episode terminated and whether it was truncated; ``step_env`` gave ``done``."""
    if old_gymnax.is_old(env):
        return old_gymnax.ending(env, state, done, params)
    return done, env.is_truncated(state, params)


def adapt(env: Any, name: str, changes: Mapping[str, Any], *, cached: bool = False) -> Environment:
    """Converts a gymnax environment to an ``Environment``.

    Args:
      env: an instance of the environment, of gymnax 1.0 or with the earlier interface.
      name: name of the environment, for errors.
      changes: values for fields of its parameters; other fields keep their defaults.
      cached: see ``autoreset``.

    Raises:
      ConfigError: no such parameter, or a space that agents can't act in or observe.
    """
    params = change_fields(name, env.default_params, changes)
    action = spaces.action_space(env.action_space(params), name)
    space = env.observation_space(params)

    def observe(observation: ArrayTree) -> ArrayTree:
        return _one_hot(space, observation)

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        observation, state = env.reset_env(key, params)
        return observe(observation), state

    def step(key: Array, state: ArrayTree, action_: Array) -> tuple[Arrival, ArrayTree]:
        observation, new, reward, done, _ = env.step_env(
            key, state, spaces.to_environment(action_, action), params
        )
        return Arrival(observe(observation), reward, *_ending(env, new, done, params)), new

    observation, _ = jax.eval_shape(reset, jax.random.key(0))
    if not isinstance(observation, jax.ShapeDtypeStruct | dict):
        raise ConfigError(
            f"{name} observes a {type(observation).__name__}; agents observe an array or a "
            "dictionary of arrays"
        )
    made = autoreset(Episodes(reset, step), Spec(observation, action), cached=cached)
    return made._replace(render=_make_render(env, name, params), observe=observe)
