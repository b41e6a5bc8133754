"""Procgen's CoinRun from envpool, easy levels, by PPO with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/coinrun.py

The number of levels is unlimited, as in Procgen's tests of generalisation; its training uses 200.
On Python 3.11, envpool needs the system's Qt 5 libraries for Procgen.

Result: with seed 0 the training return rises from 3.0 in the first 12 K steps to 5.9 of 10 after
0.4 M steps, and is there at 1.2 M, where the run was stopped; an agent that ignores its
observations gets 5 (https://arxiv.org/abs/1912.01588, appendix C).
Hardware: 2 cores of an AMD EPYC (family 25, model 17), 10 minutes.

The setting of that paper, IMPALA's residual network and 25 M steps, is meant for an accelerator
(the 2 CPU cores make 92 steps/s) and has not been trained to its end:

    --config.network.torso=resnet --config.total_steps=25_000_000
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:CoinrunEasy-v0"
    config.total_steps = 8_000_000
    config.num_envs = 48
    config.unroll_length = 256
    config.discount = 0.999
    config.learning_rate = 5e-4
    config.num_epochs = 3
    config.num_minibatches = 8
    config.normalize_rewards = True
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 500
    config.evaluation.greedy = False
    return config
