"""Evaluations in host environments whose pools are smaller than their number of episodes."""

import jax
import numpy as np
import pytest

from podracer.acting.host_evaluation import make_host_evaluation
from podracer.envs import bandits
from podracer.training import builder
from tests.helpers import make_config

# Always the same observation, so that returns depend on nothing but the keys of the actions.
BANDIT = bandits.Bandit(np.zeros((1, 2), np.float32), np.array([[0.0, 1.0]], np.float32), 16)


def evaluate(num_envs, *, in_processes):
    """The episodes of an evaluation that samples, and the sizes of the pools that it builds."""
    sizes = []
    config = make_config(num_envs=num_envs, evaluation__episodes=11, evaluation__greedy=False)
    env = bandits.make_host(BANDIT)._replace(in_processes=in_processes)

    def make_pool(seeds, threads):
        sizes.append(len(seeds))
        return bandits.make_host(BANDIT).make_pool(seeds, threads)

    agent = builder.make_agent(config, env.spec)
    play = make_host_evaluation(env._replace(make_pool=make_pool), agent, config)
    episodes = play(agent.init(jax.random.key(0)), jax.random.key(1), lambda _: None)
    return episodes, sizes


@pytest.mark.parametrize(("num_envs", "places"), [(4, 4), (8, 6), (16, 11)])
def test_an_evaluation_starts_no_more_processes_than_training(num_envs, places):
    """Rounds are of equal size, and each episode is the one that it would be in a large pool."""
    at_once, (everything,) = evaluate(num_envs, in_processes=False)
    in_rounds, sizes = evaluate(num_envs, in_processes=True)
    assert (everything, sizes) == (11, [places])
    assert len(set(at_once.ret)) > 3
    assert in_rounds.complete.all()
    for one, other in zip(at_once, in_rounds, strict=True):
        np.testing.assert_array_equal(one, other)
