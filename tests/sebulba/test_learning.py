"""Sebulba learns what Anakin learns, whatever the devices, threads and timing."""

import collections
import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.acting import unroll
from podracer.envs import dummy
from podracer.sebulba import learner, setup
from podracer.sebulba.evaluation import EvaluationThread
from podracer.sebulba.pipeline import ActorOutput, ParameterServer
from podracer.sebulba.threads import SupervisedQueue
from podracer.training import builder
from tests.anakin.test_anakin import flat
from tests.envs.dictionaries import Dictionary
from tests.helpers import make_config, make_run
from tests.sebulba import faulty
from tests.sebulba.runs import (
    ONE_AND_TWO,
    SOLO,
    TWO_AND_TWO,
    act,
    join_parts,
    make_setup,
    sebulba_config,
    train,
    weights_of,
)


def make_anakin(monkeypatch, masked=False, **changes):
    """Config, initial state and step of Anakin in the counting environment or that with masks,
    whose first episodes Sebulba's environment of that name then has as well."""
    where = {"env": "dummy:counting"}
    kwargs = {"env_kwargs": {"next_step": True, **changes.pop("env_kwargs", {})}}
    if masked:
        where, kwargs = {"env": "dummy:masked"}, {}
    config = make_config(**where, **kwargs, **changes)
    _, _, state, step = make_run(config)
    if masked:
        phases, _ = map(np.asarray, state.rollout.env_state)
    else:
        phases = np.asarray(state.rollout.timestep.observation[:, 1]) - 5
    monkeypatch.setattr(
        setup, "pool_seeds", lambda _, env_ids, *__: phases[env_ids % len(phases)].astype(int)
    )
    return config, state, step


@pytest.mark.parametrize(
    ("agent", "core", "env"),
    [
        pytest.param("vtrace", "none", "counting", marks=pytest.mark.slow),
        ("ppo", "none", "masked"),
        pytest.param("ppo", "gru", "counting", marks=pytest.mark.slow),
        pytest.param("dqn", "none", "masked", marks=pytest.mark.slow),
        pytest.param("r2d2", "lstm", "masked", marks=pytest.mark.slow),
        pytest.param("d4pg", "none", "counting", marks=pytest.mark.slow),
        pytest.param("q_lambda", "gru", "masked", marks=pytest.mark.slow),
        pytest.param("muzero", "none", "masked", marks=pytest.mark.weekly),
    ],
)
def test_without_lag_sebulba_makes_the_updates_of_anakin(agent, core, env, monkeypatch):
    changes = {
        "agent": agent,
        "network__core": core,
        "num_envs": 16,
        "total_steps": 5 * 16 * 8,
        "num_minibatches": 2,
        "normalize_observations": True,
        "normalize_rewards": True,
        "replay__begin": 16 * 8 * 2,
        "replay__batch": 16,
        "r2d2__burn_in": 4,
        "r2d2__trace": 8,
    }
    if agent == "d4pg":
        changes["env_kwargs"] = {"continuous": True}
    _, state, step = make_anakin(monkeypatch, env == "masked", **changes)
    for _ in range(5):
        state, anakin = step(state)
    result = train(sebulba_config(env=f"dummy:{env}", **changes, **ONE_AND_TWO, sebulba__lag=0))
    np.testing.assert_allclose(weights_of(result), flat(state), atol=2e-5)
    last = result.metrics[-1]
    for name, value in anakin.learner.losses.items():
        logged = last[name if "/" in name else f"loss/{name}"]
        np.testing.assert_allclose(logged, value[-1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_an_actor_thread_collects_the_trajectories_of_anakin(monkeypatch):
    changes = {"num_envs": 16, "unroll_length": 12, "network__core": "gru"}
    config, state, _ = make_anakin(monkeypatch, **changes)
    env = envs.make_environment(config.env, config.env_kwargs, {})
    agent = builder.make_agent(config, env.spec)
    one_unroll = jax.jit(lambda *arguments: unroll.unroll(env, agent, *arguments, 12))
    _, weights, outputs = act(sebulba_config(**changes, **SOLO), 3)
    rollout = state.rollout
    for n, output in enumerate(outputs):
        key, _ = builder.update_keys(state.key, n)
        rollout, expected, _ = one_unroll(weights, rollout, key)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            join_parts(output),
            jax.device_get(expected),
        )
        assert expected.timestep.first.sum() > 0


SPLITS = [
    pytest.param((0, 1), tuple(range(2, 8)), 2, marks=pytest.mark.slow),
    pytest.param((0,), tuple(range(1, 8)), 4, marks=pytest.mark.slow),
    pytest.param((0, 1, 2, 3), (4, 5, 6, 7), 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("actors", "learners", "threads"), SPLITS)
@pytest.mark.parametrize("agent", ["ppo", pytest.param("vtrace", marks=pytest.mark.slow)])
def test_devices_do_not_change_what_is_learned(agent, actors, learners, threads):
    """Devices split into 2 + 6, 1 + 7 or 4 + 4 learn what one shared device learns."""

    def result(actors, learners, threads):
        config = sebulba_config(
            agent=agent,
            num_envs=336,
            total_steps=4 * 336 * 8,
            num_minibatches=2,
            learning_rate=1e-3,
            normalize_observations=True,
            sebulba__actor_devices=actors,
            sebulba__learner_devices=learners,
            sebulba__threads=threads,
        )
        return train(config)

    shared, other = result((0,), (0,), 4), result(actors, learners, threads)
    np.testing.assert_allclose(weights_of(other), weights_of(shared), atol=2e-5)
    for a, b in zip(other.metrics, shared.metrics, strict=True):
        assert a["train/episodes"] == b["train/episodes"]
        np.testing.assert_allclose(a["loss/total"], b["loss/total"], rtol=1e-3, atol=1e-4)


# Eight updates with two learner devices and four actor threads.
PIPELINE = {"num_envs": 24, "total_steps": 8 * 24 * 8, **TWO_AND_TWO}


@pytest.mark.slow
def test_timing_changes_nothing(monkeypatch):
    """Two runs with one seed give the same bits, with random delays in actors and learner."""
    publish = learner.Learner.publish

    def run(delays: int):
        rng = np.random.default_rng(delays)

        def late(self, weights):
            time.sleep(rng.uniform(0, 0.05))
            publish(self, weights)

        monkeypatch.setattr(learner.Learner, "publish", late)
        env = faulty.make_environment(
            lambda seeds: faulty.DelayedPool(dummy.CountingPool(seeds), rng)
        )
        return train(sebulba_config(**PIPELINE), env)

    one, other = run(1), run(2)
    np.testing.assert_array_equal(weights_of(one), weights_of(other))
    for n, row in enumerate(one.metrics):
        lag = min(n, 1)
        assert (row["lag/min"], row["lag/mean"], row["lag/max"]) == (lag, lag, lag)


def test_another_seed_gives_other_weights():
    one, other = (
        jax.device_get(jax.jit(run.learner_functions.init)(run.key).train.weights.params)
        for run in (make_setup(sebulba_config(**PIPELINE, seed=seed)) for seed in (0, 1))
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        # Biases are zeros.
        assert (a != b).all() or a.ndim == 1


def test_the_next_batch_is_with_the_learners_while_they_update(monkeypatch):
    """Each update waits until it is there, so acting on it can't need that update's weights."""
    learn, put, sent = learner.Learner._learn, SupervisedQueue.put, collections.Counter()
    config = sebulba_config(**PIPELINE)
    learners = make_setup(config).split.learners

    def spy(self, item):
        put(self, item)
        if isinstance(item, ActorOutput):
            assert [device_of(part) for part in item.parts] == list(learners)
            assert all(x.is_ready() for x in jax.tree.leaves(item.parts))
            sent[self] += 1

    def device_of(part):
        (device,) = {device for x in jax.tree.leaves(part) for device in x.devices()}
        return device

    def late(self, state, taken):
        deadline = time.monotonic() + 60
        while any(sent[queue] < min(self.version + 2, 8) for queue in self._queues):
            time.sleep(0.001)
            assert time.monotonic() < deadline
        return learn(self, state, taken)

    monkeypatch.setattr(SupervisedQueue, "put", spy)
    monkeypatch.setattr(learner.Learner, "_learn", late)
    train(config)
    assert list(sent.values()) == [8] * 4


FREE = {
    "agent": "vtrace",
    "replay__begin": 24 * 8,
    "replay__batch": 16,
    "num_envs": 24,
    "total_steps": 30 * 24 * 8,
    "learning_rate": 1e-2,
    **SOLO,
    "sebulba__threads": 3,
    "sebulba__free_running": True,
}


R2D2 = {"agent": "r2d2", "network__core": "lstm", "r2d2__burn_in": 4, "r2d2__trace": 8}
D4PG = {"agent": "d4pg", "env_kwargs": {"continuous": True}}


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": "vtrace"},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({"agent": "dqn"}, R2D2, D4PG)),
    ],
    ids=lambda changes: changes["agent"],
)
def test_running_free_takes_the_newest_weights_and_logs_their_lag(changes, monkeypatch):
    taken, get = collections.defaultdict(list), ParameterServer.get

    def spy(self, device, version):
        newest = max(self._versions, default=0)
        chosen, weights = get(self, device, version)
        assert chosen >= newest
        taken[threading.current_thread().name].append(chosen)
        return chosen, weights

    monkeypatch.setattr(ParameterServer, "get", spy)
    result = train(sebulba_config(**{**FREE, **changes}))
    assert len(taken) == 3
    lags = np.arange(30) - np.array(list(taken.values()))
    # One trajectory waits in the queue, and another one for room in it.
    assert ((lags >= 0) & (lags <= 2)).all()
    for versions in taken.values():
        assert versions == sorted(versions)
    for name in ("min", "mean", "max"):
        logged = [row[f"lag/{name}"] for row in result.metrics]
        np.testing.assert_allclose(logged, getattr(lags, name)(axis=0))


def test_running_free_actors_do_not_wait_for_a_slow_learner(monkeypatch):
    """They run ahead as far as their queues let them, which is a lag of 2, and it still learns."""
    publish, put = learner.Learner.publish, SupervisedQueue.put
    offered = collections.Counter()

    def spy(self, item):
        offered[self] += 1
        put(self, item)

    def late(self, weights):
        """Waits until each actor has a trajectory in its queue and the next one ready."""
        deadline = time.monotonic() + 60
        ahead = min(self.version + 2, 30) if self.version else 0
        while any(offered[queue] < ahead for queue in self._queues):
            time.sleep(0.001)
            assert time.monotonic() < deadline
        publish(self, weights)

    monkeypatch.setattr(SupervisedQueue, "put", spy)
    monkeypatch.setattr(learner.Learner, "publish", late)
    # The return of an episode is how often the second of two actions was taken in seven steps.
    env = faulty.make_environment(partial(faulty.EchoPool, scale=0.0))
    rows = train(sebulba_config(**FREE), env).metrics
    assert [row["step"] for row in rows] == [192 * (n + 1) for n in range(30)]
    for n, row in enumerate(rows):
        assert [row[f"lag/{name}"] for name in ("min", "mean", "max")] == [min(n, 2)] * 3
    assert rows[0]["train/episode_return"] < 5
    assert rows[-1]["train/episode_return"] > 6


@pytest.mark.slow
def test_a_dictionary_of_gymnasium_s_with_a_mask_is_learned_from():
    """An illegal action would be an error in the environment."""
    config = sebulba_config(
        env="gymnasium:tests.envs.dictionaries:Dictionary-v0",
        env_params={"channels": "first"},
        network__torso="pixels",
        normalize_observations=True,
        num_envs=4,
        total_steps=4 * 8 * 100,
        learning_rate=1e-2,
        stagger=0,
        evaluation__episodes=2,
        sebulba__max_restarts=0,
        **SOLO,
    )
    result = train(config, evaluation=EvaluationThread)
    assert result.summary["eval_return_mean"] == 6
    env = Dictionary()
    observation, _ = env.reset()
    result.policy.reset()
    rewards, done = [], False
    while not done:
        observation, reward, done, _, _ = env.step(result.policy(observation))
        rewards.append(reward)
    assert rewards == [1] * 6
