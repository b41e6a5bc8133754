"""What actor threads send to the learner."""

import itertools

import jax
import numpy as np
import pytest

from podracer.agents import returns
from podracer.nets import actor_critic
from tests.sebulba import faulty
from tests.sebulba.runs import SOLO, act, join_parts, sebulba_config


@pytest.fixture(scope="module")
def echoes():
    """Three outputs of an actor thread, of 16 steps in four environments whose rewards are the
    actions taken."""
    config = sebulba_config(num_envs=4, unroll_length=16, **SOLO)
    _, _, outputs = act(config, 3, faulty.make_environment(faulty.EchoPool))
    return outputs


def test_rewards_belong_to_the_action_that_earned_them(echoes):
    for output in echoes:
        trajectory = join_parts(output)
        step = trajectory.timestep.observation[:-1, :, 0]
        last = step == faulty.LENGTH
        reward = trajectory.timestep.reward[1:]
        np.testing.assert_array_equal(reward, np.where(last, 0, 10 * step + trajectory.action))
        assert trajectory.action.std() > 0
        # The step of an autoreset teaches nothing, and no other step is left out.
        np.testing.assert_array_equal(returns.valid(trajectory.timestep), ~last)
        # The value of a truncated episode is bootstrapped from its true last observation.
        assert (trajectory.timestep.discount == 1).all()
        np.testing.assert_array_equal(trajectory.timestep.first[1:], last)


def test_unrolls_follow_each_other_without_a_gap(echoes):
    for before, after in itertools.pairwise(echoes):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[-1], b[0]),
            join_parts(before).timestep,
            join_parts(after).timestep,
        )


def test_unrolls_of_whole_episodes_begin_with_new_ones():
    config = sebulba_config(num_envs=4, unroll_length=10, whole_episodes=True, **SOLO)
    _, _, outputs = act(config, 3, faulty.make_environment(faulty.EchoPool))
    for output in outputs:
        timestep = join_parts(output).timestep
        np.testing.assert_array_equal(timestep.observation[:, 0, 0], [*range(8), *range(3)])
        assert timestep.first[0].all()
        np.testing.assert_array_equal(
            returns.valid(returns.only_whole_episodes(timestep))[:, 0], [True] * 7 + [False] * 3
        )
        # Only games that ended are counted.
        assert output.episodes.episodes == 4
        assert output.episodes.length == 4 * 7


def test_games_are_summed_up_as_they_were_played(echoes):
    reward = np.concatenate([join_parts(x).timestep.reward[1:] for x in echoes])
    # 48 steps are 6 games of 7 steps and a reset each.
    assert sum(x.episodes.episodes for x in echoes) == 6 * 4
    assert sum(x.episodes.length for x in echoes) == 6 * 4 * 7
    np.testing.assert_allclose(sum(x.episodes.ret for x in echoes), reward.sum())


def test_the_recurrent_state_stays_on_the_actor_device_and_is_stored_with_each_unroll():
    """The learner's unroll from the stored state gives the log-probabilities of the actor's."""
    config = sebulba_config(
        num_envs=8,
        network__core="lstm",
        sebulba__actor_devices=(1,),
        sebulba__learner_devices=(2, 3),
        sebulba__threads=1,
    )
    run, weights, outputs = act(config, 3)
    network = actor_critic.make_network(run.env.spec, config.network)
    apply = jax.jit(network.apply)
    for n, output in enumerate(outputs):
        assert [next(iter(part.action.devices())).id for part in output.parts] == [2, 3]
        trajectory = join_parts(output)
        _, policy, _ = apply(
            jax.device_get(weights.params),
            trajectory.carry.network,
            trajectory.timestep.observation[:-1],
            trajectory.timestep.first[:-1],
        )
        log_prob = network.distribution(policy).log_prob(trajectory.action)
        np.testing.assert_allclose(log_prob, trajectory.extras["log_prob"], atol=1e-5)
        assert (np.abs(jax.tree.leaves(trajectory.carry.network)[0]).max() > 0) == (n > 0)


def test_frames_travel_as_bytes_and_the_newest_alone_give_the_same_unrolls():
    plain, newest = (
        [
            join_parts(output)
            for output in act(
                sebulba_config(
                    env="envpool:Breakout-v5",
                    env_kwargs={"episodic_life": True, "use_fire_reset": True},
                    network__torso="pixels",
                    num_envs=4,
                    unroll_length=80,
                    sebulba__newest_frame=newest_frame,
                    **SOLO,
                ),
                2,
            )[-1]
        ]
        for newest_frame in (False, True)
    )
    for one, other in zip(plain, newest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
        assert one.timestep.observation.dtype == np.uint8
    assert plain[1].timestep.first.any()
