"""A run's configuration: what can be set, what it means, and what is impossible.

``default_config`` gives a config file something to change; ``parse`` turns what came of it into a
frozen ``Config``, and ``sizes`` derives every number that follows from it. Nothing is written back.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import ml_collections

from podracer.agents import AGENTS
from podracer.agents.actor_critic import ActorCriticConfig
from podracer.agents.ppo import PPOConfig
from podracer.agents.vtrace import VTraceConfig
from podracer.errors import ConfigError, unknown
from podracer.learner import LearnerConfig
from podracer.nets.actor_critic import NetworkConfig
from podracer.processes import HostsConfig


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How a policy is judged.

    Attributes:
      every: updates between evaluations during training; 0 evaluates at the end alone. Rounded up
        to whole host calls.
      episodes: whole episodes each time.
      max_steps: an episode that is not over by then counts with its return so far.
      greedy: the most probable action, else a sampled one.
    """

    every: int = 0
    episodes: int = 128
    max_steps: int = 10_000
    greedy: bool = True

    def __post_init__(self):
        if self.every < 0 or min(self.episodes, self.max_steps) <= 0:
            raise ConfigError(
                "evaluation.every must not be negative, evaluation.episodes and "
                "evaluation.max_steps must be positive, got "
                f"{self.every}, {self.episodes} and {self.max_steps}"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved; at its end, at a stop and at the best evaluation it always is.

    Attributes:
      every: updates between checkpoints, rounded up to whole host calls; 0 counts none.
      minutes: between checkpoints; 0 looks at no clock.
      keep: how many of the newest stay; the one with the best evaluation stays as well.
    """

    every: int = 0
    minutes: float = 5.0
    keep: int = 2

    def __post_init__(self):
        if self.every < 0 or self.minutes < 0 or self.keep <= 0:
            raise ConfigError(
                "checkpoint.every and checkpoint.minutes must not be negative, checkpoint.keep "
                f"must be positive, got {self.every}, {self.minutes} and {self.keep}"
            )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where rows of metrics go, beside ``metrics.jsonl``.

    Attributes:
      tensorboard: event files in the workdir's folder of that name.
      wandb: Weights & Biases, which is the extra ``podracer[wandb]``.
      wandb_project: that the run belongs to there.
      wandb_entity: the user or team that the project belongs to; "" takes the user's default.
    """

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "podracer"
    wandb_entity: str = ""


@dataclasses.dataclass(frozen=True)
class SebulbaConfig:
    """What Sebulba alone has to know.

    Attributes:
      actor_devices: numbers of this host's devices that act; () chooses by ``learners_per_actor``.
      learner_devices: numbers of those that learn; () takes all that don't act. A device in both
        lists does both.
      learners_per_actor: learner devices to each actor device, where they are not listed; 3 splits
        2 devices as 1 + 1, 4 as 1 + 3 and 8 as 2 + 6. A single device does both.
      threads: actor threads to each actor device, each with a pool of environments of its own.
      pool_threads: of envpool in each actor thread; 0 shares the cores out among the pools.
      lag: the n-th unroll is acted with the weights after n - lag updates, whatever the timing: 0
        waits for each update, 1 acts while the learner learns from the unroll before.
      free_running: act with the newest weights instead; not reproducible, and for V-trace alone.
      newest_frame: of stacked frames, send the newest alone and stack them on the device.
      timeout_s: seconds after which a thread that does not get on, or an update, is taken to hang.
      max_restarts: how often an actor thread rebuilds its pool before it gives up.
    """

    actor_devices: tuple[int, ...] = ()
    learner_devices: tuple[int, ...] = ()
    learners_per_actor: int = 3
    threads: int = 2
    pool_threads: int = 0
    lag: int = 1
    free_running: bool = False
    newest_frame: bool = False
    timeout_s: float = 120.0
    max_restarts: int = 10

    def __post_init__(self):
        for key in ("learners_per_actor", "threads", "timeout_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"sebulba.{key} must be positive, got {getattr(self, key)}")
        for key in ("pool_threads", "max_restarts"):
            if getattr(self, key) < 0:
                raise ConfigError(f"sebulba.{key} must not be negative, got {getattr(self, key)}")
        if self.lag not in (0, 1):
            raise ConfigError(f"sebulba.lag must be 0 or 1, got {self.lag}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that can be set in a config file or by ``--config.KEY=VALUE``.

    Attributes:
      env: "suite:name", or "module:Class" for an environment of one's own.
      env_kwargs: arguments of the environment's constructor.
      env_params: parameters of the environment that differ from their defaults.
      agent: "ppo" or "vtrace".
      seed: of everything random.
      num_seeds: so many independent agents, of the seeds from ``seed`` on, in one program (Anakin
        only). Steps, updates and environments are those of each.
      total_steps: environment steps to train for, over all devices; rounded up to whole host calls.
      num_envs: environments in all, over all devices.
      unroll_length: steps an environment takes between two updates (T).
      updates_per_call: updates between two rows of metrics, for Anakin in one call of the compiled
        program; 0 chooses, so that a run has about a hundred rows with Anakin, three thousand with
        Sebulba, and a call at most 100 updates. A run that is asked to stop ends its call first.
      stagger: the first episodes are advanced by up to this many random actions, each environment
        by another number, so that they do not end all at once; 0 starts them together.
      discount: gamma.
      entropy_cost: weight of the entropy bonus.
      value_cost: weight of the value loss.
      normalize_observations: standardise observations by running statistics.
      normalize_rewards: scale rewards by the running deviation of discounted returns.
      optimizer, learning_rate, anneal, warmup, batch_rule, reference_batch, epsilon,
        max_grad_norm, num_epochs, num_minibatches: see ``learner.LearnerConfig``.
      cpu_devices: devices to split a CPU into; 0 chooses (see ``auto_cpu_devices``).
      network: see ``nets.actor_critic.NetworkConfig``.
      ppo: see ``agents.ppo.PPOConfig``.
      vtrace: see ``agents.vtrace.VTraceConfig``.
      evaluation: see ``EvaluationConfig``.
      checkpoint: see ``CheckpointConfig``.
      hosts: see ``processes.HostsConfig``.
      logging: see ``LoggingConfig``.
      sebulba: see ``SebulbaConfig``; Anakin has no use for it.
    """

    env: str = "gymnax:CartPole-v1"
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    agent: str = "ppo"
    seed: int = 0
    num_seeds: int = 1
    total_steps: int = 500_000
    num_envs: int = 64
    unroll_length: int = 128
    updates_per_call: int = 0
    stagger: int = 0
    discount: float = 0.99
    entropy_cost: float = 0.01
    value_cost: float = 0.5
    normalize_observations: bool = False
    normalize_rewards: bool = False
    optimizer: str = "adam"
    learning_rate: float = 2.5e-4
    anneal: bool = True
    warmup: int = 0
    batch_rule: str = "none"
    reference_batch: int = 0
    epsilon: float = 1e-5
    max_grad_norm: float = 0.5
    num_epochs: int = 4
    num_minibatches: int = 4
    cpu_devices: int = 0
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    vtrace: VTraceConfig = dataclasses.field(default_factory=VTraceConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    sebulba: SebulbaConfig = dataclasses.field(default_factory=SebulbaConfig)

    def __post_init__(self):
        if self.agent not in AGENTS:
            raise unknown("agent", self.agent, AGENTS)
        for key in ("total_steps", "num_envs", "unroll_length", "num_seeds"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be positive, got {getattr(self, key)}")
        for key in ("updates_per_call", "stagger", "cpu_devices", "seed"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} must not be negative, got {getattr(self, key)}")
        if self.seed + self.num_seeds > 2**32:
            raise ConfigError(f"seed must be below 2^32, got {self.seed + self.num_seeds - 1}")
        # Built here once, so that what they refuse is refused before anything starts.
        _ = self.learner, self.actor_critic

    @property
    def seeds(self) -> range:
        """The seed of each agent."""
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def learner(self) -> LearnerConfig:
        """The settings that are the learner's."""
        return _select(LearnerConfig, self)

    @property
    def actor_critic(self) -> ActorCriticConfig:
        """The settings that are every actor-critic's."""
        return _select(ActorCriticConfig, self)


def _select(cls: type, config: Config) -> Any:
    return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})


def default_config() -> ml_collections.ConfigDict:
    """Every setting at its default, for a config file to change."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def parse(config: Mapping[str, Any] | ml_collections.ConfigDict | Config) -> Config:
    """A frozen ``Config`` of a config file's dictionary.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or an impossible one.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, ml_collections.ConfigDict):
        config = config.to_dict()
    return _build(Config, config, "")


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    built = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise unknown("config key", name, (f"{prefix}{k}" for k in fields))
        built[key] = _convert(fields[key].type, value, name)
    return cls(**built)


def _convert(kind: Any, value: Any, name: str) -> Any:
    """``value`` as the field's type; whole numbers pass for floats, lists for tuples."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is a section, got {value!r}")
        return _build(kind, value, f"{name}.")
    if kind is float and type(value) is int:
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        value = tuple(value)
    if not _fits(kind, value):
        expected = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
        raise ConfigError(f"{name} must be of type {expected}, got {value!r}")
    return value


def _fits(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    if kind == tuple[int, ...]:
        return isinstance(value, tuple) and all(type(x) is int for x in value)
    if kind in (str, int, bool):
        return type(value) is kind
    return isinstance(value, Mapping)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Every number that follows from a config and the number of devices.

    Attributes:
      num_devices: in the mesh.
      num_envs: in all.
      envs_per_device: of them, on each device.
      unroll_length: T.
      steps_per_update: environment steps of one update, over all devices.
      num_updates: of the run.
      updates_per_call: in one call of the compiled program.
      num_calls: of it.
      total_steps: environment steps of the run, ``total_steps`` of the config or a little more.
    """

    num_devices: int
    num_envs: int
    envs_per_device: int
    unroll_length: int
    steps_per_update: int
    num_updates: int
    updates_per_call: int
    num_calls: int
    total_steps: int

    def calls(self, first: int) -> range:
        """The numbers of the updates that calls begin with, from update ``first`` on."""
        return range(first, self.num_updates, self.updates_per_call)

    def last(self, first: int) -> int:
        """Updates done when these calls are over."""
        return first + len(self.calls(first)) * self.updates_per_call


def sizes(config: Config, num_devices: int, num_threads: int = 0) -> Sizes:
    """Derives all sizes.

    Args:
      config: of the run.
      num_devices: that learn.
      num_threads: that step environments on the host, each of which gives a part of its batch to
        every device; 0 where environments are written in JAX.

    Raises:
      ConfigError: environments don't divide over devices and threads.
    """
    divisor = num_devices * max(1, num_threads)
    if config.num_envs % divisor:
        threads = f" times {num_threads} actor threads" if num_threads else ""
        raise ConfigError(
            f"num_envs={config.num_envs} does not divide over {num_devices} devices{threads}; "
            f"{_nearest_multiple(config.num_envs, divisor)} would, and so would "
            f"{_divisors(config.num_envs, max(1, num_threads))} devices"
        )
    steps_per_update = config.num_envs * config.unroll_length
    updates = math.ceil(config.total_steps / steps_per_update)
    rows = 3000 if num_threads else 100
    per_call = min(config.updates_per_call or max(1, min(updates // rows, 100)), updates)
    calls = math.ceil(updates / per_call)
    return Sizes(
        num_devices=num_devices,
        num_envs=config.num_envs,
        envs_per_device=config.num_envs // num_devices,
        unroll_length=config.unroll_length,
        steps_per_update=steps_per_update,
        num_updates=calls * per_call,
        updates_per_call=per_call,
        num_calls=calls,
        total_steps=calls * per_call * steps_per_update,
    )


def _nearest_multiple(n: int, divisor: int) -> int:
    return max(1, round(n / divisor)) * divisor


def _divisors(num_envs: int, num_threads: int) -> str:
    """Numbers of devices that this many environments divide over, the first eight."""
    found = [n for n in range(1, num_envs + 1) if num_envs % (n * num_threads) == 0]
    return ", ".join(map(str, found[:8])) or "no number of"


def cpu_cores() -> int:
    """CPU cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def auto_cpu_devices(config: Config, hosts: int = 1) -> int:
    """How many devices a host's CPU is split into by default: two where that is known to be faster.

    Two devices work on two minibatches' halves at once, but meet at every gradient step. That pays
    from 256 transitions a device and gradient step on (benchmarks/README.md), and was measured on
    two cores only: more devices are for ``cpu_devices`` to ask for.
    """
    devices = 2
    total = devices * hosts
    per_step = config.num_envs * config.unroll_length // config.num_minibatches
    whole = config.agent == "vtrace" or config.network.core != "none"
    items = config.num_envs * (1 if whole else config.unroll_length)
    divides = config.num_envs % total == 0 and items % (total * config.num_minibatches) == 0
    return devices if cpu_cores() >= devices and per_step >= 256 * total and divides else 1
