"""Devices: which there are, the mesh over them, and what is exchanged between them.

The only place that names the mesh axis. A program runs on every device at once under
``jax.shard_map`` (``jax.pmap`` is the older way, by now a wrapper over it): each device sees its
own environments and the same weights, and they meet in ``all_mean``.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree, Device

AXIS = "devices"
REPLICATED = P()
SHARDED = P(AXIS)
# Where the environments are the second axis: of a trajectory, which is time-major, or of the
# environments of several agents.
SHARDED_SECOND = P(None, AXIS)


def start(cpu_devices: int, *, wanted: bool) -> list[Device]:
    """Starts JAX, and gives the devices to run on: all of all processes, or so many on a CPU.

    Those of a process are neighbours.

    Args:
      cpu_devices: how many devices to split the CPU into, if that is where JAX runs.
      wanted: the number is the user's word, not our default. As a default it gives way to what the
        environment says, and to what there is where an earlier run has started JAX with less.

    Raises:
      ConfigError: more are wanted than JAX, which is in use already, has.
    """
    _keep_compiled()
    said = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if wanted or (not said and jax.config.values["jax_num_cpu_devices"] in (None, -1)):
        # Refused once JAX is in use. It then runs with what it has, which we check below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    local = jax.local_devices()
    of_process = [jax.local_devices(process_index=p) for p in range(jax.process_count())]
    if local[0].platform != "cpu" or (said and not wanted):
        return [device for some in of_process for device in some]
    if wanted and len(local) < cpu_devices:
        raise ConfigError(
            f"cpu_devices={cpu_devices}, but JAX already runs with {len(local)}; set it before the "
            f"first use of JAX, or by the environment variable JAX_NUM_CPU_DEVICES={cpu_devices}"
        )
    return [device for some in of_process for device in some[:cpu_devices]]


def _keep_compiled() -> None:
    """Has JAX keep compiled programs in the user's cache folder, unless it was told where, or not
    to: a second start then compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "podracer"))
        # Small programs too: a run has dozens.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class Split(NamedTuple):
    """Which devices of this host act, and which learn; both do both where they are the same."""

    actors: tuple[Device, ...]
    learners: tuple[Device, ...]


def split(
    devices: Sequence[Device],
    actors: Sequence[int],
    learners: Sequence[int],
    learners_per_actor: int,
) -> Split:
    """Splits a host's devices into actors and learners.

    Args:
      devices: of this host.
      actors: numbers of those that act; none chooses.
      learners: numbers of those that learn; none takes those that don't act.
      learners_per_actor: where nothing is said.

    Raises:
      ConfigError: a number that is no device's or is there twice, or nothing left to learn.
    """
    count = len(devices)
    for name, numbers in (("actor", actors), ("learner", learners)):
        wrong = [n for n in numbers if not 0 <= n < count]
        if wrong or len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"sebulba.{name}_devices={tuple(numbers)} must be different numbers of this host's "
                f"{count} devices, from 0 to {count - 1}"
            )
    if not actors and learners:
        actors = [n for n in range(count) if n not in learners] or learners
    elif not actors:
        actors = range(max(1, count // (1 + learners_per_actor)))
    if not learners:
        learners = [n for n in range(count) if n not in actors]
        if not learners and count > 1:
            raise ConfigError(
                f"sebulba.actor_devices={tuple(actors)} leaves none of {count} devices to learn; "
                "list sebulba.learner_devices to share some"
            )
        learners = learners or actors
    return Split(tuple(devices[n] for n in actors), tuple(devices[n] for n in learners))


def make_mesh(devices: Sequence[Device]) -> Mesh:
    """One axis over the given devices."""
    return Mesh(np.asarray(devices), (AXIS,))


def per_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """``function`` as every device runs it on its shard.

    JAX's check of what varies between devices is off: with it, gradients of replicated weights are
    summed by JAX itself, one all-reduce for each array, where ours go as one for all
    (``all_mean``). The tests hold what the check would: D devices do what one does.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def global_shapes(part: ArrayTree, mesh: Mesh, specs: Any) -> ArrayTree:
    """Shapes of arrays over the whole mesh, of the shapes of one device's part.

    Args:
      part: what each device has.
      mesh: of all devices.
      specs: how arrays are split, for ``part`` or for branches of it.
    """

    def over_mesh(spec: P, x: Any) -> jax.ShapeDtypeStruct:
        axis = spec.index(AXIS)
        shape = (*x.shape[:axis], x.shape[axis] * mesh.size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return _by_spec(over_mesh, specs, part)


def placed(tree: ArrayTree, mesh: Mesh, specs: Any) -> ArrayTree:
    """Shapes of whole arrays together with how they lie on the mesh; ``specs`` as above."""
    return _by_spec(
        lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        specs,
        tree,
    )


def from_parts(parts: Sequence[ArrayTree], mesh: Mesh, specs: Any) -> ArrayTree:
    """Arrays over the whole mesh, of the parts that this host's devices hold; nothing moves."""
    shapes = global_shapes(parts[0], mesh, specs)
    return jax.tree.map(
        lambda x, *parts: jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts),
        shapes,
        *parts,
    )


@cache
def _replicate(mesh: Mesh) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))


def tell_all(numbers: np.ndarray, mesh: Mesh) -> Callable[[], np.ndarray]:
    """Begins to exchange numbers between processes, over the devices of a mesh.

    All processes must call this in the same order.

    Args:
      numbers: of this process, ``[N]`` float64; they arrive bit for bit.
      mesh: with devices of every process, those of one being neighbours.

    Returns:
      What waits for the numbers of all, ``[processes, N]``.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    firsts = [owners.index(p) for p in dict.fromkeys(owners)]
    if len(firsts) == 1:
        return lambda: numbers[None]
    # Half numbers: there are no 64 bits on a device unless JAX is told so.
    mine = numbers.view(np.uint32)[None]
    parts = [jax.device_put(mine, d) for d in mesh.local_devices]
    sharding, shape = NamedSharding(mesh, SHARDED), (mesh.size, mine.shape[1])
    told = _replicate(mesh)(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return lambda: jax.device_get(local(told))[firsts].view(np.float64)


def local(tree: ArrayTree) -> ArrayTree:
    """Replicated arrays as this host's first device has them; nothing moves."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def _by_spec(function: Callable[[P, Any], Any], specs: Any, tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(
        lambda spec, branch: jax.tree.map(partial(function, spec), branch), specs, tree
    )


def device_index() -> Array:
    """Which device this is, within ``per_device``."""
    return jax.lax.axis_index(AXIS)


def _reduce(tree: ArrayTree, collective: Callable[[Array, str], Array]) -> ArrayTree:
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(collective(flat, AXIS))


def all_mean(tree: ArrayTree) -> ArrayTree:
    """The mean over devices, as one all-reduce for the whole tree. Within ``per_device`` only."""
    return _reduce(tree, jax.lax.pmean)


def all_sum(tree: ArrayTree) -> ArrayTree:
    """The sum over devices, likewise."""
    return _reduce(tree, jax.lax.psum)


def all_gather(tree: ArrayTree) -> ArrayTree:
    """Every device's shard, joined along the first axis. Within ``per_device`` only."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), tree)
