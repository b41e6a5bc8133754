"""What is decided before anything compiles: devices, sizes, functions, and the actor threads."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer import envs
from podracer.acting.host_evaluation import pool_seeds
from podracer.acting.host_unroll import HostUnroll
from podracer.config import Config
from podracer.config.sections import OFF_POLICY
from podracer.config.sizes import Sizes, cpu_cores, make_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.errors import ConfigError
from podracer.remote import access
from podracer.sebulba import program
from podracer.sebulba.program import ActorShapes, LearnerFunctions, SebulbaState
from podracer.training import builder, memory
from podracer.training.builder import Components
from podracer.training.memory import StateMemory
from podracer.types import Device, HostEnvironment, Pool


class SebulbaSetup(NamedTuple):
    """A run before anything is compiled or started.

    Attributes:
      config: the run's configuration.
      sizes: the numbers that follow from it.
      env: the environment.
      components: agent, optimizer and update.
      split: this host's actor and learner devices.
      mesh: the mesh over the learner devices of all hosts.
      learner_functions: the learner's functions, not compiled.
      actor_functions: an actor thread's functions, not compiled.
      actor_shapes: shapes of what the actor's functions take and return.
      key: the run's random key.
      state: shapes and shardings of the learner's state.
    """

    config: Config
    sizes: Sizes
    env: HostEnvironment
    components: Components
    split: mesh_lib.Split
    mesh: jax.sharding.Mesh
    learner_functions: LearnerFunctions
    actor_functions: HostUnroll
    actor_shapes: ActorShapes
    key: jax.Array
    state: SebulbaState

    @property
    def num_threads(self) -> int:
        """Number of actor threads of this host."""
        return len(self.split.actors) * self.config.sebulba.threads

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that this host uses, each of them once."""
        return tuple(dict.fromkeys(self.split.actors + self.split.learners))

    def trajectory_shapes(self) -> tuple[Any, ...]:
        """Shapes of what an update takes: a trajectory of each thread, over all learner devices."""
        part = self.actor_shapes.parts[0]
        one = mesh_lib.global_shapes(part, self.mesh, program.TRAJECTORY_SPECS)
        return (one,) * self.num_threads

    @property
    def memory(self) -> StateMemory:
        """The memory of the learner's state."""
        return memory.measure(self.components.agent.source, self.state, self.mesh)

    @property
    def layout(self) -> dict[str, str]:
        """What runs on which devices, in words."""
        threads, options, remote = self.num_threads, self.config.sebulba, self.config.remote
        actors, learners = ([device.id for device in devices] for devices in self.split)
        hosts = self.mesh.size // len(learners)
        kind = self.split.actors[0].device_kind
        free = options.free_running or remote.num_envs
        lag = "free running" if free else f"lag {options.lag}"
        pools = f"{hosts * threads} pools of {self.sizes.num_envs // hosts // threads:,}"
        environments = f"{self.sizes.num_envs:,} = {pools}"
        if remote.num_envs:
            environments = f"up to {remote.num_envs:,}, {remote.workers}"
        on_hosts = f" on {hosts} hosts" if hosts > 1 else ""
        return {
            "actors": f"devices {actors} ({kind}), {options.threads} threads each, {lag}",
            "learners": f"devices {learners}",
            "environments": environments + on_hosts,
        }


def prepare(config: Config, env: HostEnvironment | None = None) -> SebulbaSetup:
    """Sets a run up on the devices that JAX finds.

    Args:
      config: the run's configuration.
      env: replaces the environment that the configuration names.

    Raises:
      ConfigError: an impossible setting.
    """
    if config.remote.num_envs:
        access.check_server(config.remote, access.read_token(config.remote.token_file))
    if env is None:
        env = make_environment(config)
    devices = mesh_lib.initialize_devices(config.cpu_devices or 1, required=config.cpu_devices > 0)
    splits = _split_devices(config, devices)
    learners = [device for split in splits for device in split.learners]
    return make_setup(config, env, splits[jax.process_index()], learners)


def make_environment(config: Config) -> HostEnvironment:
    """The environment that a configuration names."""
    settings = (config.env, config.env_kwargs, config.env_params)
    newest_frame = config.sebulba.newest_frame
    return envs.make_host_environment(
        *settings, observed=config.observed, newest_frame=newest_frame
    )


def check_settings(config: Config) -> None:
    """Raises ``ConfigError`` for settings that Sebulba does not support."""
    for name, only in (("stagger", 0), ("averaging.groups", 1), ("selection.every", 0)):
        value = operator.attrgetter(name)(config)
        if value != only:
            raise ConfigError(
                f"{name}={value} is for environments written in JAX; set it to {only}"
            )
    remote = config.remote.num_envs > 0
    if (config.sebulba.free_running or remote) and not config.agent_config.off_policy:
        others = " or ".join(map(repr, OFF_POLICY))
        which = f"remote.num_envs={config.remote.num_envs}" if remote else "sebulba.free_running"
        raise ConfigError(
            f"{which} acts with weights of any age, which agent={config.agent!r} does not correct "
            f"for; use agent={others}"
        )
    if remote and config.whole_episodes:
        raise ConfigError(
            "whole_episodes=True begins all environments' episodes at once, and remote "
            "environments progress independently; set it to False"
        )


def _split_devices(config: Config, devices: Sequence[Device]) -> list[mesh_lib.Split]:
    """The actor and learner devices of each host.

    Raises:
      ConfigError: a device number does not exist, no device is left to learn, or hosts differ.
    """
    options = config.sebulba
    splits = [
        mesh_lib.split(
            [device for device in devices if device.process_index == process],
            options.actor_devices,
            options.learner_devices,
            options.learners_per_actor,
        )
        for process in range(jax.process_count())
    ]
    counts = {(len(split.actors), len(split.learners)) for split in splits}
    if len(counts) > 1:
        each = " and ".join(f"{actors} + {learners}" for actors, learners in sorted(counts))
        raise ConfigError(
            f"all hosts must have the same number of actor and learner devices, got {each}"
        )
    return splits


def make_setup(
    config: Config,
    env: HostEnvironment,
    split: mesh_lib.Split,
    learners: Sequence[Device],
) -> SebulbaSetup:
    """Sets a run up on the given devices.

    Args:
      config: the run's configuration.
      env: the environment.
      split: one host's actor and learner devices.
      learners: the learner devices of all hosts, each of which is split in the same way.

    Raises:
      ConfigError: an impossible setting, or sizes or shapes that don't fit each other.
    """
    check_settings(config)
    num_threads = len(split.actors) * config.sebulba.threads
    divisor = num_threads * len(learners)
    if config.remote.num_envs % divisor:
        raise ConfigError(
            f"remote.num_envs={config.remote.num_envs} does not divide evenly over {num_threads} "
            f"actor threads times {len(learners)} learner devices; a multiple of {divisor} would"
        )
    sizes = make_sizes(config, len(learners), num_threads)
    mesh = mesh_lib.make_mesh(learners)
    components = builder.build(config, env.spec, sizes)
    key = builder.run_keys([config.seed], split.actors[0].platform)
    actor_functions = program.make_actor_functions(
        config, env, components, key, len(split.learners)
    )
    # Tracing finds shapes that don't fit each other, without compiling.
    weights = jax.eval_shape(components.agent.init, key)
    batch = sizes.envs_per_device * len(split.learners) // num_threads
    shapes = program.actor_shapes(actor_functions, env, weights, batch)
    learner_functions = program.make_learner_functions(
        components,
        mesh,
        shapes.parts[:1] * num_threads,
        program.concatenate if config.remote.num_envs else program.interleave,
    )
    state = jax.eval_shape(learner_functions.init, key)
    setup = SebulbaSetup(
        config,
        sizes,
        env,
        components,
        split,
        mesh,
        learner_functions,
        actor_functions,
        shapes,
        key,
        mesh_lib.sharded_shapes(state, mesh, program.STATE_SPECS),
    )
    jax.eval_shape(learner_functions.update, state, setup.trajectory_shapes())
    return setup


class Actor(NamedTuple):
    """What distinguishes one actor thread from another.

    Attributes:
      name: the thread's name.
      device: the device that chooses its actions.
      learners: the learner devices, each of which receives a part of its trajectories.
      env_ids: ``[B]`` int32, global numbers of its environments.
      make_pool: ``(restarts) -> Pool`` of these environments, where ``restarts`` is how often the
        pool has been rebuilt.
    """

    name: str
    device: Device
    learners: tuple[Device, ...]
    env_ids: np.ndarray
    make_pool: Callable[[int], Pool]


def make_actors(setup: SebulbaSetup, first_update: int = 0) -> list[Actor]:
    """The actor threads of this host.

    Thread k of K steps this host's environments k, k + K, k + 2K, ... (see ``program.interleave``),
    whose numbers follow those of the hosts before it.

    Args:
      setup: setup of the run.
      first_update: the update at which the run starts or resumes.
    """
    config, num_threads = setup.config, setup.num_threads
    num_envs = setup.sizes.envs_per_device * len(setup.split.learners)
    first_env = jax.process_index() * num_envs
    actors = []
    for k in range(num_threads):
        device, thread = divmod(k, config.sebulba.threads)
        env_ids = first_env + np.arange(k, num_envs, num_threads, dtype=np.int32)
        actors.append(
            Actor(
                f"actor {device}.{thread}",
                setup.split.actors[device],
                setup.split.learners,
                env_ids,
                partial(_make_pool, setup, env_ids, first_update),
            )
        )
    return actors


def _make_pool(setup: SebulbaSetup, env_ids: np.ndarray, first_update: int, restarts: int) -> Pool:
    """A pool of these environments, with seeds that no earlier pool of the run had."""
    seeds = pool_seeds(setup.config, env_ids, restarts, first_update, jax.process_count())
    cores_per_thread = max(1, cpu_cores() // setup.num_threads)
    return setup.env.make_pool(seeds, setup.config.sebulba.pool_threads or cores_per_thread)
