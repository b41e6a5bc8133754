"""A run's configuration: every setting.

A config file starts from ``default_config()`` and changes it; ``parse`` turns the result into a
frozen ``Config``, from which ``make_sizes`` of ``config.sizes`` derives every number that follows.
Neither changes its argument.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.core import Tracer
from ml_collections import ConfigDict

from podracer.agents import AGENTS
from podracer.agents.lpg import Config as UpdateRuleConfig
from podracer.agents.settings import Settings
from podracer.config import members as members_lib
from podracer.config.conversion import SettingsDict, from_mapping
from podracer.config.members import Member, Point
from podracer.config.sections import (
    AgentSections,
    AveragingConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    SebulbaConfig,
    SelectionConfig,
)
from podracer.distributed.joining import HostsConfig
from podracer.errors import ConfigError, unknown
from podracer.learning.optimizer import OptimizerConfig
from podracer.learning.replay import ReplayConfig
from podracer.learning.rollout import RolloutConfig
from podracer.learning.scalars import OFF_AT_ZERO, substitute
from podracer.nets.network import NetworkConfig
from podracer.remote.settings import RemoteConfig
from podracer.types import GradientSteps


@dataclasses.dataclass(frozen=True)
class Config(AgentSections):
    """All settings, for a config file and for ``--config.KEY=VALUE``.

    Attributes:
      env: the environment, as "suite:name" ("gymnax:CartPole-v1", "envpool:Pong-v5",
        "gymnasium:LunarLander-v3"), or as "module:Class" for a gymnax environment of your own.
        Suites in JAX are gymnax, brax, craftax, grid, jumanji, navix, pgx, playground and
        xminigrid; on the host, envpool and gymnasium.
      env_kwargs: keyword arguments of the environment's constructor.
      env_params: values for fields of the environment's parameters, in suites that have them
        (gymnax, craftax, playground, xminigrid); other fields keep their defaults. Of a Brax
        environment, "episode_length" and "action_repeat". Of a Gymnasium environment that observes
        images, "channels" is the place of their channels, "first" or "last"; without it they are
        last. "pixels" observes any Gymnasium environment that can draw itself as gray images of
        this height and width, of which "frames" (3 by default) are stacked.
      observed: of observations with one axis, the components that agents see, such as (0, 2) for
        CartPole without its velocities; () is all.
      agent: the algorithm: "ppo", "vtrace", "q_lambda", "dqn", "r2d2", "d4pg", "muzero" or
        "alphazero". Each has a section of that name for its own settings, the ``Config`` of its
        module; other agents ignore it.
      seed: seed of all random numbers, below 2^32.
      num_seeds: number of independent agents, with the seeds ``seed``, ``seed + 1``, ..., which
        Anakin trains at once in one program and Sebulba one after another. Each of them takes
        ``total_steps`` steps in ``num_envs`` environments.
      sweep: settings and their values, with which agents are trained likewise:
        {"learning_rate": [1e-4, 1e-3], "ppo": {"clip": [0.1, 0.2]}} is each of the four
        combinations, with each of the seeds. See docs/sweeps.md.
      population: number of points of the sweep that are drawn at random, from lists or from
        distributions such as "log_uniform(1e-5, 1e-2)" and "uniform(0.9, 1)"; 0 takes every
        combination.
      agents_at_once: number of agents of a group of devices that learn at the same time; the others
        wait for their turn in each call. The result is the same up to rounding, in less memory. 0
        is all of them.
      selection: see ``SelectionConfig``.
      averaging: see ``AveragingConfig``.
      lpg: see ``agents.lpg.Config``.
      total_steps: environment steps to train for, over all devices, rounded up to whole calls (see
        ``updates_per_call``).
      num_envs: number of environments, over all devices. With remote environments (see ``remote``),
        the number of unrolls of an update.
      unroll_length: steps that each environment takes between two updates (T).
      updates_per_call: number of updates between two rows of metrics. Anakin makes them in one call
        of its compiled program. 0 chooses: about 100 rows a run with Anakin and 3,000 with Sebulba
        (one update with remote workers),
        and at most 100 updates a call. A run that is asked to stop finishes its call first.
      stagger: the largest number of random actions by which environments are advanced before
        training (Anakin only). Each environment draws its own number, so that the first episodes
        do not all end at once; 0 takes none.
      discount: discount factor of future rewards (gamma), in [0, 1].
      entropy_cost: weight of the entropy bonus in the loss of "ppo" and "vtrace".
      value_cost: weight of the value loss of "ppo", "vtrace", "muzero" and "alphazero".
      normalize_observations: standardise observations by their running mean and variance.
      normalize_rewards: divide rewards by the running standard deviation of discounted returns.
      optimizer, learning_rate, anneal, warmup, batch_rule, reference_batch: see
        ``learning.optimizer.OptimizerConfig``.
      epsilon, max_grad_norm: likewise.
      num_epochs, num_minibatches, whole_episodes: see ``learning.rollout.RolloutConfig``; agents
        with replay ignore the first two and reject the last one.
      cpu_devices: number of devices that a CPU is split into; 0 chooses two where that is likely to
        be faster, which takes 256 transitions for each device and gradient step, else one. GPUs and
        TPUs ignore it.
      network: see ``nets.network.NetworkConfig``.
      replay: see ``learning.replay.ReplayConfig``.
      evaluation: see ``EvaluationConfig``.
      checkpoint: see ``CheckpointConfig``.
      hosts: see ``distributed.joining.HostsConfig``.
      logging: see ``LoggingConfig``.
      sebulba: see ``SebulbaConfig``; Anakin ignores it.
      remote: see ``remote.settings.RemoteConfig``; Anakin ignores it.
    """

    env: str = "gymnax:CartPole-v1"
    env_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    observed: tuple[int, ...] = ()
    agent: str = "ppo"
    seed: int = 0
    num_seeds: int = 1
    sweep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    population: int = 0
    agents_at_once: int = 0
    selection: SelectionConfig = dataclasses.field(default_factory=SelectionConfig)
    averaging: AveragingConfig = dataclasses.field(default_factory=AveragingConfig)
    lpg: UpdateRuleConfig = dataclasses.field(default_factory=UpdateRuleConfig)
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
    max_grad_norm: float = dataclasses.field(default=0.5, metadata=OFF_AT_ZERO)
    num_epochs: int = 4
    num_minibatches: int = 4
    whole_episodes: bool = False
    cpu_devices: int = 0
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    sebulba: SebulbaConfig = dataclasses.field(default_factory=SebulbaConfig)
    remote: RemoteConfig = dataclasses.field(default_factory=RemoteConfig)

    def __post_init__(self):
        if self.agent not in AGENTS:
            raise unknown("agent", self.agent, AGENTS)
        for key in ("total_steps", "num_envs", "unroll_length", "num_seeds"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be positive, got {getattr(self, key)}")
        counts = ("updates_per_call", "stagger", "cpu_devices", "population", "agents_at_once")
        for key in (*counts, "seed"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} must not be negative, got {getattr(self, key)}")
        if self.whole_episodes and self.stagger:
            raise ConfigError(
                f"stagger={self.stagger} has no effect with whole_episodes, which begins each "
                "unroll with new episodes; leave it at 0"
            )
        if self.seed + self.num_seeds > 2**32:
            raise ConfigError(f"seed must be below 2^32, got {self.seed + self.num_seeds - 1}")
        # Built here once, so that their impossible settings are rejected before anything starts.
        _ = self.optimization, self.gradient_steps
        self._check_members()
        self._check_groups()

    def _check_members(self) -> None:
        """Checks the config of each member of a sweep as any other."""
        if self.population and not self.sweep:
            raise ConfigError(
                f"population={self.population} draws points of a sweep, but sweep is empty; "
                "for agents that differ in their seed alone, set num_seeds"
            )
        points = self.points
        if self.selection.every:
            if int(len(points) * self.selection.share) == 0:
                raise ConfigError(
                    f"selection.share={self.selection.share} of {len(points)} agents is none; "
                    "train more of them, by sweep and population or num_seeds, or raise it"
                )
            points += members_lib.ends(self.sweep, self.seed)
        if not self.sweep:
            return
        members_lib.check(points, members_lib.scalars(self, ("replay", self.agent)))
        fixed = [name for name in points[0].settings if name in self.agent_config.fixed]
        if fixed and self.selection.every:
            raise ConfigError(
                f"sweep.{fixed[0]} can't change during a run, as selection.every="
                f"{self.selection.every} would have it; leave it out of the sweep, or set "
                "selection.every to 0"
            )
        for point in points:
            try:
                self.alone(point.members[0])
            except ConfigError as error:
                raise ConfigError(f"{point.name} of the sweep, {point.text}: {error}") from error

    def _check_groups(self) -> None:
        """Checks what each of several groups trains with as any other config."""
        groups, folder = self.averaging.groups, self.averaging.folder
        if groups == 1 and not folder:
            return
        if len(self.members) > 1 or self.sweep:
            which = f"averaging.folder={folder}" if folder else f"averaging.groups={groups}"
            raise ConfigError(
                f"{which} is for one agent without a sweep, and this run trains "
                f"{len(self.members)}; set num_seeds to 1 and no sweep"
            )
        if groups > 1 and folder:
            raise ConfigError(
                f"averaging.folder={folder} averages runs, and averaging.groups={groups} groups of "
                "devices of one run; leave one of them at its default"
            )
        if self.num_envs % groups:
            raise ConfigError(
                f"num_envs={self.num_envs} does not divide evenly over averaging.groups={groups}; "
                f"{max(1, round(self.num_envs / groups)) * groups} would"
            )
        _ = self.of_group

    @property
    def steps_per_update(self) -> int:
        """Environment steps of one update, over all devices."""
        return self.num_envs * self.unroll_length

    @property
    def members(self) -> tuple[Member, ...]:
        """The agents of the run."""
        seeds = range(self.seed, self.seed + self.num_seeds)
        return members_lib.expand(self.sweep, self.population, seeds)

    @property
    def points(self) -> tuple[Point, ...]:
        """The members in groups that have the same settings throughout training. With selections,
        which change the settings of each, every member is a point of its own."""
        size = 1 if self.selection.every else self.num_seeds
        members = self.members
        return tuple(Point(members[i : i + size]) for i in range(0, len(members), size))

    def alone(self, member: Member) -> "Config":
        """The config of a run that trains this member alone."""
        one = {"seed": member.seed, "num_seeds": 1, "sweep": {}, "population": 0}
        return members_lib.replace(self, {**member.settings, **one, "selection.every": 0})

    def scaled(self, num_envs: int) -> "Config":
        """With another number of environments, and a replay buffer in proportion to it."""
        factor = num_envs / self.num_envs
        sizes = {
            key: max(1, round(getattr(self.replay, key) * factor))
            for key in ("capacity", "begin", "batch")
        }
        replay = dataclasses.replace(self.replay, **sizes)
        return dataclasses.replace(self, num_envs=num_envs, replay=replay)

    @property
    def of_group(self) -> "Config":
        """What each of the groups that average trains with: its share of the environments and of a
        replay buffer."""
        if self.averaging.groups == 1:
            return self
        one = dataclasses.replace(self, averaging=AveragingConfig())
        return one.scaled(self.num_envs // self.averaging.groups)

    @property
    def optimization(self) -> OptimizerConfig:
        """The settings of the optimizer."""
        return _select(OptimizerConfig, self)

    @property
    def settings(self) -> Settings:
        """The settings that all agents share."""
        return _select(
            Settings,
            self,
            rollout=_select(RolloutConfig, self),
            num_envs=self.environments,
            num_unrolls=self.num_envs,
        )

    @property
    def environments(self) -> int:
        """Number of environments, over all devices; remote ones may be fewer at a time."""
        return self.remote.num_envs or self.num_envs

    @property
    def agent_config(self) -> Any:
        """The agent's own settings, the ``Config`` of its module."""
        return getattr(self, self.agent)

    @property
    def gradient_steps(self) -> GradientSteps:
        """How an update is divided into gradient steps."""
        return self.agent_config.gradient_steps(self.settings)


def _select(cls: type, config: Config, **others: Any) -> Any:
    """A dataclass whose fields are those of the config, except for ``others``."""
    names = {field.name for field in dataclasses.fields(cls)} - others.keys()
    values = {**{name: getattr(config, name) for name in names}, **others}
    if not any(isinstance(x, Tracer) for x in values.values()):
        return cls(**values)
    # In a compiled program, a member's settings have no values that could be checked.
    return substitute(object.__new__(cls), values)


def default_config(agent: str = Config.agent) -> SettingsDict:
    """Every setting with its default value, for a config file to change.

    Args:
      agent: the algorithm. It decides the defaults of some settings (``DEFAULTS`` of its module),
        and changing ``config.agent`` afterwards leaves them as they are.

    Raises:
      ConfigError: an unknown agent.
    """
    return SettingsDict(dataclasses.asdict(parse({"agent": agent})))


def parse(config: Mapping[str, Any] | ConfigDict | Config) -> Config:
    """The frozen ``Config`` with these settings.

    Args:
      config: settings by name, with sections as dictionaries; those left out keep their defaults,
        which are those of the agent.

    Raises:
      ConfigError: an unknown key, a value of the wrong type, or an impossible value.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, ConfigDict):
        config = config.to_dict()
    # ``Config`` rejects an unknown agent.
    agent = AGENTS.get(str(config.get("agent", Config.agent)))
    return from_mapping(Config, _merge(agent.DEFAULTS if agent else {}, config))


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with these values in their place, section by section."""
    sections = {
        key: _merge(default, values[key])
        for key, default in defaults.items()
        if isinstance(default, Mapping) and isinstance(values.get(key), Mapping)
    }
    return {**defaults, **values, **sections}
