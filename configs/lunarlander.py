"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py
    python -m podracer.sebulba --config=configs/lunarlander.py --config.agent=vtrace

Result: a final evaluation of 266 with PPO (seed 0, jax 0.10.2; 195 with jax 0.11.2), and of 238,
221 and 236 with V-trace (seeds 0, 1 and 2); 200 counts as solved. Hardware: 2 cores of an AMD EPYC,
68 to 131 s, depending on the machine.
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
