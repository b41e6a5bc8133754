"""A config with the PPO settings, network and Atari protocol of Cleanba.

    python -m podracer.sebulba --config=benchmarks/cleanba.py

It is for comparing the speed with Cleanba's (see README.md), with the game and the numbers of
environments and threads of that comparison. https://github.com/vwxyzjn/cleanba
"""

from typing import Any

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config: Any = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "episodic_life": False,
        "reward_clip": True,
        "noop_max": 1,
        "max_episode_steps": 27_000,
    }
    config.agent = "ppo"
    config.total_steps = 3 * 8 * 128
    config.num_envs = 8
    config.unroll_length = 128
    config.updates_per_call = 1
    config.num_epochs = 4
    config.num_minibatches = 4
    config.ppo.clip = 0.1
    config.ppo.value_clip = 0.0
    config.ppo.advantage_normalization = "minibatch"
    config.network.torso = "resnet"
    config.network.shared = True
    config.sebulba.threads = 1
    # Only training is timed: evaluating whole games would take minutes.
    config.evaluation.episodes = 1
    config.evaluation.max_steps = 1
    return config
