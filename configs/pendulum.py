"""Pendulum-v1, by PPO with continuous actions and normalised observations and rewards.

    python -m podracer.anakin --config=configs/pendulum.py

Result: -141.0 on average in the final evaluations of seeds 0 to 4. (A learning
rate of 1e-3 reaches that on some machines, and -267 on others.) Hardware: one core of an AMD
EPYC beside other programs, 17 to 20 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Pendulum-v1"
    config.total_steps = 2_000_000
    config.num_envs = 64
    config.unroll_length = 64
    config.learning_rate = 5e-4
    config.discount = 0.95
    config.entropy_cost = 0.0
    config.num_epochs = 8
    config.normalize_observations = True
    config.normalize_rewards = True
    return config
