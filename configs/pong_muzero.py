"""Atari Pong from envpool, by MuZero with a small residual model and a search of 8 simulations.

    python -m podracer.sebulba --config=configs/pong_muzero.py

The protocol is that of ``configs/atari.py``. States are 6 x 6 as in the paper, but with 32 channels
instead of 256, and one residual block instead of 16, so that two cores can search and learn.

Result: none yet: it has not been trained to an end, and its settings have not been tuned. While it
learns, it mostly takes 150 to 205 steps/s (over 7,680 steps), and compiles in 95 s, so that a run
takes some 1.5 hours; actors search for 85 % of their time. Hardware: one core of an AMD EPYC
beside other programs.
"""

import ml_collections

from podracer.config import default_config
from podracer.config.atari import PROTOCOL


def get_config() -> ml_collections.ConfigDict:
    config = default_config("muzero")
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {**PROTOCOL, "episodic_life": False}
    config.total_steps = 1_000_000
    config.num_envs = 32
    config.unroll_length = 4
    config.discount = 0.99
    config.learning_rate = 2.5e-4
    config.anneal = False
    config.network.torso = "shallow"
    config.replay.capacity = 102_400
    config.replay.begin = 20_000
    config.replay.batch = 32
    config.replay.gradient_steps = 16
    config.muzero.unroll = 2
    config.muzero.largest_value = 25.0
    config.muzero.model.size = 256
    config.muzero.model.hidden = (256,)
    config.muzero.search.prior_exponent = 0.9
    config.evaluation.episodes = 16
    return config
