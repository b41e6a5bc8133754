"""Elo ratings, against known ratings and the likelihood itself."""

import numpy as np
import pytest
import scipy.optimize

from podracer.acting import elo

# Of four players, relative to the first.
RATINGS = np.array([0.0, 450.0, 300.0, 620.0])
GAMES = 2000


def expected_shares(ratings):
    """What each player is expected to win against each other."""
    return 1 / (1 + 10 ** ((ratings[None] - ratings[:, None]) / 400))


def simulate(rng, drawn):
    """Points of games of which a share is drawn, the others so that expectations are the same."""
    points = np.zeros((len(RATINGS), len(RATINGS)))
    shares = expected_shares(RATINGS)
    for i, j in zip(*np.triu_indices(len(RATINGS), 1), strict=True):
        draw = drawn * min(shares[i, j], shares[j, i])
        won, lost, equal = rng.multinomial(
            GAMES, [shares[i, j] - draw / 2, shares[j, i] - draw / 2, draw]
        )
        points[i, j], points[j, i] = won + equal / 2, lost + equal / 2
    return points


def test_expected_results_give_the_ratings_behind_them():
    points = GAMES * expected_shares(RATINGS)
    np.fill_diagonal(points, 0)
    np.testing.assert_allclose(elo.fit(points, draws=0), RATINGS, atol=1e-4)
    # One draw of each pair hardly matters.
    np.testing.assert_allclose(elo.fit(points), RATINGS, atol=3)


@pytest.mark.parametrize("drawn", [0.0, 0.8])
def test_ratings_are_recovered_from_games(drawn):
    points = simulate(np.random.default_rng(0), drawn)
    ratings = elo.fit(points)
    np.testing.assert_allclose(ratings, RATINGS, atol=30)
    np.testing.assert_array_equal(np.argsort(ratings), np.argsort(RATINGS))


@pytest.mark.parametrize("draws", [0.5, 1.0])
def test_no_other_ratings_are_more_probable(draws):
    """With few games, so that the prior matters, and different numbers of them."""
    rng = np.random.default_rng(1)
    points = rng.integers(0, 8, (5, 5)) / 2
    np.fill_diagonal(points, 0)
    points[4, 0] = points[0, 4] = 0
    others = 1 - np.eye(5)

    def cost(free):
        shares = expected_shares(np.concatenate([[0], 400 * free]))
        return -((points + others * draws / 2) * np.log(shares)).sum()

    best = scipy.optimize.minimize(cost, np.zeros(4), method="Nelder-Mead", tol=1e-9)
    assert best.success
    np.testing.assert_allclose(elo.fit(points, draws)[1:], 400 * best.x, atol=0.01)


def test_who_has_won_all_games_has_a_finite_rating():
    def two(games):
        return elo.fit(np.array([[0, 0], [games, 0]]))

    for games in (2, 200):
        ratings = two(games)
        np.testing.assert_allclose(ratings, [0, 400 * np.log10(2 * games + 1)])
    # Also among others, of whom none has lost to the first.
    points = np.array([[0, 0, 0], [10, 0, 0], [10, 10, 0]])
    ratings = elo.fit(points)
    assert np.isfinite(ratings).all()
    assert ratings[0] < ratings[1] < ratings[2]


def test_equal_results_give_equal_ratings():
    np.testing.assert_allclose(elo.fit(5.0 * (1 - np.eye(6))), 0, atol=1e-9)
