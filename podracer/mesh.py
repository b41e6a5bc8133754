"""Devices: which there are, the mesh over them, and what is exchanged between them.

The only place that names the mesh axis. A program runs on every device at once under
``jax.shard_map`` (``jax.pmap`` is the older way, by now a wrapper over it): each device sees its
own environments and the same weights, and they meet in ``all_mean``.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree

AXIS = "devices"
REPLICATED = P()
SHARDED = P(AXIS)


def start(cpu_devices: int, *, wanted: bool) -> list[Any]:
    """Starts JAX, and gives the devices to run on: all of all processes.

    Args:
      cpu_devices: how many devices to split the CPU into, if that is where JAX runs.
      wanted: the number is the user's word, not our default. As a default it gives way to what the
        environment says; as a word it is an error if JAX is in use already with another number.

    Raises:
      ConfigError: see ``wanted``.
    """
    said = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if wanted or (not said and jax.config.values["jax_num_cpu_devices"] in (None, -1)):
        # Refused once JAX is in use. It then runs with what it has, which we check below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    devices = jax.devices()
    local = [device for device in devices if device.process_index == jax.process_index()]
    if wanted and devices[0].platform == "cpu" and len(local) != cpu_devices:
        raise ConfigError(
            f"cpu_devices={cpu_devices}, but JAX already runs with {len(local)}; set it before the "
            f"first use of JAX, or by the environment variable JAX_NUM_CPU_DEVICES={cpu_devices}"
        )
    return devices


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """One axis over the given devices; by default over all of all processes."""
    return Mesh(np.asarray(jax.devices() if devices is None else devices), (AXIS,))


def per_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """``function`` as every device runs it on its shard.

    JAX's check of what varies between devices is off: with it, gradients of replicated weights are
    summed by JAX itself, one all-reduce for each array, where ours go as one for all
    (``all_mean``). The tests hold what the check would: D devices do what one does.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def device_index() -> Array:
    """Which device this is, within ``per_device``."""
    return jax.lax.axis_index(AXIS)


def all_mean(tree: ArrayTree) -> ArrayTree:
    """The mean over devices, as one all-reduce for the whole tree. Within ``per_device`` only."""
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, AXIS))


def all_gather(tree: ArrayTree) -> ArrayTree:
    """Every device's shard, joined along the first axis. Within ``per_device`` only."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), tree)
