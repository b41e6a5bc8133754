"""The settings that agents share; each agent's own ones are the ``Config`` of its module."""

import dataclasses

from podracer.errors import ConfigError
from podracer.learning import replay
from podracer.learning.replay import ReplayConfig
from podracer.learning.ring import Item
from podracer.learning.rollout import RolloutConfig
from podracer.nets.network import NetworkConfig
from podracer.types import Devices, GradientSteps, Source, Spec


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a config says about every agent.

    Attributes:
      num_envs: number of environments, over all devices.
      num_unrolls: number of unrolls of an update, over all devices: one of each environment, unless
        remote workers step these, each at its own speed.
      unroll_length: steps that each environment takes between two updates (T).
      discount: gamma, in [0, 1].
      entropy_cost: weight of the entropy bonus.
      value_cost: weight of the value loss.
      normalize_observations: whether to standardise observations by their running mean and
        variance, clipped to [-5, 5].
      normalize_rewards: whether to divide rewards by the running standard deviation of discounted
        returns, clipped to [-10, 10].
      network: the network.
      rollout: how agents without a replay buffer divide each unroll into minibatches.
      replay: what the other agents keep, and how they draw from it.
    """

    num_envs: int
    num_unrolls: int
    unroll_length: int
    discount: float
    entropy_cost: float
    value_cost: float
    normalize_observations: bool
    normalize_rewards: bool
    network: NetworkConfig
    rollout: RolloutConfig
    replay: ReplayConfig

    def __post_init__(self):
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"discount must be in [0, 1], got {self.discount}")


def replay_gradient_steps(settings: Settings, transitions: int) -> GradientSteps:
    """How an update is divided if a loss reads ``transitions`` transitions of an item.

    Raises:
      ConfigError: a setting of agents without a replay buffer.
    """
    if settings.rollout.whole_episodes:
        raise ConfigError(
            "whole_episodes=True is for agents that learn from one unroll at a time, not from a "
            "replay buffer"
        )
    return replay.gradient_steps(
        settings.replay,
        settings.num_envs,
        settings.num_unrolls,
        settings.unroll_length,
        transitions,
    )


def make_replay(item: Item, spec: Spec, settings: Settings, devices: Devices) -> Source:
    """The replay buffer that the settings describe.

    Args:
      item: what the agent's items are.
      spec: observation and action spaces.
      settings: the settings of every agent.
      devices: the devices that learn.

    Raises:
      ConfigError: the capacity is too small for an item.
    """
    return replay.make_source(
        item,
        settings.replay,
        devices,
        num_envs=settings.num_envs,
        num_unrolls=settings.num_unrolls,
        unroll_length=settings.unroll_length,
        frames=spec.frames,
    )
