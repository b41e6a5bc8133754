"""Google Research Football from envpool, an academy scenario, by V-trace with a small CNN.

    python -m podracer.sebulba --config=configs/football.py

Observations are the "super mini map" images.

Result: with seed 0, 0.2 goals per game at first, 0.94 after 200 K steps, and 0.97 at the end, both
in training and in the final evaluation. Hardware: 2 cores of an AMD EPYC, 23 minutes while other
programs ran.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:gfootball/academy_empty_goal_close-v1"
    config.agent = "vtrace"
    config.vtrace.clip = 0.0
    config.total_steps = 1_000_000
    config.num_envs = 48
    config.unroll_length = 32
    config.discount = 0.993
    config.learning_rate = 6e-4
    config.num_epochs = 1
    config.num_minibatches = 8
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 32
    return config
