"""What is decided before anything compiles: devices, sizes, seeds, and impossible settings."""

import dataclasses
import runpy

import jax
import numpy as np
import pytest

from podracer import config as config_lib
from podracer import envs
from podracer.acting import host_evaluation
from podracer.config.sizes import make_sizes
from podracer.distributed import mesh
from podracer.errors import ConfigError
from podracer.sebulba import setup
from podracer.sebulba.evaluation import EvaluationThread
from tests.helpers import ROOT
from tests.sebulba.runs import make_supervisor, sebulba_config


def seeds_of(config, number, hosts, monkeypatch):
    """All seeds that one of several hosts gives to environments: those of its actors' pools, as
    they are built first and rebuilt, then those of its evaluation."""
    given, evaluations = [], []

    def make_pool(seeds, threads):
        given.extend(seeds)

    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    monkeypatch.setattr(jax, "process_index", lambda: number)
    init = host_evaluation.HostEvaluation.__init__

    def spy(self, *arguments):
        evaluations.append(arguments[3])
        init(self, *arguments)

    monkeypatch.setattr(host_evaluation.HostEvaluation, "__init__", spy)
    env = envs.make_host_environment("dummy:counting", {}, {})._replace(make_pool=make_pool)
    devices = jax.devices()[: 2 * hosts]
    own = tuple(devices[2 * number : 2 * number + 2])
    run = setup.make_setup(config, env, mesh.Split(own, own), devices)
    actors = setup.make_actors(run)
    ids = np.sort(np.concatenate([actor.env_ids for actor in actors]))
    np.testing.assert_array_equal(ids, np.arange(config.num_envs).reshape(hosts, -1)[number])
    for restarts in range(5):
        for actor in actors:
            actor.make_pool(restarts)
    with make_supervisor() as supervisor:
        EvaluationThread(run, supervisor, lambda: None)
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
    "name", ["cartpole", "lunarlander", "mujoco", "atari", "coinrun", "football", "vizdoom"]
)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_configs_fit_hosts_of_any_size(name, count):
    config = config_lib.parse(runpy.run_path(f"{ROOT}/configs/{name}.py")["get_config"]())
    if name in ("cartpole", "atari") and count > 2:
        config = dataclasses.replace(config, num_envs=48)  # As their docstrings say.
    actors, learners = mesh.split(list(range(count)), (), (), config.sebulba.learners_per_actor)
    sizes = make_sizes(config, len(learners), len(actors) * config.sebulba.threads)
    # What is shuffled: PPO's transitions, V-trace's unrolls.
    items = sizes.envs_per_device * (config.unroll_length if config.agent == "ppo" else 1)
    assert items % config.num_minibatches == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sebulba__actor_devices": (0, 8)}, r"actor_devices=\(0, 8\).* 8 devices, from 0 to 7"),
        ({"sebulba__learner_devices": (1, 1)}, r"learner_devices=\(1, 1\) must be different"),
        ({"sebulba__actor_devices": tuple(range(8))}, "leaves none of 8 devices to learn"),
        ({"num_envs": 40}, r"does not divide evenly over 6 devices times 4 actor .*; 48 would"),
        ({"num_envs": 48, "num_minibatches": 7}, "num_minibatches=7 does not divide the 64 items"),
        ({"num_envs": 48, "num_minibatches": 9999}, "num_minibatches=9999 does not divide the 64"),
        ({"stagger": 5, "num_envs": 48}, "stagger=5 is for environments written in JAX"),
        ({"sebulba__free_running": True}, "which agent='ppo' does not correct for"),
        ({"sebulba__lag": 2}, "sebulba.lag must be 0 or 1, got 2"),
        ({"sebulba__threads": 0}, "sebulba.threads must be positive, got 0"),
        ({"sebulba__timeout_s": -1.0}, r"sebulba.timeout_s must be positive, got -1\.0"),
        ({"sebulba__first_update_timeout_s": 0.0}, "first_update_timeout_s must be positive"),
        ({"sebulba__restart_window_s": 0.0}, "sebulba.restart_window_s must be positive"),
        ({"sebulba__max_restarts": -1}, "sebulba.max_restarts must not be negative, got -1"),
        ({"env": "gymnax:CartPole-v1"}, r"podracer\.anakin"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_compiles(changes, message):
    with pytest.raises(ConfigError, match=message):
        setup.prepare(sebulba_config(**changes))
