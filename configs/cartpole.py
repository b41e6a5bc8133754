"""CartPole-v1, by PPO or V-trace, in JAX or on the host.

    python -m podracer.anakin --config=configs/cartpole.py
    python -m podracer.anakin --config=configs/cartpole.py --config.agent=vtrace
    python -m podracer.sebulba --config=configs/cartpole.py --config.env=envpool:CartPole-v1

V-trace on the host wants --config.learning_rate=3e-4: with one version of lag and four epochs, 1e-3
learns to 500 and then collapses (seeds 0 and 1). On a host of 4 or 8 devices, split into 1 + 3 and
2 + 6, it wants --config.num_envs=48.

Hardware: 2 CPU cores, under 20 seconds in all by Anakin and 30 by Sebulba. Expected: a final
evaluation of 475 to 500 of 500.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:CartPole-v1"
    config.total_steps = 1_000_000
    # Divides over 1, 2, 4 and 8 learners, for PPO's transitions and V-trace's whole sequences.
    config.num_envs = 32
    config.unroll_length = 128
    config.learning_rate = 1e-3
    return config
