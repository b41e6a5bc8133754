"""CartPole-v1, by PPO or V-trace, in JAX or on the host.

    python -m podracer.anakin --config=configs/cartpole.py
    python -m podracer.anakin --config=configs/cartpole.py --config.agent=vtrace
    python -m podracer.sebulba --config=configs/cartpole.py --config.env=envpool:CartPole-v1

On a Sebulba host of 4 or 8 devices, which are split into 1 + 3 and 2 + 6, set ``num_envs`` to 48,
because 32 environments cannot be divided among 3 or 6 learners.

Result: a final evaluation of 475 to 500 of 500. Hardware: two cores of an AMD EPYC (Zen 3),
29 seconds in total with Anakin and about 80 with Sebulba; less than half of that on faster ones.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:CartPole-v1"
    config.total_steps = 1_000_000
    # Divisible by 1, 2, 4 and 8 learners times 4 minibatches, as V-trace, which learns from whole
    # unrolls, requires.
    config.num_envs = 32
    config.unroll_length = 128
    config.learning_rate = 1e-3
    return config
