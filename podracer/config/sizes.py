"""The numbers that follow from a configuration and the devices."""

import dataclasses
import math
import os

from podracer.config import Config
from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Every number that follows from a config and the number of devices.

    Attributes:
      num_agents: number of agents that learn at once; all other numbers are those of one.
      learners: number of learners with weights of their own: the agents, or the groups of one agent
        that average.
      num_devices: number of devices that learn, over all hosts.
      num_groups: number of groups of these devices, each of which has learners of its own.
      agents_at_once: number of learners of a group of devices that learn at the same time.
      num_envs: number of environments of an agent.
      envs_per_device: number of environments of a learner on each device.
      unroll_length: steps that each environment takes between two updates (T).
      steps_per_update: environment steps of one update of an agent.
      num_updates: number of updates of the run.
      updates_per_call: number of updates of one call of the compiled program.
      num_calls: number of these calls.
      total_steps: environment steps of the run: the config's ``total_steps``, rounded up to whole
        calls.
    """

    num_agents: int
    learners: int
    num_devices: int
    num_groups: int
    agents_at_once: int
    num_envs: int
    envs_per_device: int
    unroll_length: int
    steps_per_update: int
    num_updates: int
    updates_per_call: int
    num_calls: int
    total_steps: int

    def calls(self, first: int) -> range:
        """The number of the first update of each call, from update ``first`` on."""
        return range(first, self.num_updates, self.updates_per_call)

    def last(self, first: int) -> int:
        """Number of updates done after these calls."""
        return first + len(self.calls(first)) * self.updates_per_call


def make_sizes(config: Config, num_devices: int, num_threads: int = 0) -> Sizes:
    """Derives all sizes.

    Args:
      config: the run's configuration.
      num_devices: number of devices that learn.
      num_threads: number of actor threads, each of which splits its batch over all devices; 0 for
        environments written in JAX.

    Raises:
      ConfigError: the environments do not divide evenly over devices and threads, or the agents
        over turns.
    """
    learners, in_group = num_learners(config), devices_of_group(config, num_devices)
    num_envs = config.of_group.num_envs
    divisor = in_group * max(1, num_threads)
    if num_envs % divisor:
        threads = f" times {num_threads} actor threads (sebulba.threads)" if num_threads else ""
        each = f" of each of {config.averaging.groups} groups" * (config.averaging.groups > 1)
        over = _divisors(num_envs, max(1, num_threads))
        others = f", and {num_envs} divides over {over} devices" if over else ""
        raise ConfigError(
            f"num_envs={num_envs}{each} does not divide evenly over {in_group} "
            f"{'device' if in_group == 1 else 'devices'}{threads}; "
            f"{_nearest_multiple(num_envs, divisor)} would{others}"
        )
    steps_per_update = config.steps_per_update
    updates = math.ceil(config.total_steps / steps_per_update)
    rows = 3000 if num_threads else 100
    chosen = max(1, min(updates // rows, 100))
    if config.remote.num_envs:
        # Between calls, a run that waits for workers can be stopped.
        chosen = 1
    per_call = min(config.updates_per_call or chosen, updates)
    if config.averaging.folder:
        per_call = config.averaging.every
    elif config.averaging.groups > 1:
        per_call = math.ceil(per_call / config.averaging.every) * config.averaging.every
    calls = math.ceil(updates / per_call)
    groups = num_devices // in_group
    return Sizes(
        num_agents=len(config.members),
        learners=learners,
        num_devices=num_devices,
        num_groups=groups,
        agents_at_once=_agents_at_once(config, learners // groups),
        num_envs=config.num_envs,
        envs_per_device=num_envs // in_group,
        unroll_length=config.unroll_length,
        steps_per_update=steps_per_update,
        num_updates=calls * per_call,
        updates_per_call=per_call,
        num_calls=calls,
        total_steps=calls * per_call * steps_per_update,
    )


def num_learners(config: Config) -> int:
    """The learners with weights of their own."""
    return len(config.members) * config.averaging.groups


def make_meta_sizes(config: Config, num_devices: int) -> Sizes:
    """The sizes of a run that learns an update rule. An update is a step of the rule, and
    counts the environment steps of all agents, which are the learners.

    Args:
      config: the run's configuration.
      num_devices: number of devices, over which the agents are spread.

    Raises:
      ConfigError: the agents do not divide evenly over devices.
    """
    own = config.lpg
    if own.agents % num_devices:
        raise ConfigError(
            f"the lpg.agents={own.agents} agents do not divide evenly over {num_devices} devices; "
            f"{_nearest_multiple(own.agents, num_devices)} would"
        )
    one = make_sizes(config, 1)
    steps = own.agents * (own.updates + 1) * one.steps_per_update
    updates = math.ceil(config.total_steps / steps)
    per_call = min(config.updates_per_call or max(1, updates // 100), updates)
    calls = math.ceil(updates / per_call)
    return dataclasses.replace(
        one,
        learners=own.agents,
        num_devices=num_devices,
        num_groups=num_devices,
        agents_at_once=own.agents // num_devices,
        steps_per_update=steps,
        num_updates=calls * per_call,
        updates_per_call=per_call,
        num_calls=calls,
        total_steps=calls * per_call * steps,
    )


def devices_of_group(config: Config, num_devices: int) -> int:
    """The devices that share each learner. Learners are spread over devices first, so that as few
    devices as possible have to exchange gradients."""
    return num_devices // math.gcd(num_learners(config), num_devices)


def _agents_at_once(config: Config, in_group: int) -> int:
    """How many of a group's agents learn at the same time.

    Raises:
      ConfigError: they don't divide evenly over turns.
    """
    at_once = min(config.agents_at_once or in_group, in_group)
    if in_group % at_once:
        raise ConfigError(
            f"the {in_group} agents of each group of devices do not divide evenly into turns of "
            f"agents_at_once={at_once}; {_divisors(in_group, 1)} would"
        )
    return at_once


def _nearest_multiple(n: int, divisor: int) -> int:
    return max(1, round(n / divisor)) * divisor


def _divisors(num_envs: int, num_threads: int) -> str:
    """The first eight numbers of devices that the environments divide evenly over, as a text."""
    found = [n for n in range(1, num_envs + 1) if num_envs % (n * num_threads) == 0]
    return ", ".join(map(str, found[:8]))


def cpu_cores() -> int:
    """Number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def auto_cpu_devices(config: Config, hosts: int = 1) -> int:
    """How many devices a host's CPU is split into by default: two where that is faster, else one.

    Two devices compute the two halves of a minibatch at once, but synchronise at every gradient
    step. That pays off from 256 transitions for each device and gradient step
    (benchmarks/README.md). Devices with agents of their own have nothing to synchronise. It was
    measured on two cores only; ``cpu_devices`` sets other numbers.

    Args:
      config: the run's configuration.
      hosts: number of hosts.
    """
    devices = 2
    share = devices_of_group(config, devices * hosts)
    one = config.of_group
    steps = one.gradient_steps
    divides = one.num_envs % share == 0 and steps.parts % share == 0
    each = num_learners(config) * share // (devices * hosts)
    divides &= each % min(config.agents_at_once or each, each) == 0
    enough = share == 1 or steps.transitions >= 256 * share
    return devices if cpu_cores() >= devices and enough and divides else 1
