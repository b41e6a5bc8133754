"""Atari Pong from envpool, by DQN with the shallow network and prioritised replay.

    python -m podracer.sebulba --config=configs/pong_dqn.py

The protocol is that of ``configs/pong.py``.

Result: greedy evaluations over 16 games after 600,000 steps of 10.3 ± 9.3 with seed 0 and of 19.2 ±
2.0 with seed 1; 21 is the maximum. Seed 0 was then continued to 18.3 ± 3.5 after 750,000, from
which ``total_steps`` was chosen; no run has been made from the start with it yet. Hardware: one
core of an AMD EPYC, 23 to 30 minutes.
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
    config.total_steps = 750_000
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
