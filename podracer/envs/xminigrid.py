"""Environments of XLand-MiniGrid, and those of MiniGrid that it contains.

Agents see what the suite's own agents see: the cells in view, and the direction in which the agent
looks. A cell has a kind of tile and a colour, which become one-hot; the suite's networks learn an
embedding of each instead, that is a linear function of the same.

XLand's environments have tasks, which are in data sets. Without one, as by default, XLand's worlds
are empty and have no reward.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.arguments import change_fields, check_names, import_suite
from podracer.envs.autoreset import Arrival, AutoresetState, Episodes, autoreset
from podracer.errors import ConfigError, TransientError, unknown
from podracer.types import Array, ArrayTree, Discrete, Environment, Spec


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """An environment that is registered with XLand-MiniGrid.

    Args:
      name: the suite's id, such as "MiniGrid-Empty-8x8" or "XLand-MiniGrid-R1-9x9".
      kwargs: ``benchmark``, a data set of tasks for XLand, such as "trivial-21k", of which each
        episode draws one.
      params: fields of the environment's parameters, such as ``max_steps`` and ``view_size``.

    Raises:
      ConfigError: XLand-MiniGrid is not installed, or no such environment, argument or parameter.
      TransientError: the data set can't be downloaded at present.
    """
    xminigrid = import_suite("xminigrid", "xminigrid")
    registered = xminigrid.registered_environments()
    if name not in registered:
        raise unknown("xminigrid environment", name, registered)
    env_id = f"xminigrid:{name}"
    env, defaults = xminigrid.make(name)
    known = ("benchmark",) if hasattr(defaults, "ruleset") else ()
    check_names(env_id, kwargs, known, "env_kwargs")
    fixed = {"grid_type", "render_mode", "ruleset"}
    check_names(env_id, params, set(defaults.__dataclass_fields__) - fixed)
    changed = change_fields(env_id, defaults, params)
    if changed.view_size % 2 == 0 or changed.view_size < 3:
        raise ConfigError(
            f"env_params.view_size of {env_id} must be odd and 3 or more, got {changed.view_size}"
        )
    env = import_suite("xminigrid.wrappers", "xminigrid").DirectionObservationWrapper(env)
    return adapt(env, changed, _tasks(xminigrid, env_id, **kwargs))


def _tasks(xminigrid: Any, name: str, benchmark: str | None = None) -> Any:
    """A data set of tasks, or None."""
    if benchmark is None:
        return None
    known = xminigrid.registered_benchmarks()
    if benchmark not in known:
        raise unknown(f"benchmark of {name} in env_kwargs", benchmark, known)
    try:
        return xminigrid.load_benchmark(benchmark)
    except OSError as error:
        raise TransientError(
            f"{name} downloads the data set {benchmark!r} when it is first used, and that failed: "
            f"{error}; the same command may work later"
        ) from error


def adapt(env: Any, params: Any, tasks: Any = None) -> Environment:
    """Converts an environment of XLand-MiniGrid to an ``Environment``.

    Args:
      env: an instance of the environment, which observes its direction.
      params: its parameters.
      tasks: the suite's ``Benchmark`` of which each episode draws a task.
    """
    constants = import_suite("xminigrid.core.constants", "xminigrid")

    def observe(observation: dict[str, Array]) -> ArrayTree:
        tiles, colours = observation["img"][..., 0], observation["img"][..., 1]
        cells = jnp.concatenate(
            [
                jax.nn.one_hot(tiles, constants.NUM_TILES),
                jax.nn.one_hot(colours, constants.NUM_COLORS),
            ],
            -1,
        )
        return {"img": cells, "direction": observation["direction"]}

    def reset(key: Array) -> tuple[ArrayTree, ArrayTree]:
        if tasks is None:
            timestep = env.reset(params, key)
        else:
            task_key, key = jax.random.split(key)
            timestep = env.reset(params.replace(ruleset=tasks.sample_ruleset(task_key)), key)
        return observe(timestep.observation), timestep

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[Arrival, ArrayTree]:
        # The task is a part of the state.
        timestep = env.step(params, state, action)
        last, terminal = timestep.last(), timestep.discount == 0
        arrival = Arrival(
            observe(timestep.observation), timestep.reward, last & terminal, last & ~terminal
        )
        return arrival, timestep

    def render(state: AutoresetState) -> np.ndarray:
        return env.render(params, state.env)

    observation, _ = jax.eval_shape(reset, jax.random.key(0))
    spec = Spec(observation, Discrete(env.num_actions(params)))
    made = autoreset(Episodes(reset, step), spec, cached=True)
    return made._replace(render=render, observe=observe)
