"""Acrobot-v1, by PPO.

    python -m podracer.anakin --config=configs/acrobot.py

Result: -74.5 on average in the final evaluations of seeds 0 to 4, over 1,024 episodes each.
Hardware: one core of an AMD EPYC beside other programs, 21 to 26 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Acrobot-v1"
    config.total_steps = 2_000_000
    config.num_envs = 64
    config.unroll_length = 128
    config.learning_rate = 1e-3
    config.entropy_cost = 1e-3
    config.num_epochs = 8
    config.normalize_observations = True
    config.normalize_rewards = True
    config.evaluation.episodes = 1024
    return config
