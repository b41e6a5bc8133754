"""Whole updates beside ones built from rlax and optax alone, from the same weights and experience.

benchmarks/conformance.py does the same with PureJaxRL's PPO.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax

from podracer import envs
from podracer.agents import AGENTS
from podracer.learning.learner import make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.nets import actor_critic as nets
from podracer.types import Devices, TimeStep, TrainState, Trajectory
from tests import references
from tests.helpers import make_config

T, B = 12, 6


def experience(carry):
    """A random trajectory with terminated episodes alone: rlax knows no other end."""
    rng = np.random.default_rng(3)
    stream = references.random_stream(rng, T, B, next_step=False, truncate=0.0).timestep
    observation = jnp.asarray(rng.normal(size=(T + 1, B, 1)), jnp.float32)
    timestep = TimeStep(observation, *map(jnp.asarray, (stream.reward, stream.discount)),
                        jnp.asarray(stream.first))  # fmt: skip
    action = jnp.asarray(rng.integers(0, 2, (T, B)))
    log_prob = jnp.log(jnp.asarray(rng.uniform(0.2, 0.9, (T, B)), jnp.float32))
    return Trajectory(timestep, action, {"log_prob": log_prob}, carry)


def vtrace_loss(network, trajectory, params):
    """IMPALA's loss, https://arxiv.org/abs/1802.01561, as means."""
    timestep, action = trajectory.timestep, trajectory.action
    _, logits, values = network.apply(params, (), timestep.observation, timestep.first)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), action[..., None], -1)[..., 0]
    rho = jax.lax.stop_gradient(jnp.exp(log_prob - trajectory.extras["log_prob"]))
    out = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=1, out_axes=1)(
        values[:-1], values[1:], timestep.reward[1:], 0.9 * timestep.discount[1:], rho
    )
    p = jax.nn.softmax(logits[:-1])
    entropy = -(p * jnp.log(p)).sum(-1).mean()
    policy = -(jax.lax.stop_gradient(out.pg_advantage) * log_prob).mean()
    return policy + 0.7 * 0.5 * (out.errors**2).mean() - 0.03 * entropy


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_an_update_of_vtrace_is_that_of_rlax_and_optax(name):
    epochs = 3
    config = make_config(
        agent="vtrace", vtrace__clip=0.0, discount=0.9, value_cost=0.7, entropy_cost=0.03,
        num_envs=B, unroll_length=T, num_epochs=epochs, optimizer=name, learning_rate=0.01,
        anneal=False, max_grad_norm=0.1,
    )  # fmt: skip
    spec = envs.make_environment("dummy:sign", {}, {}).spec
    agent = AGENTS["vtrace"].make(spec, config.settings, config.vtrace, Devices())
    optimizer = make_optimizer(config.optimization, agent)
    schedule = make_schedule(config.optimization, 1, T * B)
    update = make_update(agent, optimizer, schedule=schedule, devices=Devices())
    weights = agent.init(jax.random.key(0))
    start = TrainState(weights, (), optimizer.init(weights.params), jnp.int32(0))
    trajectory = experience(agent.carry(jnp.arange(B)))
    ours, _, _ = jax.jit(update)(start, (), trajectory, jax.random.key(1))

    network = nets.make_network(spec, config.network)
    rule = {
        "adam": optax.scale_by_adam(eps=1e-5),
        "rmsprop": optax.scale_by_rms(decay=0.99, eps=1e-5, eps_in_sqrt=True),
    }[name]
    chain = optax.chain(optax.clip_by_global_norm(0.1), rule, optax.scale(-0.01))
    params, state = weights.params, chain.init(weights.params)
    gradient = jax.jit(jax.grad(lambda p: vtrace_loss(network, trajectory, p)))
    for _ in range(epochs):
        updates, state = chain.update(gradient(params), state)
        params = optax.apply_updates(params, updates)
    for a, b, before in zip(*map(jax.tree.leaves, (ours.weights.params, params, weights.params)),
                            strict=True):  # fmt: skip
        assert np.abs(a - before).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=2e-6)
