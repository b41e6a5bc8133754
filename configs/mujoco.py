"""MuJoCo's HalfCheetah-v4 from envpool, or by ``--config.env`` another of its robots, by PPO.

    python -m podracer.sebulba --config=configs/mujoco.py
    python -m podracer.sebulba --config=configs/mujoco.py --config.env=envpool:Hopper-v4
    python -m podracer.sebulba --config=configs/mujoco.py --config.env=envpool:Walker2d-v4
    python -m podracer.sebulba --config=configs/mujoco.py --config.env=envpool:Ant-v4

Result: see docs/results.md. Hardware: one core of an AMD EPYC, 6 to 10 minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:HalfCheetah-v4"
    config.total_steps = 2_000_000
    config.num_envs = 48
    config.unroll_length = 64
    config.learning_rate = 3e-4
    config.entropy_cost = 0.0
    config.num_epochs = 10
    config.num_minibatches = 16
    config.normalize_observations = True
    config.normalize_rewards = True
    config.network.initial_log_std = -0.5
    config.evaluation.episodes = 16
    return config
