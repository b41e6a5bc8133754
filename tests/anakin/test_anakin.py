"""Anakin's compiled step: what the number of devices, a seed or a second run must not change."""

import functools
import re

import jax
import numpy as np
import pytest

from podracer.acting import unroll
from podracer.agents import r2d2
from podracer.anakin.state import Start
from podracer.nets import actor_critic
from podracer.nets.q_network import make_q_network
from podracer.training import builder
from podracer.xla_cpu import prng
from tests.helpers import make_config, make_run

AGENTS = pytest.mark.parametrize("agent", ["ppo", pytest.param("vtrace", marks=pytest.mark.slow)])


def flat(state) -> np.ndarray:
    """All weights of a state, in one array."""
    leaves = jax.tree.leaves(jax.device_get(state.train.weights))
    return np.concatenate([np.ravel(x) for x in leaves])


# A replay that is ready within a few updates.
REPLAY = {
    "updates_per_call": 4,
    "replay__capacity": 32 * 32,
    "replay__begin": 1,
    "replay__batch": 64,
    "replay__gradient_steps": 3,
    "replay__priority_exponent": 0.6,
}
OWN = {
    # Reached by some gradient steps and not by others: they stop on all devices or on none.
    "ppo": {"ppo__target_kl": 1e-5},
    "kl_penalty": {"agent": "ppo", "ppo__objective": "kl_penalty", "ppo__target_kl": 1e-5},
    "vtrace": {},
    "q_lambda": {},
    "dqn": {**REPLAY, "dqn__target_period": 2},
    "r2d2": {**REPLAY, "r2d2__burn_in": 4, "r2d2__trace": 8, "r2d2__target_period": 2},
    "muzero": {
        **REPLAY,
        "muzero__reanalyze": 0.5,
        "muzero__entropy__start": 0.5,
        "muzero__target_period": 2,
        "muzero__unroll": 2,
        "muzero__n_step": 3,
        "muzero__search__simulations": 4,
        # Some gradients are nearly zero, and Adam would divide their rounding by itself.
        "epsilon": 1e-3,
    },
    "alphazero": {"alphazero__search__simulations": 4, "normalize_rewards": False},
}


@functools.cache
def shared_run(agent, updates_per_call):
    """``make_run`` of a small run on four devices, compiled once for all tests."""
    config = make_config(
        agent=agent,
        num_envs=16,
        num_minibatches=4,
        # The number of updates is rounded up to whole calls, and must change nothing.
        anneal=False,
        updates_per_call=updates_per_call,
    )
    program, sizes, state, step = make_run(config, 4)
    return program, sizes, state, step.lower(state).compile()


@functools.cache
def cartpole_run(agent, core, num_devices):
    """``make_run`` with everything that may depend on the number of devices."""
    config = make_config(
        network__core=core,
        num_envs=32,
        num_minibatches=4,
        num_epochs=2,
        normalize_observations=True,
        learning_rate=1e-3,
        ppo__advantage_normalization="minibatch" if core == "gru" else "batch",
        **{"agent": agent, "normalize_rewards": True, "updates_per_call": 2, **OWN[agent]},
    )
    return make_run(config, num_devices)


@pytest.mark.parametrize(
    ("agent", "core", "numbers"),
    [
        ("ppo", "none", (8,)),
        pytest.param("dqn", "none", (8,), marks=pytest.mark.slow),
        pytest.param("r2d2", "gru", (2, 8), marks=pytest.mark.slow),
        pytest.param("q_lambda", "gru", (2, 8), marks=pytest.mark.slow),
        pytest.param("kl_penalty", "none", (8,), marks=pytest.mark.slow),
        pytest.param("muzero", "none", (8,), marks=pytest.mark.slow),
        pytest.param("alphazero", "none", (8,), marks=pytest.mark.slow),
        # Compiling for four meshes takes long, so .ci/run does it.
        pytest.param("ppo", "none", (2, 4, 8), marks=pytest.mark.slow),
        pytest.param("vtrace", "gru", (2, 4, 8), marks=pytest.mark.slow),
    ],
)
def test_devices_do_not_change_the_update(agent, core, numbers):
    """1 device with N environments = 2, 4, 8 devices with N in total, up to float rounding."""
    _, _, state, step = cartpole_run(agent, core, 1)
    one, one_metrics = jax.device_get(step(state))
    assert np.abs(flat(one) - flat(state)).max() > 1e-3
    if agent == "ppo":
        assert 0 < one_metrics.learner.losses["stopped"].mean() < 1
    for devices in numbers:
        _, _, state, step = cartpole_run(agent, core, devices)
        many, metrics = jax.device_get(step(state))
        np.testing.assert_allclose(flat(many), flat(one), atol=2e-5, rtol=1e-5)
        for name, value in one_metrics.learner.losses.items():
            np.testing.assert_allclose(metrics.learner.losses[name], value, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(metrics.episodes.episodes, one_metrics.episodes.episodes)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
            many.rollout.timestep,
            one.rollout.timestep,
        )


def test_environments_are_numbered_over_all_devices_and_begin_differently():
    for devices in (1, 8):
        _, _, state, _ = cartpole_run("ppo", "none", devices)
        np.testing.assert_array_equal(state.rollout.env_id, np.arange(32))
        observation = np.asarray(state.rollout.timestep.observation)
        assert len(np.unique(observation, axis=0)) == 32


@AGENTS
def test_a_seed_gives_the_same_bits_and_another_seed_other_weights(agent):
    program, _, _, step = shared_run(agent, 3)
    first, second, other = (step(program.init(Start(prng.key(seed), {})))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(flat(first), flat(second))
    assert (flat(first) != flat(other)).mean() > 0.5


def test_many_updates_in_one_call_equal_as_many_calls_of_one():
    (_, _, state, at_once), (_, _, _, singly) = shared_run("ppo", 3), shared_run("ppo", 1)
    expected, _ = at_once(state)
    for _ in range(3):
        state, _ = singly(state)
    np.testing.assert_allclose(flat(expected), flat(state), atol=1e-6)


def reduced(text: str) -> list[list[int]]:
    """The numbers of floats of all arrays of each all-reduce in a compiled program."""
    reduces = re.findall(r"= (\([^)]*\)|\S+) all-reduce(?:-start)?\(", text)
    return [[int(n) for n in re.findall(r"f32\[(\d+)\]", reduce)] for reduce in reduces]


@AGENTS
def test_compiled_step_has_one_reduce_per_gradient_step_and_no_callback(agent):
    _, _, state, step = shared_run(agent, 1)
    text = step.as_text()
    reduces = reduced(text)
    # The minibatch loop's body occurs once in the program, with one reduce of gradients and
    # metrics. The others are whole-batch advantage normalisation (PPO) and the episodes of all
    # updates, a few numbers each, which XLA may join.
    params = sum(x.size for x in jax.tree.leaves(state.train.weights.params))
    assert len([reduce for reduce in reduces if max(reduce) >= params]) == 1
    assert len(reduces) <= (3 if agent == "ppo" else 2)
    targets = re.findall(r'custom_call_target="([^"]*)"', text)
    assert not [target for target in targets if "callback" in target]
    assert not re.findall(r"= \S+ (?:infeed|outfeed|send|recv)\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dqn", "r2d2", "d4pg"])
def test_a_gradient_step_with_a_replay_reduces_all_parameters_at_once(agent):
    """D4PG's two optimizers have one gradient. The largest importance weight is a reduce of its
    own, as it precedes the loss."""
    env = {"env": "dummy:counting", "env_kwargs": {"continuous": agent == "d4pg"}}
    own = {"network__hidden": (64,), **OWN.get(agent, REPLAY)}
    _, _, state, step = make_run(make_config(agent=agent, num_envs=16, **env, **own), 4)
    reduces = reduced(step.lower(state).compile().as_text())
    params = sum(x.size for x in jax.tree.leaves(state.train.weights.params))
    assert len([reduce for reduce in reduces if sum(reduce) >= params]) == 1
    assert max(sum(x) for x in reduces if sum(x) < params) < params / 10


def test_step_is_traced_once_and_leaks_nothing():
    program, _, state, _ = shared_run("ppo", 1)
    traces = []

    def count(state):
        traces.append(1)
        return program.step(state)

    step = jax.jit(count)
    with jax.checking_leaks():
        state, _ = step(state)
    for _ in range(5):
        with jax.transfer_guard("disallow"):
            state, _ = step(state)
    assert len(traces) == 1


def test_no_two_environments_share_a_key(monkeypatch):
    """Over all environments, steps and updates, resets, staggering and evaluation of a program."""
    drawn = []
    env_keys = unroll.env_keys

    def spy(key, env_ids, count):
        keys = env_keys(key, env_ids, count)
        jax.debug.callback(lambda x: drawn.append(np.asarray(x)), jax.random.key_data(keys))
        return keys

    monkeypatch.setattr(unroll, "env_keys", spy)
    config = make_config(
        env="dummy:counting",
        num_envs=64,
        stagger=2,
        evaluation__max_steps=5,
        updates_per_call=3,
    )
    program, _, state, step = make_run(config, 4)
    state, _ = step(state)
    jax.block_until_ready((program.evaluate(state), step(state)))
    jax.effects_barrier()
    data = np.concatenate([x.reshape(-1, 2) for x in drawn])
    # Six unrolls of 64 environments at 8 steps of two keys, and all the rest.
    assert len(data) > 6 * 64 * 8 * 2
    assert len(np.unique(data, axis=0)) == len(data)


def test_stagger_spreads_the_ages_of_first_episodes():
    _, _, state, _ = make_run(make_config(num_envs=64, stagger=8), 2)
    ages = np.asarray(state.rollout.episode.length)
    assert len(np.unique(ages)) == 9
    _, _, state, _ = shared_run("ppo", 1)
    assert (np.asarray(state.rollout.episode.length) == 0).all()


def second_unroll(config):
    """A run's network state and its second unroll: ``(program, state, trajectory)``."""
    program, sizes, state, _ = make_run(config)
    one_unroll = jax.jit(
        lambda rollout, n: unroll.unroll(
            program.env,
            program.agent,
            state.train.weights,
            rollout,
            builder.update_keys(state.key, n)[0],
            sizes.unroll_length,
        )
    )
    rollout, _, _ = one_unroll(state.rollout, 0)
    _, trajectory, _ = one_unroll(rollout, 1)
    return program, state, trajectory


def test_a_recurrent_unroll_reproduces_the_log_probabilities_of_acting():
    """The learner's unroll from the stored state gives the log-probabilities of the actor's."""
    config = make_config(env="dummy:counting", network__core="lstm")
    program, state, trajectory = second_unroll(config)
    network = actor_critic.make_network(program.env.spec, config.network)
    _, policy, _ = jax.jit(network.apply)(
        state.train.weights.params,
        trajectory.carry.network,
        trajectory.timestep.observation[:-1],
        trajectory.timestep.first[:-1],
    )
    log_prob = network.distribution(policy).log_prob(trajectory.action)
    np.testing.assert_allclose(log_prob, trajectory.extras["log_prob"], atol=1e-5)
    assert np.abs(jax.tree.leaves(trajectory.carry.network)[0]).max() > 0


def test_an_unroll_of_r2d2_reproduces_the_values_of_acting():
    """From the stored memory, and the last action and reward."""
    config = make_config(env="dummy:counting", agent="r2d2", network__core="lstm", **OWN["r2d2"])
    program, state, trajectory = second_unroll(config)
    carry, timestep = trajectory.carry, jax.tree.map(lambda x: x[:-1], trajectory.timestep)
    network = make_q_network(program.env.spec, config.network, dueling=True, extra=3)
    last = np.concatenate([carry.action[None], trajectory.action[:-1]])
    weights = state.train.weights
    _, q = jax.jit(network.apply)(
        weights.params,
        carry.memory,
        timestep.observation,
        timestep.first,
        r2d2.previous(2, weights.stats, last, timestep),
    )
    chosen = np.take_along_axis(np.asarray(q), np.asarray(trajectory.action)[..., None], -1)
    np.testing.assert_allclose(chosen[..., 0], trajectory.extras["chosen"], atol=1e-5)
    assert np.abs(jax.tree.leaves(carry.memory)[0]).max() > 0
    assert timestep.first.any()
