"""What both architectures are put together from: agent, optimizer, update, and the run's keys.

Whoever draws random numbers folds a key of its own from the run's key, and where they differ from
update to update, the number of the update. So no key has to be carried along, and what a run draws
depends on its seed alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer import mesh as mesh_lib
from podracer.agents import AGENTS
from podracer.config import Config, Sizes
from podracer.learner import Update, make_optimizer, make_schedule, make_update
from podracer.nets import actor_critic
from podracer.types import Agent, Array, Spec, TrainState

# What the run's key is folded with, for each use of its own.
WEIGHTS, ENVIRONMENTS, STAGGER, UPDATES, EVALUATION = range(5)


class Parts(NamedTuple):
    """An agent, and how it learns.

    Attributes:
      agent: who acts and learns.
      optimizer: of its parameters.
      update: ``(train_state, trajectory, key) -> (train_state, metrics)``, see ``learner``.
    """

    agent: Agent
    optimizer: optax.GradientTransformation
    update: Update


def make_agent(config: Config, spec: Spec) -> Agent:
    """Puts network and agent together.

    Raises:
      ConfigError: the network can't take the observations.
    """
    network = actor_critic.make(spec, config.network)
    return AGENTS[config.agent](
        spec, network, config.actor_critic, getattr(config, config.agent), mesh_lib.all_mean
    )


def make(config: Config, spec: Spec, sizes: Sizes) -> Parts:
    """Puts agent, optimizer and learner together.

    Raises:
      ConfigError: the network can't take the observations.
    """
    agent = make_agent(config, spec)
    optimizer = make_optimizer(config.learner)
    update = make_update(
        agent,
        optimizer,
        config.learner,
        schedule=make_schedule(
            config.learner, sizes.num_updates, sizes.steps_per_update // config.num_minibatches
        ),
        all_mean=mesh_lib.all_mean,
        device_index=mesh_lib.device_index,
    )
    return Parts(agent, optimizer, update)


def init_train_state(parts: Parts, key: Array) -> TrainState:
    """The learner's first state, from the run's key."""
    weights = parts.agent.init(jax.random.fold_in(key, WEIGHTS))
    return TrainState(weights, (), parts.optimizer.init(weights.params), jnp.int32(0))


def update_keys(key: Array, step: Array) -> tuple[Array, Array]:
    """The keys of acting and of learning for update number ``step``, from the run's key."""
    act_key, update_key = jax.random.split(
        jax.random.fold_in(jax.random.fold_in(key, UPDATES), step)
    )
    return act_key, update_key


def evaluation_key(key: Array, step: Array) -> Array:
    """The key of the evaluation after update number ``step``, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, EVALUATION), step)
