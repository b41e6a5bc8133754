"""Pendulum-v1 from gray images of 32 x 32 pixels, by D4PG.

    pip install -e '.[sebulba,render]'
    python -m podracer.sebulba --config=configs/pendulum_pixels_d4pg.py

Result: final, greedy evaluations of -161 to -252 over 16 episodes with the seeds 0 to 4, -198 on
average; from the three numbers of the state, D4PG reaches -148 (configs/pendulum_d4pg.py).
Hardware: one core of an AMD EPYC beside another training, 3 minutes (seed 0: two cores, 5 minutes).
Gymnasium needs 5 ms to draw one image.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnasium:Pendulum-v1"
    config.env_params = {"pixels": 32, "frames": 3}
    config.agent = "d4pg"
    config.total_steps = 24_000
    config.num_envs = 8
    config.unroll_length = 4
    config.learning_rate = 1e-3
    config.anneal = False
    config.max_grad_norm = 0.0
    config.network.torso = "shallow"
    config.network.activation = "elu"
    config.replay.capacity = 24_000
    config.replay.begin = 1_000
    config.replay.batch = 128
    config.replay.gradient_steps = 16
    config.d4pg.v_min = -1000.0
    config.d4pg.v_max = 0.0
    config.d4pg.target_period = 50
    config.d4pg.policy_rate = 0.25
    config.d4pg.policy_hidden = (64, 64)
    config.d4pg.critic_hidden = (64, 64)
    config.evaluation.episodes = 16
    return config
