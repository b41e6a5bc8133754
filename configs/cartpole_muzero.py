"""CartPole by MuZero, with Gumbel MuZero's search of 8 simulations.

    python -m podracer.anakin --config=configs/cartpole_muzero.py

Returns bootstrap from the target network, because the values that searches found while acting soon
are those of a worse policy.

Result: the final, greedy evaluations with the seeds 0 to 4 are 500 each. Hardware: one core of an
AMD EPYC (family 25, model 17) beside another training, 60 to 78 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("muzero")
    config.total_steps = 100_000
    config.num_envs = 32
    config.unroll_length = 4
    config.discount = 0.98
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
    config.muzero.largest_value = 60.0
    config.muzero.atoms = 61
    config.muzero.search.least_range = 3.0
    return config
