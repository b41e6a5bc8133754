"""Tic-tac-toe of pgx by AlphaZero, with Gumbel AlphaZero's search of 16 simulations.

    python -m podracer.anakin --config=configs/tic_tac_toe.py

Result: the network alone, without a search, against random moves: in 4,000 games from either side
it wins 94.9 %, 94.0 % and 93.4 % with the seeds 0 to 2, draws the others, and loses none. Half of
all moves at random in self-play, or learning the outcome of games whatever random moves they
contain, make no difference. Hardware: 2 cores of an AMD EPYC beside two other runs, 22 to 32
seconds, of which 2 to 12 to compile.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("alphazero")
    config.env = "pgx:tic_tac_toe"
    config.total_steps = 350_000
    config.cpu_devices = 2
    config.num_envs = 128
    config.unroll_length = 16
    config.num_minibatches = 32
    config.learning_rate = 2e-3
    config.alphazero.search.simulations = 4
    config.alphazero.search.least_range = 0.02
    config.alphazero.random_moves = 0.5
    config.alphazero.cut_random_moves = False
    config.evaluation.every = 15
    config.evaluation.episodes = 1000
    return config
