"""MinAtar by DQN with MinAtar's convolutional network; ``--config.env`` chooses the game.

    python -m podracer.anakin --config=configs/minatar_dqn.py

    python -m podracer.anakin --config=configs/minatar_dqn.py --config.env=gymnax:Asterix-MinAtar

Result: mean final, greedy evaluations with seeds 0 to 4 of 21.9 on Breakout, 33.1 on Asterix, 60.9
on Freeway and 96 on SpaceInvaders (23 to 152). Hardware: one core of an AMD EPYC, beside other
programs, 111 to 138 seconds on average.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "gymnax:Breakout-MinAtar"
    config.agent = "dqn"
    config.total_steps = 2_000_000
    config.num_envs = 64
    config.unroll_length = 4
    config.learning_rate = 5e-4
    config.max_grad_norm = 10.0
    config.network.torso = "minatar"
    config.network.hidden = (128, 128)
    config.network.activation = "relu"
    config.replay.capacity = 200_000
    config.replay.begin = 10_000
    config.replay.batch = 128
    config.replay.gradient_steps = 4
    config.replay.priority_exponent = 0.6
    config.dqn.epsilon_alpha = 2.0
    config.dqn.dueling = True
    return config
