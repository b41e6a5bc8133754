"""The sections of a configuration that do not belong to another folder."""

import dataclasses
from typing import Any

from podracer.agents import AGENTS
from podracer.errors import ConfigError, unknown
from podracer.learning.selection import RULES

# A section for each agent, under its name. For type checkers, any name is a section.
AgentSections: Any = dataclasses.make_dataclass(
    "AgentSections",
    [
        (name, agent.Config, dataclasses.field(default_factory=agent.Config))
        for name, agent in AGENTS.items()
    ],
    frozen=True,
)

# Agents that can learn from experience that was collected with older weights, of any age.
OFF_POLICY = tuple(name for name, agent in AGENTS.items() if agent.Config.off_policy)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How the policy is evaluated, during training and at its end.

    Attributes:
      every: number of updates between two evaluations, rounded up to whole calls (see
        ``Config.updates_per_call``); 0 evaluates only at the end.
      episodes: number of whole episodes of each evaluation.
      max_steps: the longest episode, in steps. A longer one counts with its return up to that step.
      greedy: act without exploration: PPO and V-trace take the most probable action, Q(lambda), DQN
        and R2D2 the one of the highest value (except with probability ``evaluation_epsilon``), D4PG
        its action without noise, MuZero the most visited one of a search without noise, AlphaZero
        the network's (see ``evaluation_simulations``); if false, act as in training.
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
class SelectionConfig:
    """Population-based training or an evolution strategy, see ``learning.selection``.

    Attributes:
      rule: "copy": only agents that copy others change their settings, from those of the agent that
        they copy. "evolution": all agents change theirs, from the mean of the best ones.
      every: number of updates between two selections, rounded up to whole calls (see
        ``Config.updates_per_call``); 0 selects never. A selection also waits until every agent that
        has not diverged has ended an episode since the last one.
      share: the share of the agents that copies others, and the share of the best ones, which are
        copied and whose mean counts, in (0, 0.5].
      step: how far settings then move up or down, as a share of what they were drawn from (of its
        logarithm, if it is logarithmic).
      resample: the probability that a setting is drawn again instead.
    """

    rule: str = "copy"
    every: int = 0
    share: float = 0.25
    step: float = 0.1
    resample: float = 0.25

    def __post_init__(self):
        if self.rule not in RULES:
            raise unknown("selection.rule", self.rule, RULES)
        if self.every < 0:
            raise ConfigError(f"selection.every must not be negative, got {self.every}")
        if not 0 < self.share <= 0.5:
            raise ConfigError(f"selection.share must be in (0, 0.5], got {self.share}")
        for key in ("step", "resample"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"selection.{key} must be in [0, 1], got {getattr(self, key)}")


@dataclasses.dataclass(frozen=True)
class AveragingConfig:
    """Groups of devices, or runs, that learn independently and average: see
    ``learning.averaging``.

    Attributes:
      groups: number of groups of devices (Anakin only), each with its share of the environments, of
        a gradient step's batch and of a replay buffer; 1 averages nothing.
      folder: folder through which this run averages with others, which are configs like this one
        with another seed; "" is none. See docs/averaging.md.
      every: number of updates of each group between two averages (K). Calls are whole multiples of
        it, and with a folder they are K updates (see ``Config.updates_per_call``).
      outer_rate: how far the weights move from the last average towards the mean of the groups; 1
        is all the way.
      outer_momentum: Nesterov momentum of these steps, in [0, 1).
      timeout_s: seconds after which what another run has written to the folder is ignored.
    """

    groups: int = 1
    folder: str = ""
    every: int = 8
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    timeout_s: float = 600.0

    def __post_init__(self):
        for key in ("groups", "every", "outer_rate", "timeout_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"averaging.{key} must be positive, got {getattr(self, key)}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"averaging.outer_momentum must be in [0, 1), got {self.outer_momentum}"
            )
        if "://" in self.folder:
            raise ConfigError(
                f"averaging.folder={self.folder} must be a folder of a file system that all runs "
                "share"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, besides at its end, when it is stopped and at its best evaluation.

    Attributes:
      every: number of updates between two checkpoints, rounded up to whole calls (see
        ``Config.updates_per_call``); 0 saves by the clock alone.
      minutes: minutes between two checkpoints; 0 saves by the number of updates alone.
      keep: how many of the newest checkpoints are kept. The one with the best evaluation is kept
        as well.
      replay: save the contents of the replay buffer, too, in each checkpoint; if false, a resumed
        run starts with an empty one.
    """

    every: int = 0
    minutes: float = 5.0
    keep: int = 2
    replay: bool = True

    def __post_init__(self):
        if self.every < 0 or self.minutes < 0 or self.keep <= 0:
            raise ConfigError(
                "checkpoint.every and checkpoint.minutes must not be negative, checkpoint.keep "
                f"must be positive, got {self.every}, {self.minutes} and {self.keep}"
            )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics are written, besides the workdir's ``metrics.jsonl``.

    Attributes:
      tensorboard: write TensorBoard event files into the folder ``tensorboard`` of the workdir.
      wandb: send metrics to Weights & Biases, which needs ``pip install -e '.[wandb]'``.
      wandb_project: name of the project at Weights & Biases.
      wandb_entity: user or team that owns this project; "" is the user's default.
    """

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "podracer"
    wandb_entity: str = ""


@dataclasses.dataclass(frozen=True)
class SebulbaConfig:
    """Settings of Sebulba; Anakin ignores them.

    Attributes:
      actor_devices: indices of the devices of each host that act; () derives them from
        ``learner_devices`` or ``learners_per_actor``.
      learner_devices: indices of the devices of each host that learn; () takes all devices that do
        not act. A device in both lists does both.
      learners_per_actor: number of learner devices for each actor device, where neither list is
        given: 3 splits 2 devices into 1 + 1, 4 into 1 + 3 and 8 into 2 + 6. A single device does
        both.
      threads: number of actor threads for each actor device. Each thread steps its own pool of
        environments.
      pool_threads: number of threads with which envpool steps each pool; 0 divides the CPU cores
        evenly among the pools.
      lag: unroll n acts with the weights after update n - lag. With 0 actors wait for each update;
        with 1 they act while the learner learns from the previous unroll.
      free_running: act with the newest available weights, whatever their lag. Runs are then not
        reproducible, and only agents that learn from experience of any age allow it.
      newest_frame: transfer only the newest of the stacked frames to the device, which stacks them
        again; envpool's Atari environments only.
      timeout_s: seconds after which an activity of a thread, such as a step of its environments,
        counts as hanging, and the run ends. Updates and other work on devices may take 10 times as
        long as the longest update so far, if that is more.
      first_update_timeout_s: seconds for work on devices until the first update has ended.
      max_restarts: how often an actor thread may rebuild a pool that failed, within
        ``restart_window_s`` seconds, before the run ends.
      restart_window_s: the period in which restarts are counted.
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
    first_update_timeout_s: float = 1800.0
    max_restarts: int = 10
    restart_window_s: float = 3600.0

    def __post_init__(self):
        positive = ("learners_per_actor", "threads", "timeout_s", "first_update_timeout_s")
        for key in (*positive, "restart_window_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"sebulba.{key} must be positive, got {getattr(self, key)}")
        for key in ("pool_threads", "max_restarts"):
            if getattr(self, key) < 0:
                raise ConfigError(f"sebulba.{key} must not be negative, got {getattr(self, key)}")
        if self.lag not in (0, 1):
            raise ConfigError(f"sebulba.lag must be 0 or 1, got {self.lag}")
