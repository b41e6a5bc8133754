"""Sebulba as a whole: the same learning as Anakin's, whatever the devices, threads and timing."""

import collections
import dataclasses
import importlib
import itertools
import json
import pathlib
import re
import runpy
import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from podracer import cli, envs, mesh, metrics, parts, returns
from podracer import config as config_lib
from podracer.envs import dummy
from podracer.errors import ConfigError
from podracer.nets import actor_critic
from podracer.sebulba import actor as actor_lib
from podracer.sebulba import learner as learner_lib
from podracer.sebulba import pipeline, program
from podracer.sebulba.pipeline import Channel, Publisher, Supervisor
from podracer.session import Options, Session
from podracer.types import Trajectory
from tests import faulty
from tests.helpers import make_config, make_run
from tests.test_anakin import flat

# The package's attribute of this name is the function.
train_lib = importlib.import_module("podracer.sebulba.train")


def sebulba_config(**changes):
    return make_config(**{"env": "dummy:counting", "cpu_devices": 8, **changes})


def train(config, env=None):
    """A whole run: result of ``train``, with threads and all."""
    run = train_lib.prepare(config, env)
    with Session("sebulba", run.config, run.sizes, Options(quiet=True)) as session:
        return train_lib.start(run, session, metrics.Clock())


def weights_of(result) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(result.weights))])


def unrolls(config, count, env=None, max_restarts=0):
    """What the only actor thread of a config sends, acting with the first weights throughout."""
    run = train_lib.prepare(config, env)
    assert run.num_threads == 1
    _, weights = jax.jit(run.step.init)(run.key)
    device = run.split.actors[0]
    functions = program.compile_unroll(run.unroll, run.shapes, device)
    schedule = actor_lib.Schedule(0, count, run.sizes.unroll_length, None, max_restarts)
    with Supervisor(30.0) as supervisor:
        publisher, channel = Publisher(supervisor, keep=1), Channel(supervisor)
        publisher.publish(0, {device: jax.device_put(jax.device_get(weights), device)})
        supervisor.start(
            "actor",
            lambda: actor_lib.run(
                train_lib.make_actors(run)[0],
                run.env,
                functions,
                schedule,
                publisher,
                channel,
                supervisor,
            ),
        )
        taken = [channel.get() for _ in range(count)]
    return run, weights, taken


def joined(parts) -> Trajectory:
    """A trajectory of its parts, in numpy."""
    parts = jax.device_get(list(parts))
    steps = [x.replace(carry=()) for x in parts]
    carry = jax.tree.map(lambda *x: np.concatenate(x), *(x.carry for x in parts))
    return jax.tree.map(lambda *x: np.concatenate(x, 1), *steps).replace(carry=carry)


SOLO = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": (0,), "sebulba__threads": 1}


def same_phases(monkeypatch, config):
    """Gives the host's counting environments the first episodes that Anakin's have."""
    _, _, state, step = make_run(config)
    phases = np.asarray(state.rollout.timestep.observation[:, 1]) - 5
    monkeypatch.setattr(
        train_lib, "pool_seeds", lambda _, env_ids, *__: phases[env_ids % len(phases)].astype(int)
    )
    return state, step


@pytest.mark.parametrize(
    ("agent", "core"), [("vtrace", "none"), pytest.param("ppo", "gru", marks=pytest.mark.slow)]
)
def test_counting_in_jax_and_on_the_host_give_the_same_updates(agent, core, monkeypatch):
    """Anakin and Sebulba without lag: trajectories and so weights, over several updates."""
    changes = {
        "agent": agent,
        "network__core": core,
        "num_envs": 16,
        "total_steps": 5 * 16 * 8,
        "num_minibatches": 2,
        "normalize_observations": True,
        "normalize_rewards": True,
    }
    config = make_config(env="dummy:counting", env_kwargs={"next_step": True}, **changes)
    state, step = same_phases(monkeypatch, config)
    for _ in range(5):
        state, anakin = step(state)
    result = train(
        sebulba_config(
            **changes,
            sebulba__lag=0,
            sebulba__actor_devices=(0, 1),
            sebulba__learner_devices=(2, 3),
        )
    )
    np.testing.assert_allclose(weights_of(result), flat(state), atol=2e-5)
    last = result.metrics[-1]
    for name, value in anakin.losses.items():
        np.testing.assert_allclose(last[f"loss/{name}"], value[-1], rtol=1e-3, atol=1e-4)


def test_counting_in_jax_and_on_the_host_give_the_same_trajectories(monkeypatch):
    changes = {"num_envs": 16, "unroll_length": 12, "network__core": "gru"}
    config = make_config(env="dummy:counting", env_kwargs={"next_step": True}, **changes)
    state, _ = same_phases(monkeypatch, config)
    env = envs.make(config.env, config.env_kwargs, {})
    _, weights, taken = unrolls(sebulba_config(**changes, **SOLO), 3)
    agent = parts.make(config, env.spec, train_lib.prepare(config_of(config)).sizes).agent
    envs_state = state.rollout
    for n, unroll in enumerate(taken):
        key, _ = parts.update_keys(state.key, n)
        envs_state, expected, _ = jax.jit(
            lambda w, s, k: train_lib.program.rollout.unroll(env, agent, w, s, k, 12)
        )(weights, envs_state, key)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            joined(unroll.parts),
            jax.device_get(expected),
        )
        assert expected.timestep.first.sum() > 0


def config_of(config):
    """Anakin's config for Sebulba's functions."""
    return sebulba_config(num_envs=config.num_envs, unroll_length=config.unroll_length, **SOLO)


SPLITS = [
    ((0, 1), tuple(range(2, 8)), 2),
    pytest.param((0,), tuple(range(1, 8)), 4, marks=pytest.mark.slow),
    pytest.param((0, 1, 2, 3), (4, 5, 6, 7), 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("actors", "learners", "threads"), SPLITS)
@pytest.mark.parametrize("agent", ["ppo", pytest.param("vtrace", marks=pytest.mark.slow)])
def test_devices_do_not_change_what_is_learned(agent, actors, learners, threads):
    """2 + 6, 1 + 7, 4 + 4 and one shared device: the same schedule, the same result."""

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


def test_timing_changes_nothing(monkeypatch):
    """Two runs with one seed give the same bits, with random delays in actors and learner."""
    publish = learner_lib.Learner.publish

    def run(delays: int, seed: int = 0):
        rng = np.random.default_rng(delays)

        def late(self, weights):
            time.sleep(rng.uniform(0, 0.05))
            publish(self, weights)

        monkeypatch.setattr(learner_lib.Learner, "publish", late)
        env = faulty.host(lambda seeds: faulty.Delayed(dummy.CountingPool(seeds), rng))
        split = {"sebulba__actor_devices": (0, 1), "sebulba__learner_devices": (2, 3)}
        changes = {"num_envs": 36, "total_steps": 8 * 36 * 8, "seed": seed}
        return train(sebulba_config(**changes, **split, sebulba__threads=3), env)

    one, other = run(1), run(2)
    np.testing.assert_array_equal(weights_of(one), weights_of(other))
    assert (weights_of(one) != weights_of(run(1, seed=1))).mean() > 0.5
    for n, row in enumerate(one.metrics):
        lag = min(n, 1)
        assert (row["lag/min"], row["lag/mean"], row["lag/max"]) == (lag, lag, lag)


def test_the_next_batch_is_with_the_learners_while_they_update(monkeypatch):
    """Each update waits for that: its own weights are not needed for it."""
    learn, put, sent = learner_lib.Learner._learn, Channel.put, collections.Counter()
    config = sebulba_config(num_envs=48, total_steps=6 * 48 * 8)

    def spy(self, item):
        put(self, item)
        if isinstance(item, pipeline.Unroll):
            assert [one_device(part) for part in item.parts] == list(run.split.learners)
            assert all(x.is_ready() for x in jax.tree.leaves(item.parts))
            sent[self] += 1

    def one_device(part):
        (device,) = {device for x in jax.tree.leaves(part) for device in x.devices()}
        return device

    def late(self, state, taken):
        deadline = time.monotonic() + 60
        while any(sent[channel] < min(self.version + 2, 6) for channel in self._channels):
            time.sleep(0.001)
            assert time.monotonic() < deadline
        return learn(self, state, taken)

    monkeypatch.setattr(Channel, "put", spy)
    monkeypatch.setattr(learner_lib.Learner, "_learn", late)
    run = train_lib.prepare(config)
    assert len(run.split.actors) == 2
    train(config)
    assert list(sent.values()) == [6] * 4


FREE = {
    "agent": "vtrace",
    "num_envs": 24,
    **SOLO,
    "sebulba__threads": 3,
    "sebulba__free_running": True,
}


def test_running_free_takes_the_newest_weights_and_says_how_old_they_were(monkeypatch):
    taken, get = collections.defaultdict(list), Publisher.get

    def spy(self, device, version):
        newest = max(self._versions, default=0)
        chosen, weights = get(self, device, version)
        assert chosen >= newest
        taken[threading.current_thread().name].append(chosen)
        return chosen, weights

    monkeypatch.setattr(Publisher, "get", spy)
    result = train(sebulba_config(**FREE, total_steps=20 * 24 * 8))
    assert len(taken) == 3
    lags = np.arange(20) - np.array(list(taken.values()))
    # One unroll waits in the channel, and one for room in it.
    assert ((lags >= 0) & (lags <= 2)).all()
    for versions in taken.values():
        assert versions == sorted(versions)
    for name in ("min", "mean", "max"):
        logged = [row[f"lag/{name}"] for row in result.metrics]
        np.testing.assert_allclose(logged, getattr(lags, name)(axis=0))


def test_running_free_actors_do_not_wait_for_a_slow_learner(monkeypatch):
    """They run ahead as far as their channels let them, a lag of 2, and learning goes on."""
    publish, put, offered = learner_lib.Learner.publish, Channel.put, collections.Counter()

    def spy(self, unroll):
        offered[self] += 1
        put(self, unroll)

    def late(self, weights):
        """Waits until each actor has one more unroll in its channel and the next one ready."""
        deadline = time.monotonic() + 60
        ahead = min(self.version + 2, 30) if self.version else 0
        while any(offered[channel] < ahead for channel in self._channels):
            time.sleep(0.001)
            assert time.monotonic() < deadline
        publish(self, weights)

    monkeypatch.setattr(Channel, "put", spy)
    monkeypatch.setattr(learner_lib.Learner, "publish", late)
    # The return of an episode is how often the second of two actions was taken in seven steps.
    env = faulty.host(partial(faulty.EchoPool, scale=0.0))
    config = sebulba_config(**FREE, total_steps=30 * 24 * 8, learning_rate=1e-2)
    rows = train(config, env).metrics
    assert [row["step"] for row in rows] == [192 * (n + 1) for n in range(30)]
    for n, row in enumerate(rows):
        assert [row[f"lag/{name}"] for name in ("min", "mean", "max")] == [min(n, 2)] * 3
    assert rows[0]["train/episode_return"] < 5
    assert rows[-1]["train/episode_return"] > 6


def test_while_the_loop_evaluates_actors_wait_for_no_learner(monkeypatch):
    evaluate = train_lib.HostEvaluation.__call__

    def late(self, *arguments):
        time.sleep(0.3)
        return evaluate(self, *arguments)

    monkeypatch.setattr(train_lib.HostEvaluation, "__call__", late)
    changes = {"num_envs": 24, "total_steps": 11 * 24 * 8, **SOLO, "sebulba__threads": 3}
    seconds = train(sebulba_config(**changes, evaluation__every=1)).summary["breakdown"]
    # Ten evaluations are waited for; an unroll of eight steps fits into each many times.
    assert seconds["actor_pause"] > 10 * 0.3 / 2
    # Actors can only wait for a learner that is at work.
    learner = sum(x for name, x in seconds.items() if name.startswith("learner_"))
    assert 0 <= seconds["actor_wait"] < learner + 0.3


def test_rewards_belong_to_the_action_that_earned_them():
    config = sebulba_config(num_envs=4, unroll_length=10, **SOLO)
    _, _, taken = unrolls(config, 3, faulty.host(faulty.EchoPool))
    for unroll in taken:
        trajectory = joined(unroll.parts)
        step = trajectory.timestep.observation[:-1, :, 0]
        last = step == faulty.LENGTH
        reward = trajectory.timestep.reward[1:]
        np.testing.assert_array_equal(reward, np.where(last, 0, 10 * step + trajectory.action))
        assert trajectory.action.std() > 0
        # The step of an autoreset teaches nothing, and no other step is left out.
        np.testing.assert_array_equal(returns.valid(trajectory.timestep), ~last)
        # An episode that was truncated goes on from its true last observation.
        assert (trajectory.timestep.discount == 1).all()
        np.testing.assert_array_equal(trajectory.timestep.first[1:], last)
    # Unrolls follow each other without a gap.
    for before, after in itertools.pairwise(taken):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[-1], b[0]),
            joined(before.parts).timestep,
            joined(after.parts).timestep,
        )


def test_games_are_summed_up_as_they_were_played():
    config = sebulba_config(num_envs=4, unroll_length=24, **SOLO)
    _, _, taken = unrolls(config, 2, faulty.host(faulty.EchoPool))
    both = [joined(x.parts) for x in taken]
    reward = np.concatenate([x.timestep.reward[1:] for x in both])
    # 48 steps are 6 games of 7 steps and a reset each.
    assert sum(x.episodes.episodes for x in taken) == 6 * 4
    assert sum(x.episodes.length for x in taken) == 6 * 4 * 7
    np.testing.assert_allclose(sum(x.episodes.ret for x in taken), reward.sum())


def test_memory_stays_on_the_actor_device_and_is_stored_with_each_unroll():
    """The learner's unroll from the stored memory gives the log-probabilities of the actor's."""
    config = sebulba_config(
        num_envs=8,
        network__core="lstm",
        sebulba__actor_devices=(1,),
        sebulba__learner_devices=(2, 3),
        sebulba__threads=1,
    )
    run, weights, taken = unrolls(config, 3)
    network = actor_critic.make(run.env.spec, config.network)
    for n, unroll in enumerate(taken):
        assert [next(iter(p.action.devices())).id for p in unroll.parts] == [2, 3]
        trajectory = joined(unroll.parts)
        _, policy, _ = network.apply(
            jax.device_get(weights.params),
            trajectory.carry.memory,
            trajectory.timestep.observation[:-1],
            trajectory.timestep.first[:-1],
        )
        log_prob = network.distribution(policy).log_prob(trajectory.action)
        np.testing.assert_allclose(log_prob, trajectory.extras["log_prob"], atol=1e-5)
        assert (np.abs(jax.tree.leaves(trajectory.carry.memory)[0]).max() > 0) == (n > 0)


def test_frames_travel_as_bytes_and_the_newest_alone_give_the_same_unrolls():
    plain, newest = (
        [
            joined(unroll.parts)
            for unroll in unrolls(
                sebulba_config(
                    env="envpool:Breakout-v5",
                    env_kwargs={"episodic_life": True, "use_fire_reset": True},
                    network__torso="pixels",
                    num_envs=4,
                    unroll_length=80,
                    sebulba__newest_frame=newest,
                    **SOLO,
                ),
                2,
            )[-1]
        ]
        for newest in (False, True)
    )
    for one, other in zip(plain, newest, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
        assert one.timestep.observation.dtype == np.uint8
    assert plain[1].timestep.first.any()


def seeds_of(config, number, hosts, monkeypatch):
    """All seeds that one of several hosts gives to environments: those of its actors' pools as they
    are built first and again, then its evaluation's."""
    given, evaluations = [], []

    def make(seeds, threads):
        given.extend(seeds)

    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    monkeypatch.setattr(jax, "process_index", lambda: number)
    init = train_lib.HostEvaluation.__init__

    def spy(self, *arguments):
        evaluations.append(arguments[3])
        init(self, *arguments)

    monkeypatch.setattr(train_lib.HostEvaluation, "__init__", spy)
    env = envs.make_host("dummy:counting", {}, {})._replace(make=make)
    devices = jax.devices()[: 2 * hosts]
    own = tuple(devices[2 * number : 2 * number + 2])
    run = train_lib.make_run(config, env, mesh.Split(own, own), devices)
    actors = train_lib.make_actors(run)
    ids = np.sort(np.concatenate([actor.env_ids for actor in actors]))
    np.testing.assert_array_equal(ids, np.arange(config.num_envs).reshape(hosts, -1)[number])
    for restarts in range(5):
        for actor in actors:
            actor.make_pool(restarts)
    with Supervisor(30.0) as supervisor:
        train_lib.make_evaluate(run, supervisor, lambda: None)
        evaluations[0]()
    return given


def test_no_two_environments_share_a_seed(monkeypatch):
    """Of no thread, device, host, rebuilt pool or evaluation, nor of a run with the next seed."""
    given = []
    for seed in (7, 8):
        config = sebulba_config(num_envs=128, seed=seed, evaluation__episodes=9)
        for number in range(2):
            given += seeds_of(config, number, 2, monkeypatch)
    assert len(given) == 2 * (5 * 128 + 2 * 5)
    assert len(set(given)) == len(given)
    assert all(0 <= seed < 2**31 for seed in given)


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (1, {}, ([0], [0])),
        (2, {}, ([0], [1])),
        (4, {}, ([0], [1, 2, 3])),
        (8, {}, ([0, 1], [2, 3, 4, 5, 6, 7])),
        (8, {"learners_per_actor": 1}, ([0, 1, 2, 3], [4, 5, 6, 7])),
        (8, {"actors": (3,)}, ([3], [0, 1, 2, 4, 5, 6, 7])),
        (4, {"learners": (0, 1)}, ([2, 3], [0, 1])),
        (2, {"actors": (0,), "learners": (0, 1)}, ([0], [0, 1])),
        (1, {"learners": (0,)}, ([0], [0])),
    ],
)
def test_devices_are_split_into_actors_and_learners(count, settings, expected):
    settings = {"actors": (), "learners": (), "learners_per_actor": 3, **settings}
    split = mesh.split(list(range(count)), **settings)
    assert [list(devices) for devices in split] == list(expected)


@pytest.mark.parametrize(
    "name", ["cartpole", "lunarlander", "halfcheetah", "pong", "breakout", "coinrun", "football"]
)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_configs_fit_hosts_of_any_size(name, count):
    file = pathlib.Path(__file__).parent.parent / "configs" / f"{name}.py"
    config = config_lib.parse(runpy.run_path(str(file))["get_config"]())
    if name == "cartpole" and count > 2:
        config = dataclasses.replace(config, num_envs=48)  # As its docstring says.
    actors, learners = mesh.split(list(range(count)), (), (), config.sebulba.learners_per_actor)
    sizes = config_lib.sizes(config, len(learners), len(actors) * config.sebulba.threads)
    # What is shuffled: PPO's transitions, V-trace's unrolls.
    items = sizes.envs_per_device * (config.unroll_length if config.agent == "ppo" else 1)
    assert items % config.num_minibatches == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sebulba__actor_devices": (0, 8)}, r"actor_devices=\(0, 8\).* 8 devices, from 0 to 7"),
        ({"sebulba__learner_devices": (1, 1)}, r"learner_devices=\(1, 1\) must be different"),
        ({"sebulba__actor_devices": tuple(range(8))}, "leaves none of 8 devices to learn"),
        ({"num_envs": 40}, "num_envs=40 does not divide over 6 devices times 4 actor threads; 48"),
        ({"num_envs": 48, "num_minibatches": 7}, "num_minibatches=7 does not divide the 64 items"),
        ({"stagger": 5, "num_envs": 48}, "stagger=5 is for environments written in JAX"),
        ({"sebulba__free_running": True}, "which agent='ppo' does not correct for"),
        ({"sebulba__lag": 2}, "sebulba.lag must be 0 or 1, got 2"),
        ({"sebulba__threads": 0}, "sebulba.threads must be positive, got 0"),
        ({"sebulba__timeout_s": -1.0}, r"sebulba.timeout_s must be positive, got -1\.0"),
        ({"env": "gymnax:CartPole-v1"}, r"podracer\.anakin"),
    ],
)
def test_what_can_not_be_is_said_before_anything_compiles(changes, message):
    with pytest.raises(ConfigError, match=message):
        train_lib.prepare(sebulba_config(**changes))


def test_a_run_leaves_what_anakin_leaves(tmp_path, capsys):
    root = pathlib.Path(__file__).parent.parent
    argv = [
        "sebulba",
        f"--config={root}/configs/cartpole.py",
        "--config.env=envpool:CartPole-v1",
        "--config.env_kwargs.max_episode_steps=50",
        "--config.total_steps=4000",
        "--config.num_envs=8",
        "--config.unroll_length=16",
        "--config.evaluation.every=16",
        f"--workdir={tmp_path}/run",
    ]
    assert cli.main(train_lib.train, argv) == cli.OK
    out = capsys.readouterr().out
    assert "actors         devices [0] (cpu), 2 threads each, lag 1" in out
    assert "learners       devices [0]" in out
    assert "where the time went" in out
    config, summary = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("config", "summary")
    )
    assert config["config"]["env_kwargs"] == {"max_episode_steps": 50}
    assert {"env_steps", "eval_return_mean", "seed", "breakdown", "report"} <= summary.keys()
    assert summary["env_steps"] == 4096
    assert 0 < summary["eval_return_mean"] <= 50
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert [row["step"] for row in rows] == [128 * (n + 1) for n in range(32)]
    assert [row["step"] for row in rows if "eval/episode_return" in row] == [2048, 4096]
    for name in ("environment", "inference", "transfer", "wait", "pause"):
        assert rows[-1][f"time/actor_{name}"] >= 0
    for name in ("learner_wait", "learner_update", "learner_publish", "steps_per_second"):
        assert rows[-1][f"time/{name}"] > 0
    returns_ = [row["train/episode_return"] for row in rows if "train/episode_return" in row]
    assert returns_
    assert max(returns_) <= 50


@pytest.mark.parametrize(
    ("actor", "learner", "advice"),
    [
        ({"wait": 6.0, "environment": 3.0}, {"wait": 0.0, "update": 9.0}, "Actors wait .* 67%"),
        ({"environment": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "more CPU cores"),
        ({"inference": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "more actor devices"),
        ({"transfer": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "smaller observations"),
        ({"environment": 9.0}, {"update": 9.0, "wait": 0.5}, "well balanced"),
        ({"environment": 9.0, "pause": 90.0}, {"update": 9.0}, "well balanced"),
        ({"environment": 1.0, "wait": 1.0, "pause": 9.0}, {"update": 2.0}, "Actors wait .* 50%"),
    ],
)
def test_advice_names_the_side_that_waits(actor, learner, advice):
    assert re.search(advice, learner_lib.advice(actor, learner))
