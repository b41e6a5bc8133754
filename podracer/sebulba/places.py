"""Which places of this host are free, and which worker has the others."""

import threading

import numpy as np


class Places:
    """The places of a host's environments, which workers take and give back; thread-safe.

    Place p belongs to actor thread p mod K, and to the learner device that has the p-th of equal
    parts of the places. A worker's places are of one thread while that has enough, so that its
    messages are answered by one batch, and of different learner devices in turn, so that all of
    these have something to learn from. They are spread over all numbers, because these stand for
    more than a place: the epsilons of exploration, and the groups that a replay buffer draws
    equally from.
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

    def take(self, most: int) -> np.ndarray:
        """Takes at most ``most`` places, from the thread with most free ones and then from the
        next; returns them ``[n]``, none if all are taken."""
        taken: list[int] = []
        with self._lock:
            for k in sorted(range(self._threads), key=lambda k: -len(self._free[k])):
                rest = most - len(taken)
                taken += self._free[k][:rest]
                self._free[k] = self._free[k][rest:]
        return np.array(taken, np.int32)

    def give_back(self, places: np.ndarray) -> None:
        """Places of one thread are free again, to be taken before others."""
        with self._lock:
            thread = int(places[0]) % self._threads
            self._free[thread] = places.tolist() + self._free[thread]

    def free(self) -> int:
        """Number of free places."""
        with self._lock:
            return sum(map(len, self._free))


def spread(count: int) -> list[int]:
    """The numbers below ``count`` in an order whose first ones, however many, are spread evenly.

    As in the sequence of van der Corput, this is the order of the bits of ``i / count`` reversed.
    """
    return sorted(range(count), key=lambda i: f"{(i << 32) // count:032b}"[::-1])
