"""Atari Pong from envpool, by R2D2 with IMPALA's shallow network and an LSTM.

    python -m podracer.sebulba --config=configs/pong_r2d2.py

The protocol is that of ``configs/atari.py``. Sequences are a quarter as long as in the paper, and
batches a sixteenth as large, so that two cores make enough gradient steps; each step is learned
from twice on average. Gradients of rescaled values are small, hence the small epsilon of Adam; a
run with 1e-5 and a learning rate of 5e-4 was still at -20 after 450,000 steps.

Result: final, greedy evaluations of 20.0, 5.1 and 9.3 over 16 games with the seeds 0, 1 and 2, all
still improving. Hardware: one core of an AMD EPYC beside other programs, 24 to 27 minutes.
"""

import ml_collections

from podracer.config import default_config
from podracer.config.atari import PROTOCOL


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {**PROTOCOL, "episodic_life": False}
    config.agent = "r2d2"
    config.total_steps = 1_000_000
    config.num_envs = 32
    config.unroll_length = 20
    config.discount = 0.99
    config.learning_rate = 3e-4
    config.epsilon = 1e-7
    config.anneal = False
    config.max_grad_norm = 1.0
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.core = "lstm"
    config.network.core_size = 256
    config.replay.capacity = 200_000
    config.replay.begin = 20_000
    config.replay.batch = 4
    config.replay.gradient_steps = 16
    config.replay.priority_exponent = 0.9
    config.replay.importance_exponent = 0.6
    config.r2d2.burn_in = 10
    config.r2d2.trace = 20
    config.r2d2.target_period = 200
    config.evaluation.episodes = 16
    return config
