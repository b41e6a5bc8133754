"""MinAtar Breakout as measured in docs/scaling.md: a config for ``benchmarks/scaling.py``.

    python benchmarks/scaling.py --config=benchmarks/scaling_breakout.py --num_seeds=3

Its learning rate is not tuned; configs/minatar.py learns more.
"""

from typing import Any

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config: Any = default_config()
    config.env = "gymnax:Breakout-MinAtar"
    config.total_steps = 1_048_576
    config.num_envs = 128
    config.unroll_length = 64
    config.learning_rate = 1e-3
    config.num_minibatches = 8
    config.network.activation = "relu"
    config.network.shared = True
    return config
