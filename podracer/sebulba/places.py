"""Which places of this host are free, and which worker has the others."""

import threading
from collections.abc import Sequence

import numpy as np


class Places:
    """The places of a host's environments, which workers take and give back; thread-safe.

    Place p belongs to actor thread p mod K, and to the learner device that has the p-th of equal
    parts of the places. A worker's places are all of one thread, so that its messages are answered
    by one batch, and of different learner devices in turn, so that all of these have something to
    learn from. They are spread over all numbers, because these stand for more than a place: the
    epsilons of exploration, and the groups that a replay buffer draws equally from.
    """

    def __init__(self, places: int, threads: int, learners: int):
        """All places are free.

        Args:
          places: number of places, a multiple of threads times learners.
          threads: number of actor threads (K).
          learners: number of learner devices.
        """
        part = places // learners
        # As [threads, ..., learners], read with the learners changing fastest.
        numbers = np.arange(places).reshape(learners, part // threads, threads).transpose(2, 1, 0)
        order = spread(part // threads)
        self._free: list[list[int]] = numbers[:, order].reshape(threads, -1).tolist()
        self._threads, self._lock = threads, threading.Lock()

    def take(self, most: int) -> tuple[int, np.ndarray]:
        """Takes places of the thread that has most of them, in its order.

        Returns:
          The thread, and at most ``most`` places ``[n]``; none if all are taken.
        """
        with self._lock:
            thread = max(range(self._threads), key=lambda k: len(self._free[k]))
            free = self._free[thread]
            taken, self._free[thread] = free[:most], free[most:]
        return thread, np.array(taken, np.int32)

    def give_back(self, places: Sequence[int] | np.ndarray) -> None:
        """Places are free again, to be taken before others."""
        places = [int(place) for place in places]
        if places:
            with self._lock:
                thread = places[0] % self._threads
                self._free[thread] = places + self._free[thread]

    def free(self) -> int:
        """Number of free places."""
        with self._lock:
            return sum(map(len, self._free))


def spread(count: int) -> list[int]:
    """The numbers below ``count`` in an order whose first ones, however many, are spread evenly.

    As in the sequence of van der Corput, this is the order of the bits of ``i / count`` reversed.
    """
    return sorted(range(count), key=lambda i: f"{(i << 32) // count:032b}"[::-1])
