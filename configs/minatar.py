"""MinAtar Breakout, by PPO with an MLP, at PureJaxRL's settings.

    python -m podracer.anakin --config=configs/minatar.py

Result: final, greedy evaluations of 38.8, 45.5, 82.0 and 29.2 with seeds 0 to 3. Hardware: 2 cores
of an AMD EPYC, 40 seconds, of which 13 to compile. benchmarks/README.md has other MinAtar games.
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
