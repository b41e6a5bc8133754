"""Checks that all devices hold the same weights.

Gradients are averaged, so every device takes the same step from the same weights. A defective chip,
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


def make_check(mesh: jax.sharding.Mesh) -> Callable[[Weights, int], None]:
    """Makes a check of the weights on all devices of a mesh.

    Each device computes the checksum of its own copy, and only the checksums are exchanged.

    Returns:
      ``(weights, update) -> None`` for replicated weights and the number of updates done. It raises
      ``DriftError`` if the copies differ.
    """
    replicated = mesh_lib.REPLICATED

    @jax.jit
    def sums(weights: Weights) -> jax.Array:
        def own(weights: Weights) -> jax.Array:
            return mesh_lib.all_gather(checksum(named_arrays(weights))[None])

        return mesh_lib.per_device(own, mesh, replicated, replicated)(weights)

    def check(weights: Weights, update: int) -> None:
        if mesh.size > 1:
            compare(jax.device_get(sums(weights)), list(mesh.devices.flat), update)

    return check


def compare(sums: np.ndarray, devices: Sequence[Device], update: int) -> None:
    """Raises ``DriftError`` if checksums differ; it names the devices that are in the minority.

    Args:
      sums: ``[devices]`` uint32, the checksum of each device's copy.
      devices: the devices, in the same order.
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
