"""Pendulum-v1 in 20,000 steps, by D4PG.

    python -m podracer.anakin --config=configs/pendulum_d4pg.py

Result: a final evaluation of about -150. Hardware: 2 CPU cores, under a minute in total.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Pendulum-v1"
    config.agent = "d4pg"
    config.total_steps = 20_000
    config.num_envs = 4
    config.unroll_length = 1
    config.learning_rate = 2e-3
    config.anneal = False
    config.max_grad_norm = 0.0
    config.network.activation = "elu"
    config.replay.capacity = 20_000
    config.replay.begin = 500
    config.replay.batch = 128
    config.replay.gradient_steps = 2
    config.d4pg.v_min = -1000.0
    config.d4pg.v_max = 0.0
    # At the critic's rate, tanh saturates before the critic is right, and stays so.
    config.d4pg.policy_rate = 0.25
    config.d4pg.policy_hidden = (64, 64)
    config.d4pg.critic_hidden = (64, 64)
    config.evaluation.episodes = 1024
    return config
