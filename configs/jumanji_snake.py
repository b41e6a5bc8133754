"""Jumanji's Snake, by PPO. An illegal move is never made, as the observation holds a mask.

    python -m podracer.anakin --config=configs/jumanji_snake.py

Result: a final evaluation of 22.3 fruits with seed 0, over 64 episodes; a full board has 144 cells.
Hardware: one core of an AMD EPYC, shared with many other programs, 6 minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "jumanji:Snake-v1"
    config.total_steps = 3_000_000
    config.num_envs = 64
    config.unroll_length = 64
    config.learning_rate = 1e-3
    config.num_minibatches = 8
    config.network.hidden = (128, 128)
    config.network.activation = "relu"
    config.evaluation.max_steps = 4_000
    config.evaluation.episodes = 64
    return config
