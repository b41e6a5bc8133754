"""Exploration by epsilon, a different one in each environment; target networks; Q(lambda)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.agents import AGENTS, dqn
from podracer.learning.learner import make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.nets.q_network import make_q_network
from podracer.types import Devices, TimeStep, TrainState, Trajectory
from tests import references
from tests.helpers import make_config

DRAWS = 4000


def shares_of_random_actions(epsilon: float, carry=None, *, greedy: bool = False):
    """By environment, of which there are four, and four more in an evaluation."""
    config = make_config(
        agent="dqn",
        num_envs=4,
        dqn__epsilon=epsilon,
        dqn__epsilon_alpha=3.0,
        dqn__evaluation_epsilon=0.1,
    )
    env = envs.make_environment("dummy:sign", {}, {})
    agent = dqn.make(env.spec, config.settings, config.agent_config, Devices())
    carry = agent.carry(jnp.repeat(jnp.arange(8), DRAWS)) if carry is None else carry
    batch = 8 * DRAWS
    zeros = jnp.zeros(batch)
    timestep = TimeStep(jnp.ones((batch, 1)), zeros, zeros + 1, zeros.astype(bool))
    keys = jax.random.split(jax.random.key(0), batch)
    weights = jax.jit(agent.init)(jax.random.key(1))
    act = jax.jit(agent.act, static_argnames="greedy")
    carry, action, _ = act(weights, carry, timestep, keys, greedy=greedy)
    # A random action is the best one in half of all cases.
    usual = np.bincount(action).argmax()
    return 2 * (np.asarray(action) != usual).reshape(8, DRAWS).mean(1), carry


def test_environments_explore_by_their_own_epsilon():
    """The exponents of Ape-X (https://arxiv.org/abs/1803.00933), section 4.1."""
    shares, carry = shares_of_random_actions(0.4)
    expected = [0.4 ** (1 + 3 * i / 3) for i in range(4)]
    np.testing.assert_allclose(shares, 2 * expected, atol=0.04)
    # A changed setting applies to a run that is resumed.
    shares, _ = shares_of_random_actions(1.0, carry)
    np.testing.assert_allclose(shares, 1, atol=0.05)
    shares, _ = shares_of_random_actions(0.4, carry, greedy=True)
    assert shares.mean() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("agent", ["dqn", "r2d2"])
def test_target_networks_are_copied_after_their_period(agent):
    config = make_config(agent=agent, **{f"{agent}__target_period": 3})
    spec = envs.make_environment("dummy:sign", {}, {}).spec
    made = AGENTS[agent].make(spec, config.settings, config.agent_config, Devices())
    target, copied = {"x": jnp.zeros(())}, []
    for step in range(1, 8):
        target = made.target.update(target, {"x": jnp.float32(step)}, {}, jnp.int32(step))
        copied.append(float(target["x"]))
    assert copied == [0, 0, 3, 3, 3, 6, 6]


@pytest.mark.parametrize("next_step", [False, True], ids=["same-step", "next-step"])
def test_q_lambda_learns_the_lambda_returns_of_each_episode(next_step):
    """The loss of an update, in which half of all episodes are truncated."""
    length, batch, lambda_ = 23, 7, 0.8
    config = make_config(
        agent="q_lambda", discount=0.9, q_lambda__lambda_=lambda_, num_envs=batch,
        unroll_length=length, anneal=False,
    )  # fmt: skip
    spec = envs.make_environment("dummy:sign", {}, {}).spec
    agent = AGENTS["q_lambda"].make(spec, config.settings, config.agent_config, Devices())
    optimizer = make_optimizer(config.optimization, agent)
    schedule = make_schedule(config.optimization, 1, length * batch)
    rng = np.random.default_rng(0)
    weights = jax.jit(agent.init)(jax.random.key(0))
    # The last layer of a new network is almost zero, so that all actions have the same value.
    noisy = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype("f"), weights.params)
    weights = weights.replace(params=noisy)
    start = TrainState(weights, (), optimizer.init(noisy), jnp.int32(0))
    stream = references.random_stream(rng, length, batch, next_step=next_step, truncate=0.5)
    observation = jnp.asarray(rng.normal(size=(length + 1, batch, 1)), jnp.float32)
    timestep = jax.tree.map(jnp.asarray, stream.timestep).replace(observation=observation)
    action = jnp.asarray(rng.integers(0, 2, (length, batch)))
    trajectory = Trajectory(timestep, action, {}, agent.carry(jnp.arange(batch)), jnp.arange(batch))
    update = make_update(agent, optimizer, schedule=schedule, devices=Devices())
    _, _, metrics = jax.jit(update)(start, (), trajectory, jax.random.key(1))

    network = make_q_network(spec, config.network, dueling=False)
    q = np.asarray(network.apply(weights.params, (), observation, timestep.first, None)[1])
    advantage, valid = references.gae(stream, q.max(-1), 0.9, lambda_)
    target = advantage + q.max(-1)[:-1]
    chosen = np.take_along_axis(q[:-1], np.asarray(action)[..., None], -1)[..., 0]
    assert 0.6 < valid.mean() < 1
    expected = 0.5 * (valid * (target - chosen) ** 2).mean()
    np.testing.assert_allclose(metrics.losses["total"], expected, rtol=1e-5)
