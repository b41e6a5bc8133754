"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py

Result: final evaluations of 252 and 257 with PPO (seeds 0 and 1). With ``--config.agent=vtrace``
194, and 237 with ``--config.total_steps=4_000_000`` as well (seed 0); 200 counts as solved.
Hardware: one core of an AMD EPYC, 68 and 72 s with PPO; 201 s with V-trace beside other programs.
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
