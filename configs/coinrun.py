"""CoinRun of Procgen by envpool, easy levels, by PPO with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/coinrun.py

Levels are without number, as Procgen's tests of generalisation have them, not the 200 of its
training. On Python 3.11 envpool needs the system's Qt 5 for Procgen.

Hardware: 2 CPU cores, 40 minutes beside other programs. Expected: with seed 0 it rises from 3.3,
the return of random actions, over 6.3 after half of the steps to 7.9 of 10, where an agent that
sees nothing gets 5 (https://arxiv.org/abs/1912.01588, appendix C); the final evaluation, with
sampled actions, was 8.3. It still rises: to go on, give the same command more total_steps.

That paper's own setting is IMPALA's residual network and 25 M steps, which is for a GPU (2 CPU
cores do 92 steps a second) and was not trained here:

    --config.network.torso=resnet --config.total_steps=25_000_000
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:CoinrunEasy-v0"
    config.total_steps = 4_000_000
    config.num_envs = 48
    config.unroll_length = 256
    config.discount = 0.999
    config.learning_rate = 5e-4
    config.anneal = False
    config.num_epochs = 3
    config.num_minibatches = 8
    config.normalize_rewards = True
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 64
    config.evaluation.greedy = False
    return config
