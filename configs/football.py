"""Google Research Football from envpool, an academy scenario, by V-trace with a small CNN.

    python -m podracer.sebulba --config=configs/football.py
    python -m podracer.sebulba --config=configs/football.py \
--config.env=envpool:gfootball/11_vs_11_easy_stochastic-v1 --config.total_steps=1_500_000 \
--config.evaluation.episodes=8

Observations are the "super mini map" images: the present positions only, without velocities. The
reward is the difference in goals alone; envpool has no reward for bringing the ball forward
("checkpoints"). Matches of 11 against 11 last 3,000 steps, whatever goals fall, and are
stepped at a quarter of the academy's speed.

Result: with seed 0, 0.3 goals per game up to 23 K steps, 0.6 up to 38 K, 0.75 up to 54 K, and 0.88
up to 77 K, where the run was stopped.
Hardware: one core of an AMD EPYC beside other programs, 8 minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:gfootball/academy_empty_goal_close-v1"
    config.agent = "vtrace"
    config.vtrace.lambda_ = 0.95
    config.vtrace.normalize_advantages = True
    config.total_steps = 1_000_000
    config.num_envs = 48
    config.unroll_length = 32
    config.discount = 0.993
    config.learning_rate = 6e-4
    config.num_epochs = 3
    config.num_minibatches = 8
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 32
    return config
