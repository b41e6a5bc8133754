"""CoinRun of Procgen by envpool, easy levels, by PPO with IMPALA's residual network.

    python -m podracer.sebulba --config=configs/coinrun.py

Levels are without number, as Procgen's tests of generalisation have them, not the 200 of its
training. On Python 3.11 envpool needs the system's Qt 5 for Procgen.

Hardware: a GPU; 2 CPU cores do 92 steps a second, 3 days for all. Expected: near the 10 that is the
most there is, where an agent that sees nothing gets 5 (https://arxiv.org/abs/1912.01588, appendix
C) and random actions 3.3. With this network it has not been trained yet; with

    --config.network.torso=shallow --config.network.activation=relu

2 CPU cores do 2.2 K steps a second, 3 hours for all: 6.2 with seed 0 after 600 K steps, 5 minutes,
and rising, where it was stopped.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:CoinrunEasy-v0"
    config.total_steps = 25_000_000
    config.num_envs = 48
    config.unroll_length = 256
    config.discount = 0.999
    config.learning_rate = 5e-4
    config.anneal = False
    config.num_epochs = 3
    config.num_minibatches = 8
    config.normalize_rewards = True
    config.network.torso = "resnet"
    config.network.shared = True
    config.evaluation.episodes = 64
    config.evaluation.greedy = False
    # An update takes minutes on a CPU.
    config.sebulba.timeout_s = 600.0
    return config
