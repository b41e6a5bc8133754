"""Episode accounting: returns and lengths of running episodes, and statistics of finished ones.

Environments in JAX are tracked by a pure function (``track``), host environments by an object in
numpy (``HostEpisodes``); both add up to the same records.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from podracer.types import Array, HostStep, Leaf, TimeStep


class Episode(NamedTuple):
    """Sums over the running episode of each environment, ``[B]``.

    Attributes:
      ret: undiscounted return so far.
      length: transitions so far; the reset step of a next-step autoreset is not counted.
    """

    ret: Leaf
    length: Leaf


class EpisodeSums(NamedTuple):
    """Sums over the episodes that ended, ``[]`` float each.

    Attributes:
      episodes: their number.
      ret: sum of their returns.
      length: sum of their lengths.
    """

    episodes: Leaf
    ret: Leaf
    length: Leaf


class Episodes(NamedTuple):
    """The outcome of each evaluation episode, ``[episodes]``; capped ones count up to the cap.

    Attributes:
      ret: undiscounted return.
      length: steps.
      complete: bool, whether the episode ended before the cap.
    """

    ret: Any
    length: Any
    complete: Any


def track(episode: Episode, timestep: TimeStep) -> tuple[Episode, Episode, Array]:
    """Adds one arrival; where it opens an episode, the last one is complete and the sums restart.

    Args:
      episode: sums before this time step.
      timestep: ``[B]``.

    Returns:
      The new sums, the sums including this arrival, and ``[B]`` bool: whether the latter are those
      of a complete episode.
    """
    counted = ~timestep.first | (timestep.discount == 0)
    total = Episode(episode.ret + timestep.reward, episode.length + counted)
    return Episode(*(jnp.where(timestep.first, 0, x) for x in total)), total, timestep.first


def sum_finished(total: Episode, ended: Array) -> EpisodeSums:
    """Sums over the episodes that ended.

    Args:
      total: returns and lengths, of any shape.
      ended: bool of that shape, which of them are complete.
    """
    ended = ended.astype(jnp.float32)
    return EpisodeSums(ended.sum(), (ended * total.ret).sum(), (ended * total.length).sum())


class HostEpisodes:
    """The running episodes of a pool of host environments, in numpy.

    An episode is a whole game: it is scored by raw rewards and ends where the game is over.

    Attributes:
      running: return and length of each running episode, ``[B]``.
    """

    def __init__(self, batch: int):
        self.running = Episode(np.zeros(batch), np.zeros(batch))

    def add(
        self, step: HostStep, index: np.ndarray | slice = slice(None)
    ) -> tuple[Episode, np.ndarray]:
        """Adds one arrival of the environments of these numbers, by default of all.

        Returns:
          Returns and lengths including this arrival, and which of them are of complete episodes.
        """
        # The reset step of an autoreset is not a step of a game.
        total = Episode(
            self.running.ret[index] + step.raw_reward,
            self.running.length[index] + ~step.timestep.first,
        )
        for running, x in zip(self.running, total, strict=True):
            running[index] = np.where(step.game_over, 0, x)
        return total, step.game_over

    def abandon(self, index: np.ndarray | slice = slice(None)) -> None:
        """Forgets the running episodes of the environments of these numbers, by default of all."""
        for running in self.running:
            running[index] = 0


def summarize(episodes: Episodes) -> dict[str, int | float]:
    """Statistics over evaluation episodes, for rows, summaries and reports."""
    return {
        "episodes": int(episodes.ret.size),
        "complete": int(episodes.complete.sum()),
        "return_mean": float(episodes.ret.mean()),
        "return_std": float(episodes.ret.std()),
        "return_min": float(episodes.ret.min()),
        "return_max": float(episodes.ret.max()),
        "length_mean": float(episodes.length.mean()),
    }
