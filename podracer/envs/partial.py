"""Environments of which agents see only a part, so that they have to remember."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree, Environment, HostEnvironment, TimeStep

EnvT = TypeVar("EnvT", Environment, HostEnvironment)


def observe_components(env: EnvT, observed: Sequence[int], name: str) -> EnvT:
    """The same environment, of whose observations agents see only some components.

    Args:
      env: an environment whose observations have one axis.
      observed: the components to see; () sees all, whatever the observations are.
      name: name of the environment, for errors.

    Raises:
      ConfigError: the observations have no such components.
    """
    if not observed:
        return env
    spec = env.spec.observation
    size = spec.shape[0] if isinstance(spec, jax.ShapeDtypeStruct) and len(spec.shape) == 1 else 0
    if not all(0 <= i < size for i in observed):
        raise ConfigError(
            f"observed={tuple(observed)} must be components of {name}'s observations, from 0 to "
            f"{size - 1}"
            if size
            else f"observed={tuple(observed)} needs observations with one axis, which {name} does "
            "not have; set it to ()"
        )
    index = np.asarray(observed)

    def see(observation: ArrayTree) -> Array:
        return observation[..., index]

    changed = env._replace(
        spec=env.spec._replace(observation=jax.ShapeDtypeStruct((len(index),), spec.dtype)),
        observe=lambda observation: see(env.observe(observation)),
    )
    if isinstance(env, HostEnvironment):
        # An observation with one axis is never built from the previous one.
        return changed._replace(
            decode_observation=lambda new, previous: see(env.decode_observation(new, previous))
        )

    def hide(result: tuple[ArrayTree, TimeStep]) -> tuple[ArrayTree, TimeStep]:
        state, timestep = result
        return state, timestep.replace(observation=see(timestep.observation))

    return changed._replace(
        reset=lambda key: hide(env.reset(key)),
        step=lambda key, state, action: hide(env.step(key, state, action)),
    )
