"""MinAtar Breakout, by PPO with an MLP, at PureJaxRL's settings.

    python -m podracer.anakin --config=configs/breakout_minatar.py

Result: with seed 0 the final, greedy evaluation is 52.8. Hardware: 2 cores of an Intel Xeon shared
with other programs, 131 seconds. benchmarks/README.md has more seeds and other MinAtar games.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Breakout-MinAtar"
    config.total_steps = 2_000_000
    config.num_envs = 64
    config.unroll_length = 128
    config.learning_rate = 5e-3
    config.num_minibatches = 8
    config.network.activation = "relu"
    return config
