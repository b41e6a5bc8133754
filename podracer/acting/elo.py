"""Elo ratings of players from the results of their games."""

import numpy as np

# Elo's unit: who is rated 400 points above another is expected to win 10 points for each of his.
UNIT = 400
# Far more than results of all pairs need, which take a few dozen.
MOST_ITERATIONS = 100_000


def fit(points: np.ndarray, draws: float = 1.0) -> np.ndarray:
    """The most probable ratings by the model of Bradley and Terry (1952).

    In it, a player of strength s is expected to win s / (s + t) points of a game against one of
    strength t, where a draw is half a point for each. The likelihood is maximised by the
    minorisation-maximisation of Hunter (2004), https://doi.org/10.1214/aos/1079120141, equation 3.

    Args:
      points: ``[players, players]``, the points that each player (row) has won against each other
        (column): 1 for a win, 0.5 for a draw. The diagonal is zero.
      draws: a prior: draws that are added to the games of each pair. Without any, a player who has
        won all games would be infinitely strong.

    Returns:
      ``[players]``, ratings in Elo points relative to that of player 0.
    """
    others = 1 - np.eye(len(points))
    won = (points + 0.5 * draws * others).sum(1)
    games = points + points.T + draws * others
    strength = np.ones(len(points))
    for _ in range(MOST_ITERATIONS):
        before = strength
        strength = won / (games / (before[:, None] + before)).sum(1)
        strength = strength / strength[0]
        if np.allclose(strength, before, rtol=1e-9, atol=0):
            break
    return UNIT * np.log10(strength)
