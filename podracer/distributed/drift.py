"""Checks that all devices of a group hold the same weights.

Gradients are averaged, so each of them takes the same step from the same weights. A defective chip,
or a program that differs between processes, makes the copies drift apart silently.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from podracer.distributed import mesh as mesh_lib
from podracer.distributed.checksum import checksum, named_arrays
from podracer.errors import DriftError
from podracer.types import Device, Weights


def make_check(mesh: jax.sharding.Mesh, *, several: bool = False) -> Callable[[Weights, int], None]:
    """Makes a check of the weights on all devices of a mesh.

    Each device computes the checksum of its own copy, and only the checksums are exchanged.

    Args:
      mesh: the devices.
      several: whether the weights are those of several agents, of which each group has its share.

    Returns:
      ``(weights, update) -> None``, given the weights and the number of updates done. It raises
      ``DriftError`` if the copies differ.
    """
    if not several:
        mesh = mesh_lib.make_mesh(list(mesh.devices.flat))
    groups, devices_of_group = mesh.devices.shape
    specs = mesh_lib.AGENTS if groups > 1 else mesh_lib.REPLICATED

    @jax.jit
    def sums(weights: Weights) -> jax.Array:
        def own(weights: Weights) -> jax.Array:
            group = mesh_lib.all_gather(checksum(named_arrays(weights))[None])
            return mesh_lib.gather_agents(group[None])

        return mesh_lib.per_device(own, mesh, specs, mesh_lib.REPLICATED)(weights)

    def check(weights: Weights, update: int) -> None:
        if devices_of_group > 1:
            for group, devices in zip(jax.device_get(sums(weights)), mesh.devices, strict=True):
                compare(group, list(devices), update)

    return check


def compare(sums: np.ndarray, devices: Sequence[Device], update: int) -> None:
    """Raises ``DriftError`` if checksums differ; it names the devices that are in the minority.

    Args:
      sums: ``[devices]`` uint32, the checksum of each device's copy.
      devices: the devices of a group, in the same order.
      update: number of updates done, for the message.
    """
    counts = Counter(sums.tolist()).most_common()
    if len(counts) == 1:
        return
    (most, votes), (_, second) = counts[:2]
    wrong = [
        f"{device} of process {device.process_index}"
        for device, x in zip(devices, sums.tolist(), strict=True)
        if x != most
    ]
    tie = "; there is no majority, so either side may be right" if votes == second else ""
    raise DriftError(
        f"after update {update:,} not all devices hold the same weights: {', '.join(wrong)} "
        f"differ from {votes} of {len(devices)}{tie}. The cause is a defective chip, or a program "
        "that differs between processes; the same command resumes from the last checkpoint"
    )
