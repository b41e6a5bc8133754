"""Atari Pong from envpool, by MuZero with a search of 8 simulations.

    python -m podracer.sebulba --config=configs/pong_muzero.py

The protocol is that of ``configs/atari.py``. States are vectors, computed by the shallow network,
so that two cores can search and learn; those of the paper are images (``muzero.model.state``).

Result: the final, greedy evaluation over 16 games is 21.0, the most there is, with seed 0.
Hardware: one core of an AMD EPYC (family 25, model 17) beside other programs, 71 minutes.
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
