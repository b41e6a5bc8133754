"""bsuite's MemoryChain of 100 steps, by R2D2: the last step asks for what the first one showed.

    python -m podracer.anakin --config=configs/memory_chain_r2d2.py

A sequence is as long as two episodes, so that it contains a whole one wherever it begins: no
gradient would reach the cue otherwise. ``network.core_timescale`` lets the core remember that long
from the start; with 0, one of three seeds learned.

Result: a final evaluation of 1.0, the maximum, with each of the seeds 0 to 4; guessing returns 0.
Hardware: one core of an AMD EPYC, 12 to 14 seconds beside other programs.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:MemoryChain-bsuite"
    config.env_params.memory_length = 100
    config.agent = "r2d2"
    config.total_steps = 200_000
    config.num_envs = 16
    config.unroll_length = 101
    config.learning_rate = 1e-3
    config.anneal = False
    config.max_grad_norm = 1.0
    config.network.hidden = ()
    config.network.core = "gru"
    config.network.core_size = 64
    config.network.core_timescale = 150
    config.replay.capacity = 100_000
    config.replay.begin = 5_000
    config.replay.batch = 16
    config.replay.gradient_steps = 8
    config.r2d2.burn_in = 0
    config.r2d2.trace = 202
    config.r2d2.target_period = 50
    config.r2d2.rescale = False
    return config
