"""An update rule (LPG), learned in grid worlds: docs/learned_updates.md.

python -m podracer.anakin.meta --config=configs/lpg.py
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("vtrace")
    config.env = "grid:5x5"
    # 240 steps of the rule, each from 32 agents x 6 unrolls x 16 environments x 20 steps.
    config.total_steps = 240 * 32 * 6 * 16 * 20
    config.updates_per_call = 5
    config.num_envs = 16
    config.unroll_length = 20
    config.num_epochs = 1
    config.num_minibatches = 1
    # A table: one-hot observations, and no hidden layer.
    config.network.hidden = ()
    config.optimizer = "sgd"
    config.learning_rate = 40.0
    config.anneal = False
    config.evaluation.episodes = 64
    return config
