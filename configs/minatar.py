"""MinAtar's Breakout, or by ``--config.env`` another of its games, by PPO or V-trace with an MLP.

    python -m podracer.anakin --config=configs/minatar.py
    python -m podracer.anakin --config=configs/minatar.py --config.env=gymnax:Asterix-MinAtar
    python -m podracer.anakin --config=configs/minatar.py --config.agent=vtrace

The width of the network matters most: on Asterix, the greedy return after 10 M steps with seed 0 is
12 with two layers of 64 units and a learning rate of 5e-3 (PureJaxRL's settings), 17 with 128 and
2e-3, and 34 with 256 and 2e-3.

Result: see docs/results.md. Hardware: one core of an AMD EPYC beside other programs, 8 to 22
minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Breakout-MinAtar"
    config.total_steps = 10_000_000
    config.num_envs = 64
    config.unroll_length = 128
    config.learning_rate = 2e-3
    config.num_minibatches = 8
    config.network.hidden = (256, 256)
    config.network.activation = "relu"
    return config
