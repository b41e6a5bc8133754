"""The memory of a run's state: what a replay buffer needs on each device, and whether it fits."""

import contextlib
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax

from podracer.config import Config
from podracer.errors import ConfigError
from podracer.monitoring.formatting import size
from podracer.types import ArrayTree, Source

# Where Linux tells how much memory a container may use: its second version, and its first one.
CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


class StateMemory(NamedTuple):
    """Memory that the state of a run needs on each device that learns.

    Attributes:
      capacity: environment steps that the replay buffer holds, of one agent over all its
        devices; 0 for agents without one.
      replay: bytes of the replay buffer.
      rest: bytes of everything else.
      mesh: the devices that learn.
      num_agents: number of agents.
    """

    capacity: int
    replay: int
    rest: int
    mesh: jax.sharding.Mesh
    num_agents: int

    @property
    def layout(self) -> dict[str, str]:
        """The replay buffer in words; empty for agents without one."""
        if not self.capacity:
            return {}
        each = f" for each of {self.num_agents} agents" if self.num_agents > 1 else ""
        return {"replay": f"{self.capacity:,} steps{each}, {size(self.replay)} {self.where}"}

    @property
    def where(self) -> str:
        """The devices in words."""
        return f"on each of {self.mesh.size} devices" if self.mesh.size > 1 else "on the device"


def bytes_per_device(tree: ArrayTree) -> int:
    """Bytes of arrays on each device, given the arrays or their shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def measure(source: Source, state: Any, mesh: jax.sharding.Mesh) -> StateMemory:
    """The memory of a run's state.

    Args:
      source: the source of the agent's batches.
      state: shapes and shardings of the state, whose ``source`` is that of the source.
      mesh: the devices that learn.
    """
    replay = bytes_per_device(state.source)
    rest = bytes_per_device(state) - replay
    return StateMemory(source.capacity, replay, rest, mesh, math.prod(state.key.shape))


def available(mesh: jax.sharding.Mesh) -> float:
    """Bytes of memory that a device of this process has; infinite if it does not tell.

    CPU devices share the machine's memory. Other processes on the machine are not considered.
    """
    local = mesh.local_devices
    if local[0].platform == "cpu":
        return machine_memory() / len(local)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min(limit or math.inf for limit in limits)


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container that the process runs in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            # Without a limit, the file holds "max" or a number that no machine has.
            found.append(int(pathlib.Path(path).read_text()))
    return min(found)


def check(memory: StateMemory, config: Config) -> None:
    """Checks that a replay buffer fits into the memory of the devices.

    What a run needs besides its state is known only once it is compiled, so one that passes
    may still be too large.

    Args:
      memory: the memory of the run's state.
      config: the run's configuration.

    Raises:
      ConfigError: it does not fit.
    """
    limit = available(memory.mesh)
    if not memory.capacity or memory.replay + memory.rest <= limit:
        return
    most = int(max(0, limit - memory.rest) * memory.capacity / memory.replay)
    # Two digits, as the number is only about right.
    most -= most % 10 ** max(0, len(str(most)) - 2)
    lower = f"lower it to {most:,}" if most else "lower num_envs"
    if 0 < most < config.replay.begin:
        lower += f" and replay.begin={config.replay.begin:,} with it"
    seeds = " or train fewer agents" * (memory.num_agents > 1)
    raise ConfigError(
        f"replay.capacity={config.replay.capacity:,} needs {size(memory.replay)} {memory.where}, "
        f"and the rest of the state {size(memory.rest)}, but a device has {size(int(limit))}; "
        f"{lower}, use more devices{seeds}"
    )
