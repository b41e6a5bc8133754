"""What a learned update rule knows: each episode by itself, backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents import lpg, returns
from podracer.types import TimeStep, Trajectory
from tests.helpers import make_config
from tests.references import random_stream

CONFIG = lpg.Config(predictions=3, units=5, embedding=4)
T, B, GAMMA = 14, 3, 0.9


@pytest.mark.parametrize("next_step", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rule_reads_each_episode_alone(next_step):
    """Beside a call for each part of the stream that belongs together."""
    rng = np.random.default_rng(0)
    stream = random_stream(rng, T, B, next_step=next_step, truncate=0.5).timestep
    timestep = TimeStep(*(jnp.asarray(x) for x in jax.tree.leaves(stream)))
    rule = lpg.make_rule(CONFIG)
    params = rule.init(jax.random.key(0))
    log_prob = jnp.asarray(np.log(rng.uniform(0.1, 0.9, (T, B))), jnp.float32)
    log_y = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(T + 1, B, 3)), jnp.float32))
    whole = rule.apply(params, lpg.experience(timestep, log_prob, log_y, GAMMA))
    valid = np.asarray(returns.valid(timestep))
    compared = 0
    for b in range(B):
        start = 0
        for t in range(T):
            last = t + 1 == T or timestep.first[t + 1, b] or not valid[t + 1, b]
            if not valid[t, b]:
                start = t + 1
            elif last:
                part, ends = slice(start, t + 1), slice(start, t + 2)
                alone = jax.tree.map(lambda x, b=b, ends=ends: x[ends, b : b + 1], timestep)
                # Nothing before or after is there to be read.
                alone = alone.replace(first=alone.first.at[1:].set(alone.discount[1:] == 0))
                known = lpg.experience(
                    alone, log_prob[part, b : b + 1], log_y[ends, b : b + 1], GAMMA
                )
                for found, one in zip(whole, rule.apply(params, known), strict=True):
                    np.testing.assert_allclose(found[part, b], one[:, 0], rtol=1e-4, atol=1e-6)
                compared += t + 1 - start
                start = t + 1
    assert compared == valid.sum() > T


def test_values_are_means_over_visits():
    """Beside a loop over the visits of each state."""
    rng = np.random.default_rng(1)
    stream = random_stream(rng, T, B, next_step=True, truncate=0.5).timestep
    state = rng.integers(0, 4, (T + 1, B))
    config = make_config(discount=GAMMA, lpg__value_rate=0.3)
    values = rng.normal(size=4).astype(np.float32)
    timestep = TimeStep(jnp.eye(4)[state], *(jnp.asarray(x) for x in jax.tree.leaves(stream)[1:]))
    targets = returns.gae(timestep, jnp.asarray(values[state]), discount=GAMMA, lambda_=0.95)
    trajectory = Trajectory(timestep, (), (), (), ())
    found = lpg.learn_values(jnp.asarray(values), trajectory, config.settings, config.lpg)
    new, advantage = found
    np.testing.assert_allclose(advantage, targets.advantage, atol=1e-6)
    for s in range(4):
        visits = [
            float(targets.advantage[t, b])
            for t in range(T)
            for b in range(B)
            if state[t, b] == s and targets.valid[t, b]
        ]
        assert visits
        np.testing.assert_allclose(new[s], values[s] + 0.3 * np.mean(visits), rtol=1e-4)
