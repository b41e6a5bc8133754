"""XLand-MiniGrid's empty room of 8 x 8 cells, entered anywhere, by PPO.

    python -m podracer.anakin --config=configs/xminigrid_empty.py

Result: a final evaluation of 0.973 with seed 0, over 128 episodes; the reward is 1, less 0.9 times
the used share of the time limit. Hardware: one core of an AMD EPYC, shared with other programs, 63
seconds, of which 29 to compile.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "xminigrid:MiniGrid-EmptyRandom-8x8"
    config.total_steps = 500_000
    config.num_envs = 32
    config.unroll_length = 128
    config.learning_rate = 1e-3
    return config
