"""What both architectures build a run from: agent, optimizer, update, and the run's random keys.

Every random number comes from a key that is folded from the run's key and, if it changes from
update to update, from the number of the update. The state therefore contains no other key, and a
run's random numbers depend on its seed alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer import envs
from podracer.acting.policy import Policy
from podracer.agents import AGENTS
from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed import mesh as mesh_lib
from podracer.errors import ConfigError
from podracer.learning.learner import Update, make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Devices,
    Environment,
    HostEnvironment,
    Row,
    Spec,
    Target,
    TrainState,
    Weights,
)
from podracer.xla_cpu import prng

# The number that the run's key is folded with, for each use of the key.
WEIGHTS, ENVIRONMENTS, STAGGER, UPDATES, EVALUATION, SELECTION = range(6)

# The devices of the mesh that a program runs on.
DEVICES = Devices(mesh_lib.device_index, mesh_lib.all_mean, mesh_lib.all_max)


class Components(NamedTuple):
    """An agent, and how it learns.

    Attributes:
      agent: the agent.
      optimizer: the optimizer of its parameters.
      update: ``(train_state, source state, trajectory, key) -> (train_state, source state,
        metrics)``; see ``learning.learner``.
    """

    agent: Agent
    optimizer: optax.GradientTransformation
    update: Update


def make_environment(config: Config) -> Environment:
    """The environment, written in JAX, that a config names, as its agent observes it."""
    return envs.make_environment(
        config.env,
        config.env_kwargs,
        config.env_params,
        observed=config.observed,
        model=config.agent_config.in_environment,
    )


def make_agent(config: Config, spec: Spec, devices: Devices = DEVICES) -> Agent:
    """Builds the agent with its network.

    Raises:
      ConfigError: the agent can't act in this environment or with these settings.
    """
    agent = AGENTS[config.agent]
    return agent.make(spec, config.settings, config.agent_config, devices)


def build(config: Config, spec: Spec, sizes: Sizes, devices: Devices = DEVICES) -> Components:
    """Builds agent, optimizer and update.

    Raises:
      ConfigError: the agent can't act in this environment or with these settings, or the run ends
        before learning begins.
    """
    agent = make_agent(config, spec, devices)
    if agent.source.begin >= sizes.num_updates:
        begin = (agent.source.begin + 1) * sizes.steps_per_update
        raise ConfigError(
            f"learning begins after {begin:,} steps (replay.begin={config.replay.begin:,}), but "
            f"the run has {sizes.num_updates * sizes.steps_per_update:,}; raise total_steps, or "
            "lower replay.begin"
        )
    settings = config.optimization
    optimizer = make_optimizer(settings, agent)
    batch = config.gradient_steps.transitions
    schedule = make_schedule(settings, sizes.num_updates, batch, agent.source.begin)
    update = make_update(agent, optimizer, schedule=schedule, devices=devices)
    return Components(agent, optimizer, update)


def make_policy(
    config: Config, env: Environment | HostEnvironment, weights: Weights, last: Row
) -> Policy:
    """The policy that a run has trained; with several agents, the first one's.

    Args:
      config: the run's configuration.
      env: the run's environment, which converts observations and actions.
      weights: the trained weights; with several agents, the first axis is that of the agents.
      last: the last row of metrics.
    """
    agent = make_agent(config.alone(config.members[0].at(last)).of_group, env.spec)
    if len(config.members) > 1:
        weights = jax.tree.map(lambda x: x[0], jax.device_get(weights))
    return Policy(agent, weights, env, greedy=config.evaluation.greedy, seed=config.seed)


def init_train_state(components: Components, key: Array) -> TrainState:
    """The learner's initial state, from the run's key."""
    agent = components.agent
    weights = agent.init(jax.random.fold_in(key, WEIGHTS))
    target = first_target(agent.target, weights)
    return TrainState(weights, target, components.optimizer.init(weights.params), jnp.int32(0))


def first_target(target: Target | None, weights: Weights) -> ArrayTree:
    """The target of an agent's first weights: in memory of its own, because steps donate both."""
    return () if target is None else jax.tree.map(jnp.copy, target.init(weights.params))


def with_weights(
    train: TrainState, weights: Weights, target: Target | None, num_agents: int
) -> TrainState:
    """The state in which a run starts that begins with given weights.

    Args:
      train: the initial state of a run that begins with random weights.
      weights: the weights; with several agents, the first axis is that of the agents.
      target: of the agent.
      num_agents: number of agents.
    """
    first = partial(first_target, target)
    new = jax.vmap(first)(weights) if num_agents > 1 else first(weights)
    placed = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), new, train.target)
    return train.replace(weights=weights, target=placed)


def run_keys(seeds: Sequence[int], platform: str = "") -> Array:
    """The key of each agent of a run, ``[len(seeds)]``; of a single one a scalar key, ``[]``.

    Args:
      seeds: any integers.
      platform: as in ``prng.key``.
    """
    each = [prng.key(seed, platform) for seed in seeds]
    return jnp.stack(each) if len(each) > 1 else each[0]


def update_keys(key: Array, step: Array) -> tuple[Array, Array]:
    """The keys for acting and for learning in update number ``step``, from the run's key."""
    act_key, update_key = jax.random.split(
        jax.random.fold_in(jax.random.fold_in(key, UPDATES), step)
    )
    return act_key, update_key


def selection_key(key: Array, step: Array) -> Array:
    """The key for the selection after update number ``step``, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, SELECTION), step)


def evaluation_key(key: Array, step: Array) -> Array:
    """The key for the evaluation after update number ``step``, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, EVALUATION), step)
