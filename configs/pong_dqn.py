"""Atari Pong from envpool, by DQN with the shallow network and prioritised replay.

    python -m podracer.sebulba --config=configs/pong_dqn.py

The protocol is that of ``configs/atari.py``.

Result: final, greedy evaluations over 16 games of 18.8 ± 1.4, 19.6 ± 0.5 and 18.8 ± 1.3 with seeds
0 to 2; 21 is the maximum. Hardware: one core of an AMD EPYC, 36 to 41 minutes each.
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
