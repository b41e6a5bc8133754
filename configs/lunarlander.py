"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py
    python -m podracer.sebulba --config=configs/lunarlander.py --config.agent=vtrace

Result: a final evaluation above 200, at which the task counts as solved: 260 with PPO (seed 0);
238, 221 and 236 with V-trace (seeds 0, 1 and 2). Hardware: 2 cores of an AMD EPYC, 68 and 80 s.
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
