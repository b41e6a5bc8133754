"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py
    python -m podracer.sebulba --config=configs/lunarlander.py --config.agent=vtrace

Result: final evaluations of 265 and 266 with PPO and of 223 and 244 with V-trace (seeds 0 and 1);
200 counts as solved. Hardware: one core of an AMD EPYC beside other programs, 115 to 188 s.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:LunarLander-v3"
    config.total_steps = 2_000_000
    config.num_envs = 48
    config.unroll_length = 128
    config.discount = 0.999
    config.ppo.gae_lambda = 0.98
    config.learning_rate = 3e-4
    config.normalize_rewards = True
    config.num_minibatches = 16
    return config
