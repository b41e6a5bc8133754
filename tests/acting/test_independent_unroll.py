"""Acting in independent environments against acting in a batch of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.acting import host_unroll, independent_unroll
from podracer.acting.independent_unroll import Arrivals
from podracer.training import builder
from podracer.xla_cpu import prng
from tests.helpers import make_config

ENVS, LENGTH, UNROLLS = 4, 6, 3
UNUSED = np.iinfo(np.int32).max


@pytest.mark.parametrize("agent", [pytest.param("vtrace", marks=pytest.mark.slow), "r2d2"])
def test_unrolls_are_those_of_a_batch_whatever_the_order_of_arrivals(agent):
    config = make_config(
        agent=agent, env="dummy:counting", network__core="gru", normalize_rewards=True
    )
    env = envs.make_host_environment(config.env, {}, {})
    components = builder.make_agent(config, env.spec)
    key, numbers = prng.key(0), np.arange(10, 10 + ENVS, dtype=np.int32)
    weights = components.init(key)

    def act_key(n):
        return builder.update_keys(key, n)[0]

    batch = jax.tree.map(jax.jit, host_unroll.make_host_unroll(env, components, LENGTH, 1))
    seeds = [5, 6, 7, 8]
    pool = env.make_pool(seeds, 1)
    state, expected = batch.start(numbers, pool.reset().timestep), []
    for n in range(UNROLLS):
        unroll, action = batch.begin(weights, state, act_key(n))
        for _ in range(LENGTH - 1):
            unroll, action = batch.act(weights, unroll, pool.step(np.asarray(action)).timestep)
        state, (trajectory,) = batch.close(unroll, pool.step(np.asarray(action)).timestep)
        expected.append(trajectory)

    shapes = jax.eval_shape(lambda: expected[0])
    pieces = independent_unroll.make_independent_unroll(env, components, act_key, shapes)
    act, take = jax.jit(pieces.act), jax.jit(pieces.take)
    state = pieces.init(numbers)
    filled = [pieces.allocate() for _ in range(UNROLLS)]
    pools = [env.make_pool([seed], 1) for seed in seeds]
    steps, action = np.zeros(ENVS, int), [None] * ENVS
    rng = np.random.default_rng(0)
    # Some of the environments arrive at a time, in any order, besides rows that are not used.
    while (steps <= UNROLLS * LENGTH).any():
        ready = np.flatnonzero(steps <= UNROLLS * LENGTH)
        row = rng.permutation(ready)[: rng.integers(1, len(ready) + 1)]
        size = int(rng.integers(len(row), ENVS + 1))
        arrived = [
            (pools[i].reset() if action[i] is None else pools[i].step(action[i])).timestep
            for i in row
        ]
        pad = size - len(row)
        timestep = jax.tree.map(
            lambda *x, pad=pad: np.pad(np.concatenate(x), [(0, pad)] + [(0, 0)] * (x[0].ndim - 1)),
            *arrived,
        )
        t = np.where(steps[row] == 0, 0, (steps[row] - 1) % LENGTH + 1)
        numbers_of = {"place": row, "unroll": steps[row] // LENGTH, "t": t}
        arrivals = Arrivals(
            **{name: np.pad(x, (0, pad)).astype(np.int32) for name, x in numbers_of.items()},
            start=np.pad(steps[row] == 0, (0, pad)),
            timestep=timestep,
        )
        arrivals.place[len(row) :] = UNUSED
        state, chosen = act(weights, state, arrivals)
        for i, x in zip(row, np.asarray(chosen), strict=False):
            action[i] = x[None]
        for i in row[t == LENGTH]:
            n = steps[i] // LENGTH - 1
            # The second row is not used.
            at = (jnp.array([i, UNUSED]), jnp.array([i, UNUSED]))
            state, filled[n] = take(state, filled[n], *at)
        steps[row] += 1
    for x, y in zip(filled, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), x, y)
        np.testing.assert_array_equal(x.action, y.action)
    assert len(set(np.ravel(expected[0].action))) > 1
