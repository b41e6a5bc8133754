"""Unrolls in environments written in JAX: what a learner is given."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.acting import unroll
from podracer.acting.statistics import Episode
from podracer.types import Environment, TimeStep
from tests.helpers import make_config, make_run


@pytest.mark.parametrize("next_step", [False, True], ids=["same-step", "next-step"])
@pytest.mark.parametrize("truncate", [False, True])
def test_counting_environment_counts_across_unrolls(next_step, truncate):
    """Catches a wrong reset, a batch axis that is mixed up, and time steps lost between unrolls."""
    config = make_config(
        env="dummy:counting", env_kwargs={"next_step": next_step, "truncate": truncate}, num_envs=4
    )
    env = envs.make_environment(config.env, config.env_kwargs, {})
    program, sizes, state, _ = make_run(config)
    act = jax.jit(
        lambda state, key: unroll.unroll(
            env, program.agent, state.train.weights, state.rollout, key, sizes.unroll_length
        )
    )
    last = None
    for i in range(4):
        envs_state, trajectory, _ = act(state, jax.random.fold_in(state.key, i))
        state = state.replace(rollout=envs_state)
        count = np.asarray(trajectory.timestep.observation[..., 0])
        first = np.asarray(trajectory.timestep.first)
        length = np.asarray(trajectory.timestep.observation[..., 1])
        np.testing.assert_array_equal(count[1:], (count[:-1] + 1) * ~first[1:])
        assert (length[1:] == length[:-1])[~first[1:]].all()
        assert first[1:].any()
        ended = np.asarray(trajectory.timestep.discount[1:]) == 0
        assert ended.any() != truncate
        if last is not None:
            np.testing.assert_array_equal(trajectory.timestep.observation[0], last)
        last = np.asarray(trajectory.timestep.observation[-1])
    # Lengths differ between environments, so that exchanging two of them would show.
    assert len(np.unique(length)) > 1


def test_unrolls_of_whole_episodes_begin_with_new_ones():
    config = make_config(env="dummy:counting", num_envs=4, unroll_length=16, whole_episodes=True)
    program, _, state, step = make_run(config)
    act = partial(unroll.unroll, program.env, program.agent, length=16, whole_episodes=True)
    act, starts = jax.jit(act), []
    for _ in range(2):
        key = jax.random.fold_in(state.key, state.train.step)
        _, trajectory, _ = act(state.train.weights, state.rollout, key)
        assert trajectory.timestep.first[0].all()
        np.testing.assert_array_equal(trajectory.timestep.observation[0, :, 0], 0)
        starts.append(np.asarray(trajectory.timestep.observation[0, :, 1]))
        state, metrics = step(state)
        assert np.isfinite(metrics.learner.losses["total"]).all()
    # Each unroll draws other episodes.
    assert (starts[0] != starts[1]).any()


def test_agent_and_environment_draw_from_different_keys():
    """The environment observes its own key, and the agent reports the key that it acts with."""

    def arrive(key):
        zero = jnp.float32(0)
        return (), TimeStep(jax.random.key_data(key), zero, zero, jnp.bool_(False))

    class Agent:
        def act(self, weights, carry, timestep, keys):
            return carry, jnp.zeros(2), jax.random.key_data(keys)

    env = Environment(None, arrive, lambda key, state, action: arrive(key))
    env_state, timestep = jax.vmap(arrive)(jax.random.split(jax.random.key(1)))
    zeros = jnp.zeros(2)
    state = unroll.RolloutState(jnp.arange(2), env_state, timestep, (), Episode(zeros, zeros))
    _, trajectory, _ = unroll.unroll(env, Agent(), None, state, jax.random.key(0), 3)
    keys = np.concatenate([trajectory.extras, trajectory.timestep.observation[1:]]).reshape(-1, 2)
    assert len(np.unique(keys, axis=0)) == len(keys) == 2 * 3 * 2
