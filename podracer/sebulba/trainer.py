"""Trains with Sebulba: compiles, starts the threads, and runs the training loop."""

import multiprocessing
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
from etils import epath
from ml_collections import ConfigDict

from podracer import config as config_lib
from podracer.acting.host_unroll import HostUnroll
from podracer.config import Config, SebulbaConfig
from podracer.errors import ExitCode
from podracer.sebulba import program, timing
from podracer.sebulba.actor import ActorThread, Schedule
from podracer.sebulba.evaluation import EvaluationThread
from podracer.sebulba.learner import Learner
from podracer.sebulba.pipeline import ParameterServer, PauseTimer, TrajectoryQueue
from podracer.sebulba.pool import RestartingPool
from podracer.sebulba.program import CompiledIndependent, SebulbaState
from podracer.sebulba.remote import RemoteActors
from podracer.sebulba.setup import SebulbaSetup, check_settings, make_actors, prepare
from podracer.sebulba.threads import HangLimits, Supervisor
from podracer.training import builder, loop
from podracer.training.exchange import Exchange
from podracer.training.options import RunOptions
from podracer.training.start import compile_and_restore, open_session
from podracer.training.sweep_in_turn import train_in_turn
from podracer.types import Device, Row


def train(
    config: ConfigDict | Config,
    workdir: epath.PathLike | None = None,
    **options: Unpack[RunOptions],
) -> loop.Result:
    """Trains an agent in host (CPU) environments, or those of a sweep, one after another.

    Args:
      config: a ``ConfigDict``, as ``podracer.config.default_config`` returns it, or a ``Config``.
      workdir: folder of the run, or gs://BUCKET/FOLDER; a run that it holds is resumed. None writes
        nothing. Each of several agents has a folder in it, such as ``member_0``.
      **options: see ``training.options.Options``.

    Returns:
      The trained weights, all rows of metrics, the summary, and the trained policy; of several
        agents those of the best one, and all in the summary.

    Raises:
      ConfigError: an impossible setting, before anything compiles.
      DivergedError: a loss or gradient became NaN or infinite.
      DriftError: devices no longer hold the same weights.
      ActorError: a thread failed or hangs.
      PreemptedError: the run was asked to end by SIGTERM, and has been saved.
      DisplacedError: the workdir, in a bucket, belongs to another run now.
      SaveError: the run could not be saved or read back.
      TransientError: storage or the network still failed after several attempts.
    """
    _end_if_imported()
    parsed = config_lib.parse(config)
    if len(parsed.members) > 1 or parsed.sweep:
        check_settings(parsed)
        return train_in_turn("sebulba", train, parsed, workdir, options)
    opened = open_session("sebulba", lambda config, _: prepare(config), parsed, workdir, options)
    with opened as (setup, session, clock):
        heartbeat = session.processes.show_progress
        exchange = Exchange(parsed, session.processes.count)
        compiled, state, progress = compile_and_restore(
            lambda: compile_programs(setup), session, clock, setup.components.agent
        )
        if progress.update:
            session.log("environments start new episodes, because host environments can't be saved")
        state = exchange.join(state, progress.update)
        with make_supervisor(parsed.sebulba, session.warn) as supervisor:
            # Remote workers may keep the learner waiting for ever. Several processes stop together.
            alone = parsed.remote.num_envs and session.processes.count == 1
            learner = start_threads(
                setup,
                compiled,
                state,
                supervisor,
                progress.update,
                heartbeat,
                session.stop.raising if alone else nullcontext,
            )
            result = loop.run(
                state,
                progress,
                step=exchange.wrap(learner.step, learner.publish_again),
                evaluate=EvaluationThread(setup, supervisor, heartbeat),
                config=parsed,
                sizes=setup.sizes,
                session=session,
                clock=clock,
                mesh=setup.mesh,
                make_policy=partial(builder.make_policy, parsed, setup.env),
                report=partial(timing.report, steps_per_update=setup.sizes.steps_per_update),
            )
        exchange.leave()
        return result


class CompiledPrograms(NamedTuple):
    """A run's functions, compiled for its devices.

    Attributes:
      state: the learner's initial state.
      update: the learner's update.
      actor_functions: the functions of the actor threads, by actor device; a ``HostUnroll``, or a
        ``CompiledIndependent`` for remote environments.
    """

    state: SebulbaState
    update: Any
    actor_functions: dict[Device, Any]


def compile_programs(setup: SebulbaSetup) -> CompiledPrograms:
    """Makes the learner's initial state, and compiles everything that a run calls."""
    functions = setup.learner_functions
    state = jax.jit(functions.init)(setup.key)
    update = program.lower_update(functions, state, setup.trajectory_shapes()).compile()
    compile_actor = _compile_remote if setup.config.remote.num_envs else _compile_actor
    actor_functions = {device: compile_actor(setup, device) for device in setup.split.actors}
    return CompiledPrograms(jax.block_until_ready(state), update, actor_functions)


def _compile_actor(setup: SebulbaSetup, device: Device) -> HostUnroll:
    return program.compile_actor(setup.actor_functions, setup.actor_shapes, device)


def _compile_remote(setup: SebulbaSetup, device: Device) -> CompiledIndependent:
    options = setup.config.remote
    return program.compile_independent(
        setup.env,
        setup.components,
        setup.key,
        setup.actor_shapes,
        device,
        places=options.num_envs // jax.process_count() // setup.num_threads,
        batch=options.batch,
    )


def _end_if_imported() -> None:
    """Ends a process of an environment that imports a script, which would train in it, too."""
    # multiprocessing checks the same when a process is started.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(
            'a script must train under if __name__ == "__main__": because the processes of its '
            "environments import it",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(ExitCode.CONFIG)


def make_supervisor(options: SebulbaConfig, warn: Callable[[str], None]) -> Supervisor:
    """The supervisor of a run's threads; ``warn`` prints a warning and is thread-safe."""
    shared = jax.process_count() > 1
    limits = HangLimits(options.timeout_s, options.first_update_timeout_s, shared=shared)
    return Supervisor(limits, warn)


def start_threads(
    setup: SebulbaSetup,
    compiled: CompiledPrograms,
    state: SebulbaState,
    supervisor: Supervisor,
    first_update: int = 0,
    heartbeat: Callable[[], None] = lambda: None,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Learner:
    """Starts the actor threads and the learner, and publishes the first weights.

    Args:
      setup: setup of the run.
      compiled: the compiled functions of the run.
      state: the learner's state, initial or restored.
      supervisor: watches the threads.
      first_update: the update at which the run starts or resumes.
      heartbeat: called before each update.
      interruptible: see ``Learner``.

    Returns:
      The learner, whose ``step`` is to be called with the state.
    """
    parameters = ParameterServer(supervisor, keep=1 + setup.config.sebulba.lag)
    pauses = PauseTimer()
    start = _start_remote if setup.config.remote.num_envs else _start_local
    queues, host_row = start(setup, compiled, parameters, pauses, supervisor, first_update)
    learner = Learner(
        setup,
        compiled.update,
        parameters,
        queues,
        pauses,
        supervisor,
        first_update,
        heartbeat,
        host_row,
        interruptible,
    )
    learner.publish(program.copy_weights(state.train.weights))
    return learner


# The queue that the learner takes each trajectory of an update from, and metrics of this host.
Started = tuple[list[TrajectoryQueue], Callable[[], Row]]


def _start_local(
    setup: SebulbaSetup,
    compiled: CompiledPrograms,
    parameters: ParameterServer,
    pauses: PauseTimer,
    supervisor: Supervisor,
    first_update: int,
) -> Started:
    """Starts the actor threads, each with a pool of environments of its own."""
    options, sizes = setup.config.sebulba, setup.sizes
    schedule = Schedule(
        first_update,
        sizes.last(first_update),
        sizes.unroll_length,
        None if options.free_running else options.lag,
        setup.config.whole_episodes,
    )
    queues = []
    for actor in make_actors(setup, first_update):
        queue = TrajectoryQueue(supervisor)
        batch = len(actor.env_ids)
        pool = RestartingPool(setup.env, actor.make_pool, batch, options, supervisor)
        functions = compiled.actor_functions[actor.device]
        thread = ActorThread(
            actor, pool, functions, schedule, parameters, queue, pauses, supervisor
        )
        supervisor.start(actor.name, thread.run)
        queues.append(queue)
    return queues, dict


def _start_remote(
    setup: SebulbaSetup,
    compiled: CompiledPrograms,
    parameters: ParameterServer,
    pauses: PauseTimer,
    supervisor: Supervisor,
    first_update: int,
) -> Started:
    """Starts the actor threads of remote environments, which share a queue: a thread whose workers
    are gone delays none of the others."""
    queue = TrajectoryQueue(supervisor)
    actors = RemoteActors(
        setup, compiled.actor_functions, parameters, queue, pauses, supervisor, first_update
    )
    supervisor.at_end(actors.close)
    return [queue] * setup.num_threads, actors.row
