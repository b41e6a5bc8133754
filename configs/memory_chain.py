"""bsuite's MemoryChain of 100 steps, by PPO with a GRU: the last step asks what the first showed.

    python -m podracer.anakin --config=configs/memory_chain.py

An unroll is a whole episode: no gradient would reach the cue otherwise. ``network.core_timescale``
lets the core remember that long from the start.

Result: a final evaluation of 1.0, the maximum, with each of the seeds 6 to 9, which had no part in
choosing the settings. With ``--config.network.core=none`` it stays near 0, which is the return of
guessing. Hardware: one core of an AMD EPYC, 34 seconds of which 25 are for compilation.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:MemoryChain-bsuite"
    config.env_params.memory_length = 100
    config.total_steps = 100_000
    config.num_envs = 16
    config.unroll_length = 101
    config.learning_rate = 3e-3
    config.network.hidden = ()
    config.network.core = "gru"
    config.network.core_size = 64
    config.network.core_timescale = 150
    config.network.shared = True
    return config
