"""Connect Four of pgx by AlphaZero, with Gumbel AlphaZero's search of 16 simulations.

    python -m podracer.anakin --config=configs/connect_four.py

Result: the network alone, without a search, wins 99.0 to 99.8 % and loses 0.2 to 1.0 % of 1,000
games against random moves, from either side, with the seeds 0 to 4. Hardware: one core of an AMD
EPYC (family 25, model 17) beside other programs, 106 to 168 seconds.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("alphazero")
    config.env = "pgx:connect_four"
    config.total_steps = 2_000_000
    config.num_envs = 256
    config.unroll_length = 32
    config.num_minibatches = 32
    config.learning_rate = 2e-3
    config.evaluation.every = 15
    config.evaluation.episodes = 1000
    return config
