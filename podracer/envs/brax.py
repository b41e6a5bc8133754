"""Environments of Brax, and what they share with those of MuJoCo Playground.

An environment of Brax knows no time limit; ``EpisodeWrapper`` adds one, and ``AutoResetWrapper``
begins every episode of an environment with its very first state. This adapter uses neither:
``episode_length`` and ``action_repeat`` are env_params with Brax's defaults, and starts are
computed once in each unroll, which makes Ant 1.3 times as fast (benchmarks/resets.py).

Brax can't be drawn here: it needs OpenGL.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.arguments import check_names, import_suite, parameter_names
from podracer.envs.autoreset import Arrival, Episodes, autoreset
from podracer.envs.spaces import to_box
from podracer.errors import ConfigError, unknown
from podracer.types import Array, ArrayTree, Box, Environment, Spec

# The part of an observation that a policy may see. Another one, "privileged_state", is for value
# functions only: a robot can't measure it.
POLICY = "state"


class Limits(NamedTuple):
    """How an environment of continuing physics is cut into steps and episodes.

    Attributes:
      episode_length: physical steps after which an episode is truncated.
      action_repeat: physical steps for which an action is held.
    """

    episode_length: int = 1000
    action_repeat: int = 1


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with Brax.

    Args:
      name: Brax's name, such as "ant".
      kwargs: keyword arguments of its constructor, such as ``backend``.
      params: fields of ``Limits``.

    Raises:
      ConfigError: Brax is not installed, or no such environment, argument or parameter.
    """
    brax = import_suite("brax.envs", "brax")
    # Brax has no function that lists its environments.
    if name not in brax._envs:
        raise unknown("brax environment", name, brax._envs)
    env_id, cls = f"brax:{name}", brax._envs[name]
    known = parameter_names(cls.__init__, brax.PipelineEnv.__init__)
    check_names(env_id, kwargs, set(known) - {"sys"}, "env_kwargs")
    check_names(env_id, params, Limits._fields)
    try:
        env = brax.get_environment(name, **kwargs)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{env_id} can't be made with env_kwargs={dict(kwargs)}: {error}"
        ) from error
    return adapt(env, env_id, Limits(**params))


def _check(name: str, limits: Limits) -> None:
    for key, value in limits._asdict().items():
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"env_params.{key} of {name} must be a positive number, got {value!r}"
            )


def _observe(observation: ArrayTree) -> ArrayTree:
    """An observation without what only value functions may see."""
    if not isinstance(observation, Mapping):
        return observation
    public = {key: x for key, x in observation.items() if not key.startswith("privileged")}
    return public[POLICY] if public.keys() == {POLICY} else public


def adapt(env: Any, name: str, limits: Limits) -> Environment:
    """Converts an environment with Brax's interface to an ``Environment``.

    The state is the arrays of Brax's own and the number of physical steps of the episode. Actions
    are in [-1, 1]: environments whose actuators have other ranges scale them themselves.

    Args:
      env: an instance of the environment, without wrappers.
      name: id of the environment, for errors.
      limits: its time limit.

    Raises:
      ConfigError: an impossible time limit.
    """
    _check(name, limits)
    ones = np.ones(env.action_size, np.float32)
    box = Box(ones.shape, -ones, ones)

    shapes, structure = jax.tree.flatten(jax.eval_shape(env.reset, jax.random.key(0)))

    # Without contacts, the state of MJX has arrays without elements, which Orbax can't save.
    def pack(state: Any) -> list[Array]:
        return [x for x in jax.tree.leaves(state) if x.size]

    def unpack(arrays: list[Array]) -> Any:
        rest = iter(arrays)
        leaves = (next(rest) if x.size else jnp.zeros(x.shape, x.dtype) for x in shapes)
        return structure.unflatten(leaves)

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        state = env.reset(key)
        return _observe(state.obs), (pack(state), jnp.int32(0))

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[Arrival, ArrayTree]:
        arrays, steps = state
        scaled = to_box(action, box)

        def repeat(carry: Any, _: None) -> tuple[Any, None]:
            before, reward, done = carry
            after = env.step(before, scaled)
            # What follows the end of an episode does not count.
            reward = jnp.where(done, reward, reward + after.reward)
            return (after, reward, done | (after.done != 0)), None

        carry = (unpack(arrays), jnp.float32(0), jnp.bool_(False))
        (after, reward, done), _ = jax.lax.scan(repeat, carry, length=limits.action_repeat)
        steps = steps + limits.action_repeat
        arrival = Arrival(_observe(after.obs), reward, done, steps >= limits.episode_length)
        return arrival, (pack(after), steps)

    observation = jax.eval_shape(reset, jax.random.key(0))[0]
    made = autoreset(Episodes(reset, step), Spec(observation, box), cached=True)
    return made._replace(observe=_observe)
