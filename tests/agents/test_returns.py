"""Targets against slow per-episode references, for every kind of reset and end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.acting.statistics import Episode, track
from podracer.agents import returns
from podracer.types import TimeStep
from tests import references

RESETS = pytest.mark.parametrize("next_step", [False, True], ids=["same-step", "next-step"])
ENDS = pytest.mark.parametrize("truncate", [0.0, 1.0, 0.5], ids=["terminated", "truncated", "both"])


def make(seed: int, next_step: bool, truncate: float):
    rng = np.random.default_rng(seed)
    stream = references.random_stream(rng, 23, 7, next_step=next_step, truncate=truncate)
    values = rng.normal(size=stream.timestep.reward.shape).astype(np.float32)
    return rng, stream, values


@RESETS
@ENDS
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_sum_over_each_episode(seed, next_step, truncate):
    _, stream, values = make(seed, next_step, truncate)
    targets = jax.jit(lambda t, v: returns.gae(t, v, discount=0.9, lambda_=0.8))(
        stream.timestep, values
    )
    advantage, valid = references.gae(stream, values, 0.9, 0.8)
    np.testing.assert_array_equal(targets.valid, valid)
    np.testing.assert_allclose(targets.advantage, advantage, atol=2e-5)
    np.testing.assert_allclose(targets.value, advantage + values[:-1], atol=2e-5)
    assert (np.asarray(targets.advantage)[valid == 0] == 0).all()


@RESETS
@ENDS
@pytest.mark.parametrize("clip_rho", [1.0, 0.7])
@pytest.mark.parametrize("lambda_", [1.0, 0.8])
def test_vtrace_is_equation_one_of_the_paper(next_step, truncate, clip_rho, lambda_):
    rng, stream, values = make(5, next_step, truncate)
    rho = np.exp(rng.normal(size=(23, 7)) * 0.7).astype(np.float32)
    targets = returns.vtrace(
        stream.timestep, values, np.log(rho), discount=0.9, lambda_=lambda_, clip_rho=clip_rho
    )
    advantage, target = references.vtrace(stream, values, rho, 0.9, lambda_, clip_rho)
    np.testing.assert_allclose(targets.value, target, atol=5e-5)
    np.testing.assert_allclose(targets.advantage, advantage, atol=5e-5)


@RESETS
def test_vtrace_on_policy_with_lambda_is_gae(next_step):
    _, stream, values = make(1, next_step, 0.5)
    zeros = np.zeros((23, 7), np.float32)
    ours = returns.vtrace(stream.timestep, values, zeros, discount=0.9, lambda_=0.8)
    other = returns.gae(stream.timestep, values, discount=0.9, lambda_=0.8)
    np.testing.assert_allclose(ours.value, other.value, atol=2e-5)


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("truncate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_returns_are_the_sum_within_each_episode(next_step, truncate, n):
    rng = np.random.default_rng(n)
    stream = references.random_stream(rng, 40, 5, next_step=next_step, truncate=truncate)
    values = rng.normal(size=(41, 5)).astype(np.float32)
    expected, valid = references.n_step(stream, values, n, 0.9)
    out = returns.n_step(jax.tree.map(jnp.asarray, stream.timestep), n, 0.9)
    t, b = np.indices((40, 5))
    target = out.reward + out.discount * values[t + np.asarray(out.steps), b]
    np.testing.assert_array_equal(out.valid, valid)
    np.testing.assert_allclose(valid * target, expected, atol=1e-5)
    assert (np.asarray(out.steps)[valid == 1] >= 1).all()


@RESETS
@ENDS
def test_only_whole_episodes_are_learned_from(next_step, truncate):
    for seed in range(3):
        _, stream, values = make(seed, next_step, truncate)
        whole = references.whole_episodes(stream)
        timestep = returns.only_whole_episodes(jax.tree.map(jnp.asarray, stream.timestep))
        np.testing.assert_array_equal(returns.valid(timestep), whole)
        assert whole.sum() < np.asarray(returns.valid(stream.timestep)).sum()
        # The targets of whole episodes are what they were.
        advantage, _ = references.gae(stream, values, 0.9, 0.8)
        targets = returns.gae(timestep, values, discount=0.9, lambda_=0.8)
        np.testing.assert_allclose(targets.advantage, whole * advantage, atol=2e-5)
    # No end at all: the unroll is the episode.
    endless = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), stream.timestep)
    endless = endless.replace(discount=jnp.ones_like(endless.discount))
    assert returns.valid(returns.only_whole_episodes(endless)).all()


def test_nothing_leaks_backwards_through_a_cut():
    """Targets before the end of an episode do not depend on what follows it, bit for bit."""
    _, stream, values = make(2, True, 0.5)
    start = 12
    cut = np.flatnonzero(stream.timestep.first[start:, 0])[0] + start
    changed = stream.timestep.replace(reward=stream.timestep.reward.copy())
    changed.reward[cut + 1 :, 0] += 100
    later = values.copy()
    later[cut:, 0] += 100
    for targets in (returns.gae, lambda *a, **k: returns.vtrace(*a, np.zeros((23, 7)), **k)):
        before = targets(stream.timestep, values, discount=0.9, lambda_=0.8)
        after = targets(changed, later, discount=0.9, lambda_=0.8)
        np.testing.assert_array_equal(before.advantage[: cut - 1, 0], after.advantage[: cut - 1, 0])


@RESETS
@ENDS
def test_episodes_are_tracked(next_step, truncate):
    _, stream, _ = make(3, next_step, truncate)
    timestep = stream.timestep
    episode = Episode(jnp.zeros(7), jnp.zeros(7))
    seen = {b: [] for b in range(7)}
    for t in range(1, 24):
        episode, total, ended = track(episode, jax.tree.map(lambda x, t=t: x[t], timestep))
        for b in np.flatnonzero(ended):
            seen[b].append((float(total.ret[b]), int(total.length[b])))
    for b in range(7):
        expected = []
        for env, index, rewards, _, leads in stream.episodes:
            if env == b and index and timestep.first[index[-1] + 1 + next_step :, b].any():
                # The last transition of a truncated same-step episode is invalid and not counted.
                expected.append((sum(rewards), len(index) - (leads[-1] is None)))
        assert len(seen[b]) >= 2
        for (ret, length), (want, steps) in zip(seen[b], expected, strict=False):
            assert ret == pytest.approx(want, abs=1e-5)
            assert length == steps


def test_discounted_sums_restart_with_each_episode():
    reward = jnp.array([[0.0], [1.0], [1.0], [5.0]])
    first = jnp.array([[False], [False], [True], [False]])
    timestep = TimeStep(reward, reward, jnp.ones((4, 1)), first)
    last, sums = returns.discounted(jnp.array([2.0]), timestep, 0.5)
    np.testing.assert_allclose(sums[:, 0], [1.0, 1.5, 1.75, 5.0])
    np.testing.assert_allclose(last, [5.0])
