"""Atari Pong from envpool, by DQN with the shallow network and prioritised replay.

    python -m podracer.sebulba --config=configs/pong_dqn.py

The protocol is that of ``configs/atari.py``.

Result: final, greedy evaluations of 18.3, 20.4 and 19.8 over 16 games with the seeds 0 to 2, of at
most 21. Hardware: one core of an AMD EPYC beside other programs, 34 to 35 minutes.
"""

import ml_collections

from podracer.config import default_config
from podracer.config.atari import PROTOCOL


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {**PROTOCOL, "episodic_life": False}
    config.agent = "dqn"
    config.total_steps = 1_000_000
    config.num_envs = 32
    config.unroll_length = 4
    config.learning_rate = 2.5e-4
    config.anneal = False
    config.max_grad_norm = 10.0
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.replay.capacity = 200_000
    config.replay.begin = 20_000
    config.replay.batch = 32
    config.replay.gradient_steps = 16
    config.replay.priority_exponent = 0.6
    config.dqn.dueling = True
    config.dqn.target_period = 500
    config.evaluation.episodes = 16
    return config
