"""Runs of Sebulba for tests, which share compiled programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.acting.host_unroll import HostUnroll
from podracer.acting.statistics import Episodes
from podracer.config import Config, EvaluationConfig, SebulbaConfig
from podracer.remote.settings import RemoteConfig
from podracer.sebulba import program, setup, trainer
from podracer.sebulba.actor import ActorThread, Schedule
from podracer.sebulba.pipeline import ActorOutput, ParameterServer, PauseTimer, TrajectoryQueue
from podracer.sebulba.pool import RestartingPool
from podracer.sebulba.setup import SebulbaSetup
from podracer.sebulba.threads import HangLimits, Supervisor
from podracer.training.loop import Result
from podracer.types import HostEnvironment, Trajectory, Weights
from tests import helpers
from tests.helpers import make_config

# One device that acts and learns, with one actor thread.
SOLO = {
    "sebulba__actor_devices": (0,),
    "sebulba__learner_devices": (0,),
    "sebulba__threads": 1,
}
# Two actor devices with four actor threads in total, and two learner devices.
TWO_AND_TWO = {"sebulba__actor_devices": (0, 1), "sebulba__learner_devices": (2, 3)}
# An actor device with two actor threads, and two learner devices.
ONE_AND_TWO = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": (1, 2)}
_compile_programs = trainer.compile_programs
_shared: dict[str, Any] = {}


def sebulba_config(**changes: Any) -> Config:
    """A small config of the counting environment, on up to eight devices."""
    return make_config(**{"env": "dummy:counting", "cpu_devices": 8, **changes})


def _share(kind: str, config: Config, env: HostEnvironment, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, which is called once for all configs with the same programs."""
    options = config.sebulba
    devices = SebulbaConfig(
        options.actor_devices, options.learner_devices, options.learners_per_actor, options.threads
    )
    # Of remote environments, too, only what programs depend on.
    some = bool(config.remote.num_envs)
    remote = RemoteConfig(config.remote.num_envs, local_workers=some, batch=config.remote.batch)
    same = dataclasses.replace(
        config,
        env="",
        env_kwargs={},
        evaluation=EvaluationConfig(),
        sebulba=devices,
        remote=remote,
    )
    key = repr((kind, same, env.spec, env.transfer_spec))
    if key not in _shared:
        _shared[key] = make()
    return _shared[key]


def make_setup(config: Config, env: HostEnvironment | None = None) -> SebulbaSetup:
    """The setup of a config; ``env`` replaces its environment."""
    if env is None:
        env = envs.make_host_environment(
            config.env,
            config.env_kwargs,
            config.env_params,
            newest_frame=config.sebulba.newest_frame,
        )
    shared = _share("setup", config, env, lambda: setup.prepare(config, env))
    return shared._replace(config=config, env=env)


def compile_programs(run: SebulbaSetup) -> trainer.CompiledPrograms:
    """The compiled programs of a setup, with an initial state that may be donated."""
    compiled = _share("programs", run.config, run.env, lambda: _compile_programs(run))
    return compiled._replace(state=jax.tree.map(jnp.copy, compiled.state))


def compile_actor(run: SebulbaSetup) -> HostUnroll:
    """The functions of the first actor device."""
    arguments = (run.actor_functions, run.actor_shapes, run.split.actors[0])
    return _share("actor", run.config, run.env, lambda: program.compile_actor(*arguments))


class NoEvaluation:
    """Stands in for an ``EvaluationThread`` in tests of something else."""

    def __init__(self, *_: Any):
        pass

    def __call__(self, _: Any) -> Episodes:
        return Episodes(np.zeros(1), np.zeros(1), np.ones(1, bool))


def train(
    config: Config,
    env: HostEnvironment | None = None,
    evaluation: type = NoEvaluation,
    **options: Any,
) -> Result:
    """``sebulba.train`` with shared programs; ``evaluation`` replaces the ``EvaluationThread``."""
    run = make_setup(config, env)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "prepare", lambda _: run)
        patch.setattr(trainer, "compile_programs", compile_programs)
        patch.setattr(trainer, "EvaluationThread", evaluation)
        return trainer.train(config, **{"quiet": True, **options})


def weights_of(result: Result) -> np.ndarray:
    """All weights of a run, in one array."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(result.weights))])


def make_supervisor(**changes: Any) -> Supervisor:
    """A supervisor with generous limits."""
    arguments = {"limits": HangLimits(60.0, 60.0), "warn": print, **changes}
    return Supervisor(**arguments)


def act(
    config: Config, count: int, env: HostEnvironment | None = None
) -> tuple[SebulbaSetup, Weights, list[ActorOutput]]:
    """The first ``count`` outputs of a config's only actor thread, all with the initial weights."""
    run = make_setup(config, env)
    (actor,) = setup.make_actors(run)
    weights = jax.jit(run.learner_functions.init)(run.key).train.weights
    schedule = Schedule(0, count, run.sizes.unroll_length, None, config.whole_episodes)
    with make_supervisor() as supervisor:
        parameters, queue = ParameterServer(supervisor, keep=1), TrajectoryQueue(supervisor)
        local = jax.device_put(jax.device_get(weights), actor.device)
        parameters.publish(0, {actor.device: local})
        batch = len(actor.env_ids)
        pool = RestartingPool(run.env, actor.make_pool, batch, config.sebulba, supervisor)
        functions = compile_actor(run)
        thread = ActorThread(
            actor, pool, functions, schedule, parameters, queue, PauseTimer(), supervisor
        )
        supervisor.start("actor", thread.run)
        outputs = [queue.get() for _ in range(count)]
    return run, weights, outputs


def join_parts(output: ActorOutput) -> Trajectory:
    """The trajectory of an output in numpy, joined from the parts of all learner devices."""
    return helpers.join(output.parts)


class FakeClock:
    """A clock that a test advances."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds
