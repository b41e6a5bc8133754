"""An update rule (LPG), learned in grid worlds: docs/learned_updates.md.

    python -m podracer.anakin.meta --config=configs/lpg.py

Result: the mean return of agents of all ages is 0.42 to 0.61 in the first five steps of the rule,
with the seeds 0 to 4, and 1.74 to 1.99 in the last fifty. Agents that live by the learned rule
in 64 worlds that it was not learned in end at 2.09, 2.27, 2.21, 2.65 and 2.09.
Hardware: one core of an AMD EPYC, beside another run; a minute.
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
