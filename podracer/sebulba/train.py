"""Trains by Sebulba: wires actors, learner and loop together."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from podracer import config as config_lib
from podracer import envs, loop, metrics, prng, processes, trackers
from podracer import mesh as mesh_lib
from podracer import parts as parts_lib
from podracer.config import Config, Sizes
from podracer.episodes import Episodes, HostEvaluation
from podracer.errors import ConfigError
from podracer.parts import Parts
from podracer.rollout import HostUnroll
from podracer.sebulba import actor as actor_lib
from podracer.sebulba import memory, program
from podracer.sebulba.actor import Actor, Schedule
from podracer.sebulba.learner import Learner, report
from podracer.sebulba.pipeline import Channel, Publisher, Supervisor, Worker
from podracer.sebulba.program import ActorShapes, Step
from podracer.session import Options, Session
from podracer.types import Device, HostEnvironment, Pool, Weights


class Run(NamedTuple):
    """All that a run is made of, before anything is compiled or started.

    Attributes:
      config: of the run.
      sizes: of the run.
      env: where.
      parts: who acts and learns.
      split: which of this host's devices act and which learn.
      mesh: over the learner devices.
      step: the learner's functions.
      unroll: an actor's functions.
      shapes: of what an actor's functions take and give.
      key: of the run.
    """

    config: Config
    sizes: Sizes
    env: HostEnvironment
    parts: Parts
    split: mesh_lib.Split
    mesh: jax.sharding.Mesh
    step: Step
    unroll: HostUnroll
    shapes: ActorShapes
    key: jax.Array

    def trajectories(self) -> tuple[Any, ...]:
        """Shapes of what one update takes: a trajectory of each thread, over all learners."""
        one = mesh_lib.global_shapes(self.shapes.parts[0], self.mesh, program.TRAJECTORY_SPECS)
        return (one,) * self.num_threads

    @property
    def num_threads(self) -> int:
        """Actor threads of this host."""
        return len(self.split.actors) * self.config.sebulba.threads


def prepare(config: Config, env: HostEnvironment | None = None) -> Run:
    """Everything that can be wrong with a configuration is found here, before it compiles.

    Args:
      config: of the run.
      env: takes the place of the config's environment.

    Raises:
      ConfigError: an impossible setting.
    """
    options = config.sebulba
    trackers.check(config.logging)
    if config.num_seeds > 1:
        raise ConfigError(
            f"num_seeds={config.num_seeds} is for environments written in JAX; set it to 1"
        )
    if config.stagger:
        raise ConfigError(
            f"stagger={config.stagger} is for environments written in JAX; set it to 0"
        )
    if options.free_running and config.agent != "vtrace":
        raise ConfigError(
            f"sebulba.free_running acts with weights of any age, which agent={config.agent!r} does "
            "not correct for; take agent='vtrace'"
        )
    if env is None:
        env = envs.make_host(
            config.env, config.env_kwargs, config.env_params, newest_frame=options.newest_frame
        )
    devices = mesh_lib.start(config.cpu_devices or 1, wanted=config.cpu_devices > 0)
    if devices[0].platform == "cpu":
        memory.keep_freed()
    hosts = [
        mesh_lib.split(
            [device for device in devices if device.process_index == process],
            options.actor_devices,
            options.learner_devices,
            options.learners_per_actor,
        )
        for process in range(jax.process_count())
    ]
    counts = {(len(host.actors), len(host.learners)) for host in hosts}
    if len(counts) > 1:
        each = " and ".join(f"{actors} + {learners}" for actors, learners in sorted(counts))
        raise ConfigError(f"all hosts must have as many actor and learner devices, got {each}")
    learners = [device for host in hosts for device in host.learners]
    return make_run(config, env, hosts[jax.process_index()], learners)


def make_run(
    config: Config,
    env: HostEnvironment,
    split: mesh_lib.Split,
    learners: Sequence[Device],
) -> Run:
    """Puts a run together, on the devices that are given.

    Args:
      config: of the run.
      env: where.
      split: of one host's devices.
      learners: of all hosts, each split in the same way.

    Raises:
      ConfigError: sizes or shapes don't fit each other.
    """
    num_threads = len(split.actors) * config.sebulba.threads
    sizes = config_lib.sizes(config, len(learners), num_threads)
    mesh = mesh_lib.make_mesh(learners)
    parts = parts_lib.make(config, env.spec, sizes)
    key = prng.key(config.seed, split.actors[0].platform)
    step = program.make_step(parts, mesh, num_threads)
    unroll = program.make_unroll(config, env, parts, key, len(split.learners))
    # Traced without compiling: shapes that don't fit each other are found by this.
    state, weights = jax.eval_shape(step.init, key)
    batch = sizes.envs_per_device * len(split.learners) // num_threads
    shapes = program.actor_shapes(unroll, env, weights, batch)
    run = Run(config, sizes, env, parts, split, mesh, step, unroll, shapes, key)
    jax.eval_shape(step.update, state, run.trajectories())
    return run


def make_actors(run: Run, update: int = 0) -> list[Actor]:
    """The actor threads of this host, for a run that goes on at this update.

    Thread k of K steps this host's environments k, k + K, k + 2K, ... (see ``program.interleave``),
    which come after those of the hosts before it.
    """
    count = run.num_threads
    num_envs = run.sizes.envs_per_device * len(run.split.learners)
    first = jax.process_index() * num_envs
    pool_threads = run.config.sebulba.pool_threads or max(1, config_lib.cpu_cores() // count)
    actors = []
    for k in range(count):
        number = k // run.config.sebulba.threads
        env_ids = first + np.arange(k, num_envs, count, dtype=np.int32)

        def make_pool(restarts: int, env_ids: np.ndarray = env_ids) -> Pool:
            seeds = pool_seeds(run.config, env_ids, restarts, update)
            return run.env.make(seeds, pool_threads)

        actors.append(
            Actor(
                f"actor {number}.{k % run.config.sebulba.threads}",
                run.split.actors[number],
                run.split.learners,
                env_ids,
                make_pool,
            )
        )
    return actors


def pool_seeds(config: Config, env_ids: np.ndarray, generation: int, update: int = 0) -> list[int]:
    """Seeds of environments on the host: no two of a run are the same.

    A run's seeds are consecutive numbers from a place that is drawn by its own seed and where it
    goes on, so that runs with neighbouring seeds share none either, and none comes again after a
    restart (but by a chance of the number of seeds in 2^31).

    Args:
      config: of the run.
      env_ids: global numbers; evaluation's come after those of training.
      generation: how often the pool was rebuilt.
      update: where this start of the run begins.
    """
    # Hosts evaluate as many episodes each, so there may be a few more.
    total = config.num_envs + config.evaluation.episodes + jax.process_count() - 1
    start = int(np.random.SeedSequence([config.seed, update]).generate_state(1, np.uint64)[0])
    return [(start + generation * total + int(i)) % 2**31 for i in env_ids]


def make_evaluate(
    run: Run, supervisor: Supervisor, alive: Callable[[], None]
) -> Callable[[program.State], Episodes]:
    """Evaluation on the first actor device, in a thread of its own: there a hang is noticed. Every
    host plays a part of the episodes.

    Args:
      run: what it is made of.
      supervisor: of the threads.
      alive: called with each step.

    Returns:
      ``(State) -> Episodes``.
    """
    config, device = run.config, run.split.actors[0]
    hosts, host = jax.process_count(), jax.process_index()
    per_host = -(-config.evaluation.episodes // hosts)
    ids = np.arange(host * per_host, (host + 1) * per_host, dtype=np.int32)

    def make_pool() -> Pool:
        threads = config.sebulba.pool_threads or config_lib.cpu_cores()
        return run.env.make(pool_seeds(config, config.num_envs + ids, 0), threads)

    make_key = jax.jit(parts_lib.evaluation_key)
    evaluation = HostEvaluation(run.env, run.parts.agent, config.evaluation, make_pool, ids)
    worker = Worker(supervisor, "evaluation", evaluation.close)

    def beat(what: str) -> None:
        alive()
        supervisor.beat(what)

    def evaluate(state: program.State) -> Episodes:
        key = make_key(state.key, state.train.step)
        weights, key = jax.device_put(mesh_lib.local((state.train.weights, key)), device)
        own = worker("playing", lambda: evaluation(weights, key, beat))
        played = mesh_lib.tell_all(np.concatenate(own).astype(np.float64), run.mesh)()
        # [hosts, 3 * per_host], to all episodes of one host after those of another.
        ret, length, complete = played.reshape(hosts, 3, per_host).swapaxes(0, 1).reshape(3, -1)
        episodes = Episodes(ret, length, complete.astype(bool))
        return jax.tree.map(lambda x: x[: config.evaluation.episodes], episodes)

    return evaluate


def train(config: Any, workdir: epath.PathLike | None = None, **options: Any) -> loop.Result:
    """Trains an agent on environments of the host.

    Args:
      config: a ``ConfigDict`` as ``podracer.config.default_config`` gives it, or a ``Config``.
      workdir: folder of the run, or gs://BUCKET/FOLDER; a run that is there is continued. None
        writes nothing.
      **options: see ``session.Options``.

    Returns:
      The trained weights, all rows of metrics, and the summary.

    Raises:
      ConfigError: an impossible setting, before anything compiles.
      DivergedError: a loss or gradient became NaN or infinite.
      DriftError: devices no longer hold the same weights.
      ActorError: a thread failed or hangs.
      PreemptedError: the run was asked to end by SIGTERM, and has been saved.
      SaveError: the run could not be saved or read back.
    """
    parsed, given = config_lib.parse(config), Options(workdir, **options)
    with processes.joined(given.address, parsed.hosts) as joined:
        clock = metrics.Clock()
        with clock.measure("setup"):
            run = prepare(parsed)
            session = Session("sebulba", parsed, run.sizes, given, joined)
        with session:
            session.begin(tuple(dict.fromkeys(sum(run.split, ()))), layout(run))
            return start(run, session, clock)


class Compiled(NamedTuple):
    """A run's functions, compiled for its devices.

    Attributes:
      state: the learner's first.
      weights: those of that state, to be published.
      update: of the learner.
      unroll: an actor's functions, by device.
    """

    state: program.State
    weights: Weights
    update: Any
    unroll: dict[Device, HostUnroll]


def compile_run(run: Run) -> Compiled:
    """Makes the first state and compiles what is called on it."""
    state, weights = jax.jit(run.step.init)(run.key)
    update = program.lower_update(run.step, state, run.trajectories()).compile()
    unroll = {
        device: program.compile_unroll(run.unroll, run.shapes, device)
        for device in run.split.actors
    }
    return Compiled(jax.block_until_ready(state), weights, update, unroll)


def launch(
    run: Run,
    compiled: Compiled,
    supervisor: Supervisor,
    update: int = 0,
    alive: Callable[[], None] = lambda: None,
) -> Learner:
    """Starts all actor threads, and gives the learner that they work for.

    Args:
      run: what it is made of.
      compiled: its functions.
      supervisor: of the threads.
      update: which is the first.
      alive: called with each update.
    """
    options = run.config.sebulba
    schedule = Schedule(
        update,
        run.sizes.last(update),
        run.sizes.unroll_length,
        None if options.free_running else options.lag,
        options.max_restarts,
    )
    publisher = Publisher(supervisor, keep=1 + options.lag)
    channels = []
    for actor in make_actors(run, update):
        channel = Channel(supervisor)
        channels.append(channel)
        functions = compiled.unroll[actor.device]
        arguments = (actor, run.env, functions, schedule, publisher, channel, supervisor)
        supervisor.start(actor.name, partial(actor_lib.run, *arguments))
    learner = Learner(
        compiled.update,
        run.mesh,
        run.split.actors,
        publisher,
        channels,
        supervisor,
        run.sizes,
        update,
        alive,
        # Among several processes, hosts.timeout_s is for what waits for another one.
        timed=jax.process_count() == 1,
    )
    learner.publish(compiled.weights)
    return learner


def start(run: Run, session: Session, clock: metrics.Clock) -> loop.Result:
    """Compiles, starts the actors and trains."""
    alive = session.processes.beat
    session.processes.reached(None, "compiling")
    with clock.measure("compile"):
        compiled = compile_run(run)
    state, progress = session.restore(compiled.state, clock)
    compiled = compiled._replace(state=state, weights=program.copy(state.train.weights))
    if progress.update:
        session.say("environments begin anew, as pools on the host can't be saved")
    with Supervisor(run.config.sebulba.timeout_s) as supervisor:
        learner = launch(run, compiled, supervisor, progress.update, alive)
        return loop.run(
            state,
            progress,
            step=learner.step,
            evaluate=make_evaluate(run, supervisor, alive),
            config=run.config,
            sizes=run.sizes,
            session=session,
            clock=clock,
            mesh=run.mesh,
            report=lambda rows: report(rows, run.sizes.steps_per_update),
        )


def layout(run: Run) -> dict[str, str]:
    """What runs where, for people."""
    threads, options = run.num_threads, run.config.sebulba
    actors, learners = ([device.id for device in devices] for devices in run.split)
    hosts = run.mesh.size // len(learners)
    kind = run.split.actors[0].device_kind
    lag = "free running" if options.free_running else f"lag {options.lag}"
    return {
        "actors": f"devices {actors} ({kind}), {options.threads} threads each, {lag}",
        "learners": f"devices {learners}",
        "environments": f"{run.sizes.num_envs:,} = {hosts * threads} pools of "
        f"{run.sizes.num_envs // hosts // threads:,}" + (f" on {hosts} hosts" if hosts > 1 else ""),
    }
