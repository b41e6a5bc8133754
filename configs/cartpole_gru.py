"""CartPole-v1 without its velocities, by PPO with a GRU, which has to infer them.

    python -m podracer.anakin --config=configs/cartpole_gru.py

Result: a final evaluation of 500, the maximum, with seeds 0 to 4. Hardware: one core of an
AMD EPYC beside other programs, 99 to 112 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:CartPole-v1"
    config.observed = (0, 2)
    config.total_steps = 1_000_000
    config.num_envs = 32
    config.unroll_length = 128
    config.learning_rate = 1e-3
    config.network.core = "gru"
    return config
