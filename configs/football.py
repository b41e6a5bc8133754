"""Google Research Football by envpool, an academy scenario on "super mini map" images, by V-trace.

    python -m podracer.sebulba --config=configs/football.py

It has not been trained to the end yet.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:gfootball/academy_empty_goal_close-v1"
    config.agent = "vtrace"
    config.total_steps = 5_000_000
    config.num_envs = 64
    config.unroll_length = 32
    config.discount = 0.993
    config.learning_rate = 3e-4
    config.num_epochs = 1
    config.num_minibatches = 2
    config.network.torso = "nature"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 32
    return config
