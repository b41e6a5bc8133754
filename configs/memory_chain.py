"""bsuite's MemoryChain, by PPO with a GRU: the last step asks for what the first step showed.

    python -m podracer.anakin --config=configs/memory_chain.py

Result: a final evaluation of 1.0, the maximum. With ``--config.network.core=none`` it stays near 0,
which is the return of guessing. Hardware: 2 CPU cores, under 30 seconds in total.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:MemoryChain-bsuite"
    config.total_steps = 200_000
    config.num_envs = 64
    config.unroll_length = 16
    config.learning_rate = 3e-3
    config.network.core = "gru"
    config.network.core_size = 32
    config.network.shared = True
    return config
