"""Which places workers get."""

import numpy as np
import pytest

from podracer.sebulba.places import Places, spread


def test_a_worker_has_places_of_one_thread_and_of_all_learner_devices():
    places = Places(24, threads=2, learners=3)
    taken = places.take(6)
    (thread,) = set(taken % 2)
    # The device with the p-th of equal parts of the places learns from them.
    np.testing.assert_array_equal(np.bincount(taken // 8), [2, 2, 2])
    other = places.take(12)
    assert set(other % 2) == {1 - thread}
    assert not set(other) & set(taken)


def test_a_worker_has_places_of_several_threads_if_one_has_not_enough():
    places = Places(24, threads=2, learners=3)
    taken = places.take(20)
    np.testing.assert_array_equal(np.sort(np.bincount(taken % 2)), [8, 12])
    # Those of a thread follow each other, so that they are in one pool.
    assert np.count_nonzero(np.diff(taken % 2)) == 1
    assert len(places.take(100)) == 4


def test_workers_are_spread_over_threads_and_places_are_used_again():
    places = Places(8, threads=2, learners=1)
    taken = [places.take(2) for _ in range(4)]
    assert sorted(int(x[0]) % 2 for x in taken) == [0, 0, 1, 1]
    assert sorted(np.concatenate(taken)) == list(range(8))
    assert places.free() == 0
    assert not len(places.take(1))
    places.give_back(taken[2])
    assert places.free() == 2
    assert set(places.take(5)) == set(taken[2])


@pytest.mark.parametrize("count", [1, 2, 12, 64])
def test_the_first_places_are_spread_evenly(count):
    order = spread(count)
    assert sorted(order) == list(range(count))
    for first in (1, 2, 4, 8, 16):
        groups = np.array(order[:first]) * first // count
        assert np.bincount(groups, minlength=first).max() <= (1 if count % first == 0 else 2)
