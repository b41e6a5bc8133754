"""MuJoCo's HalfCheetah-v4 from envpool, by D4PG.

    python -m podracer.sebulba --config=configs/halfcheetah_d4pg.py

Result: final, greedy evaluations of 10,759, 12,061, 11,166, 11,911 and 11,258 with the seeds 0 to
4. Hardware: one core of an AMD EPYC beside other programs, 29 to 39 minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:HalfCheetah-v4"
    config.agent = "d4pg"
    config.total_steps = 1_000_000
    config.num_envs = 16
    config.unroll_length = 4
    config.learning_rate = 5e-4
    config.anneal = False
    config.max_grad_norm = 0.0
    config.network.activation = "elu"
    config.replay.capacity = 1_000_000
    config.replay.begin = 10_000
    config.replay.batch = 128
    config.replay.gradient_steps = 32
    config.d4pg.n_step = 3
    config.d4pg.v_min = -200.0
    config.d4pg.v_max = 1200.0
    config.d4pg.noise = 0.2
    config.evaluation.episodes = 16
    config.evaluation.every = 800
    return config
