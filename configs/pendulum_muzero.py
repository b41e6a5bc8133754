"""Pendulum by Sampled MuZero: its searches consider 16 actions that are drawn from the policy.

    python -m podracer.anakin --config=configs/pendulum_muzero.py

Result: the final, greedy evaluations with the seeds 0 to 4 are between -142.6 and -160.3.
Hardware: one core of an AMD EPYC (family 25, model 17) beside another training, 81 to 169 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("muzero")
    config.env = "gymnax:Pendulum-v1"
    config.total_steps = 120_000
    config.num_envs = 32
    config.unroll_length = 4
    config.discount = 0.95
    config.learning_rate = 5e-4
    config.value_cost = 1.0
    config.normalize_observations = True
    config.network.hidden = (128,)
    config.replay.capacity = 25_600
    config.replay.priority_exponent = 0.0
    config.replay.batch = 128
    config.replay.gradient_steps = 16
    config.muzero.bootstrap = "target"
    config.muzero.n_step = 5
    config.muzero.largest_value = 400.0
    config.muzero.atoms = 101
    config.muzero.sampled_actions = 16
    config.muzero.search.simulations = 16
    config.muzero.search.least_range = 5.0
    return config
