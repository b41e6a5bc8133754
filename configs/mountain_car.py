"""MountainCar-v0, by PPO: every step costs 1 until the car is at the top, which it first finds by
chance.

    python -m podracer.anakin --config=configs/mountain_car.py

Result: -98.4 on average in the final evaluations of seeds 0 to 4; -110 counts as solved.
Hardware: one core of an AMD EPYC beside other programs, 19 to 23 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:MountainCar-v0"
    config.total_steps = 2_000_000
    config.num_envs = 32
    config.unroll_length = 64
    config.learning_rate = 1e-3
    config.num_epochs = 8
    config.ppo.gae_lambda = 0.98
    config.normalize_observations = True
    config.normalize_rewards = True
    config.evaluation.episodes = 1024
    return config
