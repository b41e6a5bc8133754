"""Environments of Jumanji.

Its observations are records, which become dictionaries by the names of their fields. The numbers
are prepared as in the networks of Jumanji's own agents: a whole number with bounds is scaled to
[0, 1], such as the number of steps and its limit; one that names an action, such as the city that
was visited last, becomes one-hot; all others become float32. The mask of legal actions remains.

What an episode's end means is what Jumanji says: a discount of 0 is a termination. Nearly all of
its environments terminate at their time limit, which they show in their observations.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.arguments import check_names, import_suite, parameter_names
from podracer.envs.autoreset import Arrival, AutoresetState, Episodes, autoreset
from podracer.envs.spaces import to_environment
from podracer.errors import ConfigError, TransientError, unknown
from podracer.types import ACTION_MASK, Array, ArrayTree, Box, Discrete, Environment, Spec


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with Jumanji.

    Args:
      name: Jumanji's id, such as "Snake-v1".
      kwargs: keyword arguments of its constructor.
      params: must be empty.

    Raises:
      ConfigError: Jumanji is not installed, no such environment or argument, or actions that agents
        can't take.
      TransientError: the environment's data can't be downloaded at present.
    """
    jumanji = import_suite("jumanji", "jumanji")
    registered = jumanji.registered_environments()
    if name not in registered:
        raise unknown("jumanji environment", name, registered)
    env_id = f"jumanji:{name}"
    check_names(env_id, params, ())
    try:
        env = jumanji.make(name)
        check_names(env_id, kwargs, parameter_names(type(env).__init__), "env_kwargs")
        env = jumanji.make(name, **kwargs) if kwargs else env
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{env_id} can't be made with env_kwargs={dict(kwargs)}: {error}"
        ) from error
    except OSError as error:
        raise TransientError(
            f"{env_id} downloads its data set when it is made, and that failed: {error}; the same "
            "command may work later"
        ) from error
    return adapt(env, env_id)


def _action_space(spec: Any, name: str) -> Discrete | Box:
    """Jumanji's action space; the number of values of a ``MultiDiscreteArray`` is an array."""
    count = getattr(spec, "num_values", None)
    if count is not None and np.ndim(count) == 0:
        return Discrete(int(count))
    if count is None and hasattr(spec, "minimum") and np.issubdtype(spec.dtype, np.floating):
        low, high = (
            np.broadcast_to(np.asarray(x, np.float32), spec.shape)
            for x in (spec.minimum, spec.maximum)
        )
        return Box(tuple(spec.shape), low, high)
    raise ConfigError(
        f"{name} has actions of shape {spec.shape} in a {type(spec).__name__} of {spec.dtype}; "
        "agents choose one of a number of actions (jumanji's DiscreteArray) or real numbers"
    )


def _encode(spec: Any, x: Array, num_actions: int) -> Array:
    """An array of an observation as agents see it."""
    count = getattr(spec, "num_values", None)
    if count is not None and np.ndim(count) == 0 and count == num_actions:
        return jax.nn.one_hot(x, num_actions)
    if hasattr(spec, "minimum") and np.issubdtype(spec.dtype, np.integer):
        x = (x - spec.minimum) / jnp.maximum(spec.maximum - spec.minimum, 1)
    return jnp.asarray(x, jnp.float32)


def _observe(spec: Any, observation: Any, num_actions: int) -> ArrayTree:
    """A record as a dictionary, and an array as an array."""
    if dataclasses.is_dataclass(observation):
        names = [field.name for field in dataclasses.fields(observation)]
    elif hasattr(observation, "_fields"):
        names = observation._fields
    else:
        return _encode(spec, observation, num_actions)
    return {
        name: _observe(spec[name], getattr(observation, name), num_actions)
        if name != ACTION_MASK
        else getattr(observation, name)
        for name in names
    }


def _make_render(env: Any) -> Callable[[AutoresetState], np.ndarray]:
    """``(state) -> image`` with Jumanji's own drawing code."""

    def render(state: AutoresetState) -> np.ndarray:
        pyplot = importlib.import_module("matplotlib.pyplot")
        # No window, on a computer that has a screen.
        pyplot.switch_backend("agg")
        env.render(state.env)
        canvas = pyplot.gcf().canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    return render


def adapt(env: Any, name: str) -> Environment:
    """Converts one of Jumanji's environments to an ``Environment``.

    Args:
      env: an instance of the environment.
      name: id of the environment, for errors.

    Raises:
      ConfigError: actions that agents can't take, or a reward for each of several agents.
    """
    action_space = _action_space(env.action_spec, name)
    if env.reward_spec.shape:
        raise ConfigError(f"{name} has rewards of shape {env.reward_spec.shape}, not one reward")
    num_actions = action_space.num_actions if isinstance(action_space, Discrete) else 0

    def observe(observation: Any) -> ArrayTree:
        return _observe(env.observation_spec, observation, num_actions)

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        state, timestep = env.reset(key)
        return observe(timestep.observation), state

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[Arrival, ArrayTree]:
        state, timestep = env.step(state, to_environment(action, action_space))
        last, terminal = timestep.last(), timestep.discount == 0
        arrival = Arrival(
            observe(timestep.observation), timestep.reward, last & terminal, last & ~terminal
        )
        return arrival, state

    observation, _ = jax.eval_shape(reset, jax.random.key(0))
    made = autoreset(Episodes(reset, step), Spec(observation, action_space), cached=True)
    return made._replace(render=_make_render(env), observe=observe)
