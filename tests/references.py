"""Slow reference implementations in numpy, one episode at a time, close to the formulas."""

from typing import NamedTuple

import numpy as np

from podracer.types import TimeStep


class Stream(NamedTuple):
    """A random stream of experience, and the episodes it is made of.

    Attributes:
      timestep: ``[T+1, B]``.
      episodes: (environment, index of each transition, its reward, its discount, the index of the
        observation it leads to) of each episode or piece of one. An index leads to None where the
        stream does not show the successor (a truncation with a same-step autoreset).
    """

    timestep: TimeStep
    episodes: list[tuple[int, list[int], list[float], list[float], list[int | None]]]


def random_stream(
    rng: np.random.Generator, length: int, batch: int, *, next_step: bool, truncate: float
) -> Stream:
    """Consecutive episodes of 1 to 6 steps, of which a share ``truncate`` is truncated."""
    reward = np.zeros((length + 1, batch), np.float32)
    discount = np.ones((length + 1, batch), np.float32)
    first = np.zeros((length + 1, batch), bool)
    episodes = []
    for b in range(batch):
        t = 0
        first[0, b] = rng.random() < 0.5
        while t < length:
            steps = int(rng.integers(1, 7))
            truncated = rng.random() < truncate
            index, rewards, discounts, leads = [], [], [], []
            for k in range(steps):
                if t >= length:
                    break
                last = k == steps - 1
                reward[t + 1, b] = rng.normal()
                discount[t + 1, b] = 0.0 if last and not truncated else 1.0
                if last and not next_step:
                    first[t + 1, b] = True
                index.append(t)
                rewards.append(float(reward[t + 1, b]))
                discounts.append(float(discount[t + 1, b]))
                hidden = last and truncated and not next_step
                leads.append(None if hidden else t + 1)
                t += 1
            else:
                if next_step and t < length:
                    # The step of an autoreset: no reward, and no transition to learn from.
                    first[t + 1, b] = True
                    t += 1
            episodes.append((b, index, rewards, discounts, leads))
    observation = np.zeros((length + 1, batch, 1), np.float32)
    return Stream(TimeStep(observation, reward, discount, first), episodes)


def whole_episodes(stream: Stream) -> np.ndarray:
    """Which transitions ``[T, B]`` belong to episodes whose end the stream shows; all transitions
    of episodes, in environments where it shows none."""
    first = np.asarray(stream.timestep.first)
    length = len(first) - 1
    ended, all_ = np.zeros((2, length, first.shape[1]), bool)
    for b, index, _, discounts, leads in stream.episodes:
        if not index:
            continue
        reset = index[-1] + 2 <= length and first[index[-1] + 2, b]
        valid = [t for t, lead in zip(index, leads, strict=True) if lead is not None]
        all_[valid, b] = True
        if discounts[-1] == 0 or leads[-1] is None or reset:
            ended[valid, b] = True
    shown = (first[1:] | (np.asarray(stream.timestep.discount[1:]) == 0)).any(0)
    return np.where(shown, ended, all_)


def gae(stream: Stream, values: np.ndarray, discount: float, lambda_: float):
    """Advantages by the sum over l of (gamma lambda)^l delta_{t+l}, within each episode."""
    length, batch = values.shape[0] - 1, values.shape[1]
    advantage = np.zeros((length, batch))
    valid = np.zeros((length, batch))
    for b, index, rewards, discounts, leads in stream.episodes:
        if leads and leads[-1] is None:
            # The final observation is lost: the step before it bootstraps from its own value.
            index, rewards, discounts, leads = (x[:-1] for x in (index, rewards, discounts, leads))
        deltas = [
            r + discount * d * values[n, b] - values[t, b]
            for t, r, d, n in zip(index, rewards, discounts, leads, strict=True)
        ]
        for i, t in enumerate(index):
            advantage[t, b] = sum(
                (discount * lambda_) ** (j - i) * deltas[j] for j in range(i, len(index))
            )
            valid[t, b] = 1
    return advantage, valid


def vtrace(
    stream: Stream,
    values: np.ndarray,
    rho: np.ndarray,
    discount: float,
    lambda_: float,
    clip_rho: float,
):
    """Targets v_s by the sum of equation 1, and r + gamma v_{s+1} - V(x_s)."""
    length, batch = values.shape[0] - 1, values.shape[1]
    target = values[:-1].astype(np.float64).copy()
    advantage = np.zeros((length, batch))
    for b, index, rewards, discounts, leads in stream.episodes:
        if leads and leads[-1] is None:
            index, rewards, discounts, leads = (x[:-1] for x in (index, rewards, discounts, leads))
        deltas = [
            min(clip_rho, rho[t, b]) * (r + discount * d * values[n, b] - values[t, b])
            for t, r, d, n in zip(index, rewards, discounts, leads, strict=True)
        ]
        traces = [lambda_ * min(1.0, rho[t, b]) for t in index]
        for i, t in enumerate(index):
            for j in range(i, len(index)):
                weight = np.prod([discount * discounts[k] * traces[k] for k in range(i, j)])
                target[t, b] += weight * deltas[j]
        for i, (t, r, d) in enumerate(zip(index, rewards, discounts, strict=True)):
            following = target[index[i + 1], b] if i + 1 < len(index) else values[leads[i], b]
            advantage[t, b] = r + discount * d * following - values[t, b]
    return advantage, target


def n_step(stream: Stream, values: np.ndarray, n: int, discount: float):
    """Targets r_1 + gamma r_2 + ... + gamma^k V, k <= n, within each episode."""
    length, batch = values.shape[0] - 1, values.shape[1]
    target = np.zeros((length, batch))
    valid = np.zeros((length, batch))
    for b, index, rewards, discounts, leads in stream.episodes:
        if leads and leads[-1] is None:
            index, rewards, discounts, leads = (x[:-1] for x in (index, rewards, discounts, leads))
        for i, t in enumerate(index):
            last = min(i + n, len(index)) - 1
            target[t, b] = sum(discount ** (j - i) * rewards[j] for j in range(i, last + 1))
            bootstrap = discounts[last] * values[leads[last], b]
            target[t, b] += discount ** (last + 1 - i) * bootstrap
            valid[t, b] = 1
    return target, valid


def model_targets(
    stream: Stream,
    values: np.ndarray,
    unroll: int,
    n: int,
    discount: float,
    rho: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """MuZero's targets for a model that is unrolled from the first observation of each environment,
    ``[unroll + 1, B]``, and where there are any.

    An episode's moves are followed until the model has to predict what the stream does not show.
    """
    batch = values.shape[1]
    names = ("value", "reward", "policy_weight", "value_weight", "reward_weight")
    out = {name: np.zeros((unroll + 1, batch)) for name in names}
    if rho is None:
        returns, _ = n_step(stream, values, n, discount)
    else:
        _, returns = vtrace(stream, values, rho, discount, 1.0, 1.0)
    for b, index, rewards, discounts, leads in stream.episodes:
        if not index or index[0] != 0:
            continue
        moves = [i for i, lead in zip(index, leads, strict=True) if lead is not None]
        ended = len(moves) == len(index) and discounts[-1] == 0
        for k in range(unroll + 1):
            if k < len(moves):
                out["value"][k, b] = returns[k, b]
                out["reward"][k, b] = rewards[k]
                out["policy_weight"][k, b] = 1
            # After the end, rewards and values of 0 are learned.
            known = k < len(moves) or ended
            out["value_weight"][k, b] = out["reward_weight"][k, b] = known
    return out
