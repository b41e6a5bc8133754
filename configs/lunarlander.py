"""LunarLander-v3 of envpool, stepped on the host, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py
    python -m podracer.sebulba --config=configs/lunarlander.py --config.agent=vtrace

Hardware: 2 CPU cores, 70 to 80 seconds. Expected: an evaluation above 200, which is "solved"; PPO
reached 260 with seed 0, V-trace 238, 221 and 236 with seeds 0, 1 and 2.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:LunarLander-v3"
    config.total_steps = 4_000_000
    config.num_envs = 48
    config.unroll_length = 128
    config.discount = 0.999
    config.ppo.gae_lambda = 0.98
    config.learning_rate = 5e-4
    config.normalize_rewards = True
    config.num_minibatches = 8
    return config
