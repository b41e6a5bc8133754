"""Items of agents that learn from single transitions of a replay buffer: DQN and D4PG."""

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import normalization, returns
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.learning.ring import Item, Window
from podracer.types import Array, ArrayTree, Devices, TrainState


class Batch(struct.PyTreeNode):
    """What the loss reads; ``[items, ...]`` each, except observations.

    Attributes:
      observation: ``[2, items, ...]``, of the value to learn and of the one to bootstrap from.
      action: the action taken.
      target: the n-step return, which is not valid where a draw found no item.
      importance: the items' weights.
    """

    observation: ArrayTree
    action: Array
    target: returns.NStep
    importance: Array


def make_item(settings: Settings, devices: Devices, n_step: int) -> Item:
    """Items of ``n_step`` transitions, of which the first is learned from.

    Args:
      settings: settings of every agent.
      devices: the devices that learn.
      n_step: transitions between a value and the one it bootstraps from.

    Raises:
      ConfigError: the network has a core.
    """
    if settings.network.recurrent:
        raise ConfigError(
            f"network.core={settings.network.core!r} needs sequences, but this agent learns from "
            "single transitions; use network.core='none', agent='r2d2' for discrete actions, or "
            "agent='ppo'"
        )

    def read(train_state: TrainState, window: Window) -> Batch:
        stats = train_state.weights.stats
        timestep = window.timestep
        timestep = timestep.replace(reward=normalization.normalize_reward(stats, timestep.reward))
        target = returns.n_step(timestep, n_step, settings.discount)
        target = jax.tree.map(lambda x: x[0], target)
        target = target._replace(valid=target.valid * (window.importance > 0))
        observation = window.observe(jnp.stack([jnp.zeros_like(target.steps), target.steps]))
        observation = normalization.normalize_observation(stats, observation)
        return Batch(observation, window.action[0], target, window.importance)

    def valid(window: Window) -> Array:
        return returns.valid(window.timestep)[0]

    update_stats = normalization.make_update_stats(settings, devices.mean)
    return Item(n_step, 1, read, update_stats, valid=valid)
