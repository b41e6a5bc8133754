"""Atari Pong from envpool, by R2D2 with IMPALA's shallow network and an LSTM.

    python -m podracer.sebulba --config=configs/pong_r2d2.py

The protocol is that of ``configs/pong.py``. Sequences are half as long as in the paper, and each
step is learned from once on average.

Result: none yet; only its first 40,000 steps have been run. Hardware: 2 cores of an AMD EPYC.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {
        "repeat_action_probability": 0.0,
        "full_action_space": False,
        "episodic_life": False,
        "reward_clip": True,
        "noop_max": 30,
        "use_fire_reset": True,
        "max_episode_steps": 27_000,
    }
    config.agent = "r2d2"
    config.total_steps = 4_000_000
    config.num_envs = 32
    config.unroll_length = 20
    config.discount = 0.997
    config.learning_rate = 3e-4
    config.anneal = False
    config.epsilon = 1e-3
    config.max_grad_norm = 1.0
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.core = "lstm"
    config.network.core_size = 256
    config.replay.capacity = 200_000
    config.replay.begin = 20_000
    config.replay.batch = 16
    config.replay.priority_exponent = 0.9
    config.replay.importance_exponent = 0.6
    config.r2d2.burn_in = 20
    config.r2d2.trace = 40
    config.r2d2.target_period = 500
    config.evaluation.episodes = 16
    return config
