"""MinAtar by MuZero with a search of 8 simulations; ``--config.env`` chooses the game.

    python -m podracer.anakin --config=configs/minatar_muzero.py
    python -m podracer.anakin --config=configs/minatar_muzero.py --config.env=gymnax:Asterix-MinAtar

States are vectors: MinAtar's convolutional network represents the 10 x 10 observations, and the
model itself has dense layers only, which a CPU computes much faster than convolutions.

Result: the final, greedy evaluations of Breakout are 25.3 and 26.5, and those of Asterix
5.7, 5.8 and 8.8 (docs/muzero.md). PPO (``minatar.py``) has means of 26.4 and 2.8 after as many
steps.
Hardware: one core of an AMD EPYC (family 25, model 17) beside other trainings, 6 to 9
minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("muzero")
    config.env = "gymnax:Breakout-MinAtar"
    config.total_steps = 1_000_000
    config.num_envs = 64
    config.unroll_length = 4
    config.discount = 0.99
    config.anneal = False
    config.value_cost = 1.0
    config.network.torso = "minatar"
    config.replay.capacity = 204_800
    config.replay.begin = 10_000
    config.muzero.bootstrap = "target"
    config.muzero.unroll = 2
    config.muzero.n_step = 3
    config.muzero.largest_value = 60.0
    config.muzero.atoms = 61
    config.muzero.model.size = 128
    config.muzero.model.hidden = (128,)
    config.muzero.search.least_range = 0.05
    return config
