"""Tic-tac-toe of pgx by AlphaZero, with Gumbel AlphaZero's search of 4 simulations.

    python -m podracer.anakin --config=configs/tic_tac_toe.py

Half of all moves of self-play are random, and the network learns the outcomes of these games, so
that its values include the opponent's mistakes. With cut_random_moves, a quarter of random moves,
16 simulations and a least_range of 0.1 it wins 94.1 % of 4,000 games (mean of the seeds 0 to 2);
with cut_random_moves=False alone, 94.6 % (seeds 0 and 1).

Result: the network alone, without a search, against random moves: in 1,000 games from either side
it wins 95.7, 96.1, 95.7, 95.6 and 95.0 % with the seeds 0 to 4, draws the others, and loses none.
No player can win more than 96.7 % (``benchmarks/tic_tac_toe.py``). Hardware: one core of an AMD
EPYC (family 25, model 17) beside other programs, 13 to 29 seconds, of which 2 to 15 to compile.
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
