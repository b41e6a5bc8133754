"""MinAtar Breakout by PPO and MinAtar's small convolutional network.

    python -m podracer.anakin --config=configs/breakout_minatar.py

Hardware: 2 CPU cores. See the table in benchmarks/README.md for what it reached in how long.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Breakout-MinAtar"
    config.total_steps = 10_000_000
    config.num_envs = 128
    config.unroll_length = 64
    config.learning_rate = 1e-3
    config.num_minibatches = 8
    config.network.torso = "minatar"
    config.network.activation = "relu"
    config.network.shared = True
    return config
