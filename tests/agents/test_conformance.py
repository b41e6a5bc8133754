"""Whole updates beside ones built from rlax and optax alone, from the same weights and experience.

benchmarks/conformance.py does the same with PureJaxRL's PPO.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax

from podracer import envs
from podracer.agents import AGENTS, r2d2, returns, transitions
from podracer.learning.learner import make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.nets import actor_critic as nets
from podracer.nets.policy_critic import make_policy_critic
from podracer.nets.q_network import make_q_network
from podracer.types import Box, Devices, Discrete, Source, Spec, TimeStep, TrainState, Trajectory
from tests import references
from tests.helpers import make_config

T, B = 12, 6
# The target network is copied after the second of three gradient steps.
STEPS, PERIOD, GAMMA = 3, 2, 0.9


def experience(carry):
    """A random trajectory with terminated episodes alone: rlax knows no other end."""
    rng = np.random.default_rng(3)
    stream = references.random_stream(rng, T, B, next_step=False, truncate=0.0).timestep
    observation = jnp.asarray(rng.normal(size=(T + 1, B, 1)), jnp.float32)
    timestep = TimeStep(observation, *map(jnp.asarray, (stream.reward, stream.discount)),
                        jnp.asarray(stream.first))  # fmt: skip
    action = jnp.asarray(rng.integers(0, 2, (T, B)))
    log_prob = jnp.log(jnp.asarray(rng.uniform(0.2, 0.9, (T, B)), jnp.float32))
    return Trajectory(timestep, action, {"log_prob": log_prob}, carry, jnp.arange(action.shape[1]))


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


def make_vtrace_loss(network, trajectory, before):
    del before  # Targets are computed in each gradient step.
    return partial(vtrace_loss, network, trajectory)


def make_q_lambda_loss(network, trajectory, before):
    """The squared errors of Q(lambda), whose targets are fixed before the update."""
    timestep, action = trajectory.timestep, trajectory.action

    def values(params):
        return network.apply(params, (), timestep.observation, timestep.first, None)[1]

    def chosen(q):
        return jnp.take_along_axis(q[:-1], action[..., None], -1)[..., 0]

    q, reward, discount = values(before), timestep.reward[1:], 0.9 * timestep.discount[1:]
    errors = jax.vmap(lambda *x: rlax.q_lambda(*x, 0.8), 1, 1)(
        q[:-1], action, reward, discount, q[1:]
    )
    target = chosen(q) + errors
    return lambda params: 0.5 * ((target - chosen(values(params))) ** 2).mean()


ON_POLICY = {
    "vtrace": (
        lambda spec, config: nets.make_network(spec, config.network),
        make_vtrace_loss,
        {"vtrace__clip": 0.0},
    ),
    "q_lambda": (
        lambda spec, config: make_q_network(spec, config.network, dueling=False),
        make_q_lambda_loss,
        {"q_lambda__lambda_": 0.8},
    ),
}


@pytest.mark.parametrize(
    ("agent_name", "name"), [("vtrace", "adam"), ("vtrace", "rmsprop"), ("q_lambda", "adam")]
)
def test_an_update_without_replay_is_that_of_rlax_and_optax(agent_name, name):
    epochs = 3
    make_own_network, make_loss, own = ON_POLICY[agent_name]
    config = make_config(
        agent=agent_name, discount=0.9, value_cost=0.7, entropy_cost=0.03,
        num_envs=B, unroll_length=T, num_epochs=epochs, optimizer=name, learning_rate=0.01,
        anneal=False, max_grad_norm=0.1, **own,
    )  # fmt: skip
    spec = envs.make_environment("dummy:sign", {}, {}).spec
    agent = AGENTS[agent_name].make(spec, config.settings, config.agent_config, Devices())
    optimizer = make_optimizer(config.optimization, agent)
    schedule = make_schedule(config.optimization, 1, T * B)
    update = make_update(agent, optimizer, schedule=schedule, devices=Devices())
    weights = jax.jit(agent.init)(jax.random.key(0))
    # The last layer of a new network is almost zero, so that all actions have the same value.
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype("f") / 4, weights.params)
    weights = weights.replace(params=noisy)
    start = TrainState(weights, (), optimizer.init(noisy), jnp.int32(0))
    trajectory = experience(agent.carry(jnp.arange(B)))
    ours, _, _ = jax.jit(update)(start, (), trajectory, jax.random.key(1))

    loss = make_loss(make_own_network(spec, config), trajectory, weights.params)
    rule = {
        "adam": optax.scale_by_adam(eps=1e-5),
        "rmsprop": optax.scale_by_rms(decay=0.99, eps=1e-5, eps_in_sqrt=True),
    }[name]
    chain = optax.chain(optax.clip_by_global_norm(0.1), rule, optax.scale(-0.01))
    params, state = weights.params, chain.init(weights.params)

    @jax.jit
    def reference(params, state):
        gradient = jax.grad(loss)(params)
        updates, state = chain.update(gradient, state)
        return optax.apply_updates(params, updates), state

    for _ in range(epochs):
        params, state = reference(params, state)
    for a, b, before in zip(*map(jax.tree.leaves, (ours.weights.params, params, weights.params)),
                            strict=True):  # fmt: skip
        assert np.abs(a - before).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=2e-6)


def fixed_source(batches):
    """A source whose gradient step i learns from the i-th batch."""
    return Source(
        steps=STEPS,
        init=lambda trajectory: (),
        add=lambda source, train_state, trajectory, key: ((), train_state.weights.stats),
        sample=lambda source, train_state, key, i: (jax.tree.map(lambda x: x[i], batches), (), {}),
        update=lambda source, ticket, priorities: (),
        finish=lambda source: ((), {}),
    )


def random_transitions(rng, actions):
    """Batches of ``B`` transitions with observations of three numbers."""
    target = returns.NStep(
        jnp.asarray(rng.normal(size=(STEPS, B)), jnp.float32),
        jnp.asarray(GAMMA * rng.integers(0, 2, (STEPS, B)), jnp.float32),
        jnp.ones((STEPS, B), jnp.int32),
        jnp.ones((STEPS, B)),
    )
    importance = jnp.asarray(rng.uniform(0.2, 1, (STEPS, B)), jnp.float32)
    observation = jnp.asarray(rng.normal(size=(STEPS, 2, B, 3)), jnp.float32)
    return transitions.Batch(observation, actions, target, importance)


def dqn_case(rng, spec, config):
    network = make_q_network(spec, config.network, dueling=False)
    batches = random_transitions(rng, jnp.asarray(rng.integers(0, 3, (STEPS, B))))

    def gradient(params, target, batch):
        def loss(params):
            (q, selector), (_, value) = (
                network.apply(p, (), batch.observation, jnp.zeros((2, B), bool), None)[1]
                for p in (params, target)
            )
            n_step = (batch.target.reward, batch.target.discount)
            error = jax.vmap(rlax.double_q_learning)(q, batch.action, *n_step, value, selector)
            return (batch.importance * rlax.huber_loss(error)).mean()

        return jax.grad(loss)(params)

    return batches, gradient


def r2d2_case(rng, spec, config):
    """Ends of episodes are in the discounts; memory is reset by ``first``."""
    network = make_q_network(spec, config.network, dueling=True, extra=4)
    shape, burn_in = (STEPS, T + 1, B), config.r2d2.burn_in
    first = jnp.asarray(rng.random(shape) < 0.2)
    noise = [jnp.asarray(rng.normal(size=(*shape, *n)), jnp.float32) for n in ((3,), (), (4,))]
    observation, reward, inputs = noise
    batches = r2d2.Batch(
        observation,
        TimeStep((), reward, 1.0 - first, first),
        jnp.asarray(rng.integers(0, 3, shape)),
        inputs,
        jnp.asarray(rng.normal(size=(STEPS, B, config.network.core_size)), jnp.float32),
        jnp.asarray(rng.uniform(0.2, 1, (STEPS, B)), jnp.float32),
    )

    def values(params, batch):
        memory, parts = batch.memory, []
        for part in (slice(0, burn_in), slice(burn_in, None)):
            inputs = batch.observation[part], batch.timestep.first[part], batch.inputs[part]
            memory, q = network.apply(params, jax.lax.stop_gradient(memory), *inputs)
            parts.append(q)
        return parts[1]

    def gradient(params, target, batch):
        def loss(params):
            q, later = values(params, batch), values(target, batch)
            now = (batch.action[burn_in:-1], later[1:], q[1:].argmax(-1))
            reward = batch.timestep.reward[burn_in + 1 :]
            discount = GAMMA * batch.timestep.discount[burn_in + 1 :]
            learn = jax.vmap(
                lambda *x: rlax.transformed_n_step_q_learning(
                    *x, config.r2d2.n_step, tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR
                ),
                1,
                1,
            )
            error = learn(q[:-1], *now, reward, discount)
            return (batch.importance * 0.5 * error**2).mean()

        return jax.grad(loss)(params)

    return batches, gradient


def d4pg_case(rng, spec, config):
    own = config.d4pg
    network = make_policy_critic(
        spec,
        config.network,
        policy_hidden=own.policy_hidden,
        critic_hidden=own.critic_hidden,
        critics=1,
        atoms=own.atoms,
    )
    actions = jnp.asarray(rng.uniform(-1, 1, (STEPS, B, 2)), jnp.float32)
    batches = random_transitions(rng, actions)
    atoms = jnp.linspace(own.v_min, own.v_max, own.atoms)

    def gradient(params, target, batch):
        now, later = batch.observation[:1], batch.observation[1:]

        def critic_loss(params):
            logits = network.critic(params, network.features(params, now), batch.action[None])
            features = network.features(target, later)
            next_logits = network.critic(target, features, network.policy(target, features))
            value = batch.target.reward[:, None] + batch.target.discount[:, None] * atoms
            expected = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(
                value, jax.nn.softmax(next_logits[0, 0]), atoms
            )
            losses = optax.softmax_cross_entropy(logits[0, 0], expected)
            return (batch.importance * losses).mean()

        def policy_loss(params_of_policy):
            features = network.features(params, now)
            action = network.policy({**params, "policy": params_of_policy}, features)

            def q(action):
                logits = network.critic(params, features, action)[0, 0]
                return (jax.nn.softmax(logits) * atoms).sum()

            # rlax.dpg_loss has this gradient, but adds and subtracts the action, which rounds.
            return -(jax.grad(q)(jax.lax.stop_gradient(action)) * action).sum() / B

        policy = jax.grad(policy_loss)(params["policy"])
        return {**jax.grad(critic_loss)(params), "policy": policy}

    return batches, gradient


VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)
REPLAY = {
    "dqn": (dqn_case, Discrete(3), {"max_grad_norm": 0.1}),
    "r2d2": (
        r2d2_case,
        Discrete(3),
        {
            "network__core": "gru",
            "r2d2__burn_in": 4,
            "r2d2__trace": T - 4,
            "r2d2__n_step": 3,
            "max_grad_norm": 0.1,
        },
    ),
    "d4pg": (
        d4pg_case,
        Box((2,), -np.ones(2), np.ones(2)),
        {"d4pg__v_min": -2.0, "d4pg__v_max": 2.0, "max_grad_norm": 0.0},
    ),
}


@pytest.mark.parametrize(
    "name", [x if x != "d4pg" else pytest.param(x, marks=pytest.mark.slow) for x in REPLAY]
)
def test_an_update_of_an_agent_with_replay_is_that_of_rlax_and_optax(name):
    make_case, action, changes = REPLAY[name]
    config = make_config(
        agent=name, discount=GAMMA, learning_rate=0.01, anneal=False, replay__capacity=800,
        replay__begin=100, epsilon=1e-3, **{f"{name}__target_period": PERIOD}, **changes,
    )  # fmt: skip
    spec = Spec(VECTOR, action)
    rng = np.random.default_rng(4)
    agent = AGENTS[name].make(spec, config.settings, config.agent_config, Devices())
    batches, gradient = make_case(rng, spec, config)
    agent = agent._replace(source=fixed_source(batches))
    optimizer = make_optimizer(config.optimization, agent)
    update = make_update(
        agent, optimizer, schedule=make_schedule(config.optimization, 1, B), devices=Devices()
    )
    init = jax.jit(agent.init)
    weights = init(jax.random.key(0))
    before, old = weights.params, init(jax.random.key(1)).params
    start = TrainState(weights, old, optimizer.init(before), jnp.int32(0))
    ours, _, _ = jax.jit(update)(start, (), None, jax.random.key(1))

    clip = config.max_grad_norm
    chain = optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(), optax.adam(0.01, eps=1e-3)
    )

    @jax.jit
    def reference(params, target, state, i):
        batch = jax.tree.map(lambda x: x[i], batches)
        updates, state = chain.update(gradient(params, target, batch), state)
        return optax.apply_updates(params, updates), state

    params, target, state = before, old, chain.init(before)
    for i in range(STEPS):
        params, state = reference(params, target, state, i)
        target = params if i + 1 == PERIOD else target
    # rlax's inverse of the rescaling subtracts numbers that are almost the same.
    tolerance = 2e-5 if name == "r2d2" else 3e-6
    for a, b, start in zip(*map(jax.tree.leaves, (ours.weights.params, params, before)),
                           strict=True):  # fmt: skip
        assert np.abs(a - start).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=tolerance)
    for a, b in zip(*map(jax.tree.leaves, (ours.target, target)), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)
