"""Brax's Ant, with the spring backend, by PPO.

    python -m podracer.anakin --config=configs/brax_ant.py

Result: a final evaluation of 2,306 with seed 0, when the return was still rising. Hardware: one
core of an AMD EPYC, shared with many other programs, 6.4 minutes, of which 4.4 to compile.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "brax:ant"
    config.env_kwargs.backend = "spring"
    config.total_steps = 1_000_000
    config.num_envs = 64
    config.unroll_length = 64
    config.learning_rate = 3e-4
    config.discount = 0.97
    config.entropy_cost = 0.0
    config.num_minibatches = 16
    config.normalize_observations = True
    config.normalize_rewards = True
    config.network.initial_log_std = -0.5
    config.evaluation.episodes = 16
    return config
