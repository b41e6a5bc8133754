"""Pendulum-v1, by PPO with continuous actions and normalised observations and rewards.

    python -m podracer.anakin --config=configs/pendulum.py

Result: a final evaluation of about -150. Hardware: 2 CPU cores, about a minute in total.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Pendulum-v1"
    config.total_steps = 3_000_000
    config.num_envs = 64
    config.unroll_length = 64
    config.learning_rate = 1e-3
    config.discount = 0.95
    config.entropy_cost = 0.0
    config.num_epochs = 8
    config.normalize_observations = True
    config.normalize_rewards = True
    return config
