"""LunarLander-v3 from envpool, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/lunarlander.py

Result: see docs/results.md for PPO; 200 counts as solved. With ``--config.agent=vtrace``, seed 0:
203, and 201 with ``--config.learning_rate=1e-3``. On another processor 196 and 255, and with
``--config.total_steps=4_000_000`` 208, and 241 and 201 at learning rates of 6e-4 and 1e-3.
Hardware: one core of an AMD EPYC (family 25, model 17); V-trace ran beside other programs.
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
