"""MuJoCo's HalfCheetah-v4 from envpool, by D4PG.

    python -m podracer.sebulba --config=configs/halfcheetah_d4pg.py

Result: not run to its end yet. Evaluations with seed 0: 2,745 after 102,400 steps, 4,258 after
153,600 and 5,507 after 204,800. Hardware: 2 cores of an AMD EPYC, shared with much other work; a
gradient step takes 8 to 10 ms of a core, so that the 250,000 of a run need about 40 minutes of one.
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
    config.learning_rate = 3e-4
    config.anneal = False
    config.max_grad_norm = 0.0
    config.network.activation = "elu"
    config.replay.capacity = 1_000_000
    config.replay.begin = 10_000
    config.replay.batch = 256
    config.replay.gradient_steps = 16
    config.d4pg.v_min = -200.0
    config.d4pg.v_max = 1000.0
    config.d4pg.noise = 0.2
    config.evaluation.episodes = 16
    config.evaluation.every = 800
    return config
