"""The interface that gymnax had before version 1.0, and that other suites still have.

There, ``step_env`` returns one flag for the end of an episode, whether it terminates or reaches its
time limit. A terminated episode has no value after its end, while agents bootstrap from a truncated
one, so this module distinguishes them.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from podracer.types import Array, ArrayTree

METHODS = ("step_env", "reset_env", "is_terminal", "default_params")
# The count of steps in an environment's state, and its limit in the parameters.
TIMES = ("time", "timestep")
LIMITS = ("max_steps_in_episode", "max_timesteps")


def is_old(env: Any) -> bool:
    """Whether an environment, or its class, has the old interface and not that of gymnax 1.0."""
    return all(hasattr(env, name) for name in METHODS) and not hasattr(env, "is_truncated")


def _find(record: Any, names: Sequence[str]) -> str | None:
    return next((name for name in names if hasattr(record, name)), None)


def ending(env: Any, state: ArrayTree, done: Array, params: Any) -> tuple[Array, Array]:
    """Whether an episode terminated, and whether it was truncated, on arriving at a state.

    At the time limit, the environment is asked whether the state would end an episode without
    limit as well.

    Args:
      env: an environment with the old interface.
      state: the state, which counts the steps of the episode.
      done: ``[]`` bool, whether the episode ended.
      params: the environment's parameters, which hold the limit.
    """
    done = jnp.asarray(done, bool)
    time, limit = _find(state, TIMES), _find(params, LIMITS)
    if time is None or limit is None:
        return done, jnp.bool_(False)
    endless = params.replace(**{limit: np.iinfo(np.int32).max})
    late = getattr(state, time) >= getattr(params, limit)
    terminated = done & (~late | jnp.asarray(env.is_terminal(state, endless), bool))
    return terminated, done & ~terminated
