"""Pendulum-v1, continuous actions, with observations and rewards normalised.

    python -m podracer.anakin --config=configs/pendulum.py

Hardware: 2 CPU cores, about a minute in all. Expected: a final evaluation of about -150.
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
