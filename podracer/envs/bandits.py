"""Environments with known answers whose observations are dictionaries, in JAX and on the host.

Each goes through a table of observations, one after another from a random place on, and rewards
actions by the observation before them. So the order of observations depends on nothing but the
place where an environment begins, and the best action on nothing but the observation.
"""

from collections.abc import Sequence
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import (
    ACTION_MASK,
    Array,
    ArrayTree,
    Box,
    Discrete,
    Environment,
    HostEnvironment,
    HostStep,
    Leaf,
    Spec,
    TimeStep,
)

# The reward of an illegal action.
FORBIDDEN = -100.0


class Bandit(NamedTuple):
    """A table of observations and rewards.

    Attributes:
      observation: ``[N, ...]``, in the order in which they are seen.
      reward: ``[N, actions]`` float32, of actions in answer to them.
      length: steps of an episode. They terminate; the next one begins in the step after.
      continuous: the action space is a box [-1, 1]. The discrete actions are at equal distances in
        it, and the reward is 1 less the squared distance to the best one of them.
    """

    observation: ArrayTree
    reward: np.ndarray
    length: int
    continuous: bool = False

    @property
    def spec(self) -> Spec:
        """The spaces."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.observation)
        if self.continuous:
            return Spec(one, Box((1,), -np.ones(1), np.ones(1)))
        return Spec(one, Discrete(self.reward.shape[1]))

    def arrive(self, place: Leaf, count: Leaf, reward: Leaf, xp: ModuleType) -> TimeStep:
        """The arrival at places in the table after ``count`` steps of the episode."""
        # A table of numpy arrays can't be indexed by arrays that are traced.
        observation = jax.tree.map(lambda x: xp.asarray(x)[place], self.observation)
        discount = xp.where(count == self.length, 0.0, 1.0).astype(np.float32)
        return TimeStep(observation, xp.asarray(reward, np.float32), discount, count == 0)

    def step(self, place: Leaf, count: Leaf, action: Leaf, xp: ModuleType) -> Any:
        """Places and counts after actions, and the arrival there; ``xp`` is numpy or jax.numpy."""
        ended = count == self.length
        reward = xp.where(ended, 0.0, self._rewarded(place, action, xp))
        count = xp.where(ended, 0, count + 1)
        place = (place + 1) % len(self.reward)
        return place, count, self.arrive(place, count, reward, xp)

    def _rewarded(self, place: Leaf, action: Leaf, xp: ModuleType) -> Any:
        if not self.continuous:
            return xp.asarray(self.reward)[place, action]
        best = np.linspace(-1, 1, self.reward.shape[1])[self.reward.argmax(1)]
        return 1 - (xp.clip(action[..., 0], -1, 1) - xp.asarray(best, np.float32)[place]) ** 2


class BanditPool:
    """A bandit on the host; seeds are the places where environments begin."""

    def __init__(self, bandit: Bandit, seeds: Sequence[int]):
        self._bandit = bandit
        self._place = np.asarray(seeds) % len(bandit.reward)
        self._count = np.zeros_like(self._place)

    def reset(self) -> HostStep:
        self._count = np.zeros_like(self._count)
        zeros = np.zeros(self._count.shape)
        return self._returned(self._bandit.arrive(self._place, self._count, zeros, np))

    def step(self, action: np.ndarray) -> HostStep:
        self._place, self._count, timestep = self._bandit.step(self._place, self._count, action, np)
        return self._returned(timestep)

    def _returned(self, timestep: TimeStep) -> HostStep:
        return HostStep(timestep, timestep.reward, timestep.discount == 0)

    def close(self) -> None:
        pass


def make(bandit: Bandit) -> Environment:
    """A bandit in JAX, whose state is the place in the table and the steps of the episode."""

    def reset(key: Array) -> tuple[tuple[Array, Array], TimeStep]:
        place, count = jax.random.randint(key, (), 0, len(bandit.reward)), jnp.int32(0)
        return (place, count), bandit.arrive(place, count, jnp.float32(0), jnp)

    def step(key: Array, state: ArrayTree, action: Array) -> tuple[ArrayTree, TimeStep]:
        del key
        place, count = state
        place, count, timestep = bandit.step(place, count, action, jnp)
        return (place, count), timestep

    return Environment(bandit.spec, reset, step)


def make_host(bandit: Bandit) -> HostEnvironment:
    """A bandit on the host."""
    spec = bandit.spec
    return HostEnvironment(
        spec,
        lambda seeds, _: BanditPool(bandit, seeds),
        spec.observation,
        lambda observation, _: observation,
    )


def parts(length: int = 4, continuous: bool = False) -> Bandit:
    """An image, one half of which is bright, and a number with a sign: each is half of the answer.

    The reward is 1 for the one right action of four, so the best return is ``length``, half of that
    for an agent which sees only one of the two, and a quarter for one which sees neither. With
    continuous actions, it is 8/9 for one which sees only the image.
    """
    image = np.zeros((4, 4, 4, 1), np.uint8)
    image[:2, :, :2], image[2:, :, 2:] = 255, 255
    sign = np.array([[1], [-1], [1], [-1]], np.float32)
    return Bandit({"image": image, "sign": sign}, np.eye(4, dtype=np.float32), length, continuous)


def masked(length: int = 4, actions: int = 4) -> Bandit:
    """A sign and the set of legal actions, any but the empty one.

    The reward is 1 for the highest legal action where the sign is positive, and for the lowest one
    where it is negative, else 0, so the best return is ``length``. That of an illegal action is
    ``FORBIDDEN``.
    """
    rows = [
        (sign, mask)
        for sign, mask in product((1.0, -1.0), product((False, True), repeat=actions))
        if any(mask)
    ]
    # Neighbours differ in both.
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    sign, mask = np.array([[s] for s, _ in rows], np.float32), np.array([m for _, m in rows])
    highest, lowest = actions - 1 - mask[:, ::-1].argmax(1), mask.argmax(1)
    best = np.where(sign[:, 0] > 0, highest, lowest)
    reward = np.where(mask, np.eye(actions)[best], FORBIDDEN).astype(np.float32)
    return Bandit({"sign": sign, ACTION_MASK: mask}, reward, length)
