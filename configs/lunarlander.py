"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py
    python -m podracer.sebulba --config=configs/lunarlander.py --config.agent=vtrace \
--config.num_minibatches=16 --config.total_steps=4_000_000

V-trace learns from whole unrolls, here 48, which 32 does not divide.

Result: see docs/results.md for PPO; 200 counts as solved. V-trace, seed 0: 238, and 203 after 2 M
steps; other settings are in benchmarks/README.md.
Hardware: one core of an AMD EPYC (family 25, model 17); V-trace ran beside another training.
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
    config.num_minibatches = 32
    return config
