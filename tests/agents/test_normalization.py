"""Running statistics against those of all data at once."""

import jax
import jax.numpy as jnp
import numpy as np

from podracer.acting import unroll
from podracer.agents import normalization
from podracer.training import builder
from podracer.types import (
    ACTION_MASK,
    Discrete,
    Spec,
    TimeStep,
    TrainState,
    Trajectory,
    Weights,
)
from tests.helpers import make_config, make_run


def test_moments_are_those_of_all_batches():
    rng = np.random.default_rng(0)
    data = 1000 + rng.normal(size=(5, 20, 3)).astype(np.float32) * [0.1, 1, 10]
    moments = normalization.init(np.zeros(3))
    np.testing.assert_array_equal(normalization.standardize(moments, jnp.ones(3), 5.0), 1)
    for batch in data:
        moments = normalization.update(moments, batch, lambda x: x)
    np.testing.assert_allclose(moments.mean, data.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(moments.variance, data.var((0, 1)), rtol=2e-2)
    standard = normalization.standardize(moments, data, 100.0)
    np.testing.assert_allclose(standard.std((0, 1)), 1, rtol=2e-2)


def test_each_part_of_a_dictionary_has_moments_of_its_own_but_the_mask_has_none():
    rng = np.random.default_rng(0)
    pair, single = rng.normal(3, 2, (5, 20, 2)), rng.normal(-1, 9, (5, 20))
    mask = rng.random((5, 20, 4)) < 0.5
    config = make_config(env="dummy:parts", normalize_observations=True)
    spec = Spec({"pair": np.zeros(2), "single": np.zeros(()), ACTION_MASK: mask[0, 0]}, Discrete(4))
    stats = normalization.init_stats(spec, config.settings)
    update_stats = normalization.make_update_stats(config.settings, lambda x: x)
    parts = [normalization.init(x) for x in (pair[0, 0], np.zeros(()))]
    for i in range(5):
        zeros = np.zeros((21, 2))
        rows = {"pair": pair[i], "single": single[i], ACTION_MASK: mask[i]}
        observation = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), rows)
        trajectory = Trajectory(TimeStep(observation, zeros, zeros, zeros), None, None, None, None)
        state = TrainState(Weights((), stats), (), (), jnp.int32(i))
        stats = update_stats(state, trajectory)
        parts = [
            normalization.update(m, jnp.asarray(x[i]), lambda x: x)
            for m, x in zip(parts, (pair, single), strict=True)
        ]
    moments = stats["observation"]
    assert moments.mean.keys() == {"pair", "single"}
    for name, part in zip(("pair", "single"), parts, strict=True):
        np.testing.assert_array_equal(moments.mean[name], part.mean)
        np.testing.assert_array_equal(moments.variance[name], part.variance)
    seen = normalization.normalize_observation(stats, observation)
    np.testing.assert_array_equal(seen[ACTION_MASK], observation[ACTION_MASK])
    expected = (single[4, 3] - single.mean()) / single.std()
    np.testing.assert_allclose(seen["single"][3], expected, atol=1e-3)


def test_rewards_are_scaled_by_the_deviation_of_discounted_returns():
    """Sums continue from one unroll to the next: compared with one long stream."""
    config = make_config(env="dummy:counting", normalize_rewards=True, num_envs=4, discount=0.9)
    program, sizes, state, step = make_run(config)
    streams, start = [], state
    act = jax.jit(unroll.unroll, static_argnums=(0, 1, 5))
    for _ in range(3):
        act_key, _ = builder.update_keys(state.key, state.train.step)
        _, trajectory, _ = act(
            program.env,
            program.agent,
            state.train.weights,
            state.rollout,
            act_key,
            sizes.unroll_length,
        )
        streams.append(jax.tree.map(lambda x: np.asarray(x[:-1]), trajectory.timestep))
        state, _ = step(state)
    assert start.train.weights.stats["observation"] == ()
    reward, first = (
        np.concatenate([getattr(s, name) for s in streams]) for name in ("reward", "first")
    )
    total, totals = np.zeros(4), []
    for r, f in zip(reward, first, strict=True):
        total = 0.9 * total + r
        totals.append(total)
        total = np.where(f, 0, total)
    moments = state.train.weights.stats["reward"]
    np.testing.assert_allclose(moments.mean, np.mean(totals), rtol=1e-4)
    np.testing.assert_allclose(moments.variance, np.var(totals), rtol=1e-3)
