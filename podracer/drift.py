"""Whether all devices hold the same weights, as they must: gradients are averaged, so all take the
same step from the same weights. A defective chip, or a fault of a program, can part them unseen."""

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from podracer import mesh as mesh_lib
from podracer.checkpoint import checksum, named
from podracer.errors import DriftError
from podracer.types import Device, Weights


def make_check(mesh: jax.sharding.Mesh) -> Callable[[Weights, int], None]:
    """``(weights, update)`` of all devices, which raises ``DriftError`` where they differ.

    Each device sums the bits it holds itself; what is exchanged is one number of each.
    """
    replicated = mesh_lib.REPLICATED

    @jax.jit
    def sums(weights: Weights) -> jax.Array:
        def own(weights: Weights) -> jax.Array:
            return mesh_lib.all_gather(checksum(named(weights))[None])

        return mesh_lib.per_device(own, mesh, replicated, replicated)(weights)

    def check(weights: Weights, update: int) -> None:
        if mesh.size > 1:
            compare(jax.device_get(sums(weights)), list(mesh.devices.flat), update)

    return check


def compare(sums: np.ndarray, devices: Sequence[Device], update: int) -> None:
    """Raises ``DriftError`` with the devices that differ from most others.

    Args:
      sums: ``[devices]``, of what each one holds.
      devices: in that order.
      update: after which.
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
    who = "; nobody can tell which are right" if votes == second else ""
    raise DriftError(
        f"after update {update:,} not all devices hold the same weights: {', '.join(wrong)} "
        f"differ from {votes} of {len(devices)}{who}. A defective chip does this, or a program "
        "that is not the same in all processes; the same command goes on from the last checkpoint"
    )
