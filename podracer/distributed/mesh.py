"""Devices: which of them a run uses, the mesh over them, and how they exchange data.

This is the only module that names the axes of the mesh. A program runs on every device at once
under ``jax.shard_map``: the devices of a group have environments of their own and the same weights,
and gradients are averaged over them by ``all_mean``. There is one group, unless several agents
learn in one program: then each group has agents of its own. Or groups train one agent
independently, and average its weights at intervals: see ``learning.averaging``.

Reproducibility: that the same command gives the same weights, bit for bit, is tested on CPUs
only; a few runs on one GPU were equal, too (docs/accelerators.md). On GPUs, XLA chooses kernels by
timing them, and some kernels add in an order that varies from run to run, such as scatter, which
the gradients of indexing and of max-pooling become. The environment variable
``XLA_FLAGS=--xla_gpu_deterministic_ops=true`` is XLA's guarantee of run-to-run determinism: kernels
are chosen without timing, and only deterministic ones, which is slower. Even so, results differ
between GPU models and between versions of JAX and CUDA.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podracer.errors import ConfigError
from podracer.types import Array, ArrayTree, Device
from podracer.xla_cpu import malloc
from podracer.xla_cpu.raveling import ravel

GROUPS, AXIS = "groups", "devices"
REPLICATED = P()
SHARDED = P(AXIS)
# For arrays whose second axis is that of the environments: trajectories, which are time-major.
SHARDED_SECOND = P(None, AXIS)
# For arrays whose first axis is that of several agents, and whose second one may be that of their
# environments.
AGENTS = P(GROUPS)
AGENTS_SHARDED = P(GROUPS, AXIS)
# For arrays whose first axis is that of all devices.
EACH_DEVICE = P((GROUPS, AXIS))


def initialize_devices(cpu_devices: int, *, required: bool) -> list[Device]:
    """Starts JAX's devices and returns those that the run uses, ordered by process.

    These are all devices of all processes; on CPUs, the first ``cpu_devices`` of each process.

    Args:
      cpu_devices: number of devices to split the CPU of each process into. It has no effect on
        other platforms.
      required: whether the user has set this number. If it is only our default, JAX's environment
        variables take precedence, and so does a smaller number with which JAX already runs.

    Raises:
      ConfigError: ``cpu_devices`` are required, but JAX already runs with fewer.
    """
    _enable_compilation_cache()
    xla_flags = os.environ.get("XLA_FLAGS", "")
    in_environment = (
        "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in xla_flags
    )
    configured = jax.config.values["jax_num_cpu_devices"] not in (None, -1)
    if required or not (in_environment or configured):
        # This raises if JAX already runs. The number of its devices is checked below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    local = jax.local_devices()
    if local[0].platform == "cpu":
        malloc.keep_freed_memory()
    by_process = [jax.local_devices(process_index=p) for p in range(jax.process_count())]
    if local[0].platform != "cpu" or (in_environment and not required):
        return [device for devices in by_process for device in devices]
    if required and len(local) < cpu_devices:
        raise ConfigError(
            f"cpu_devices={cpu_devices}, but JAX already runs with {len(local)}; set it before the "
            f"first use of JAX, or with the environment variable JAX_NUM_CPU_DEVICES={cpu_devices}"
        )
    return [device for devices in by_process for device in devices[:cpu_devices]]


def _enable_compilation_cache() -> None:
    """Lets JAX cache compiled programs in the user's cache folder, unless the user has configured
    this: the second start of a run then compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "podracer"))
        # By default JAX would not cache small programs, and a run has dozens of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class Split(NamedTuple):
    """The devices of a host by role; the same device may have both roles.

    Attributes:
      actors: devices that act in environments.
      learners: devices that learn.
    """

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
      devices: devices of the host.
      actors: indices into ``devices`` of those that act; empty chooses them.
      learners: indices of those that learn; empty takes all that don't act.
      learners_per_actor: number of learners per actor, where neither list is given.

    Raises:
      ConfigError: an index is out of range or listed twice, or no device is left to learn.
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


def make_mesh(devices: Sequence[Device], groups: int = 1) -> Mesh:
    """A mesh over these devices, of which each group has as many, next to each other."""
    return Mesh(np.asarray(devices).reshape(groups, -1), (GROUPS, AXIS))


def per_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Makes a function run on every device of a mesh, each with its shard of the arguments.

    This is ``jax.shard_map`` without its check of which values vary between devices
    (``check_vma``). With this check JAX itself sums the gradients of replicated weights, by one
    all-reduce for each array; ``all_mean`` needs one for all. Tests verify instead that D devices
    compute what one computes.

    Args:
      function: maps one device's shards of the arguments to its shards of the results.
      mesh: the devices.
      in_specs: how the arguments are sharded.
      out_specs: how the results are sharded.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def global_shapes(part: ArrayTree, mesh: Mesh, specs: Any) -> ArrayTree:
    """Shapes of arrays over the whole mesh, with their shardings.

    Args:
      part: arrays, or their shapes, as one device has them.
      mesh: all devices.
      specs: the sharding of each array; a tree that is a prefix of ``part``.
    """

    def over_mesh(spec: P, x: Any) -> jax.ShapeDtypeStruct:
        axis = spec.index(AXIS)
        whole = x.shape[axis] * mesh.shape[AXIS]
        shape = (*x.shape[:axis], whole, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return _by_spec(over_mesh, specs, part)


def sharded_shapes(tree: ArrayTree, mesh: Mesh, specs: Any) -> ArrayTree:
    """Shapes of arrays with their shardings, weakly typed where the arrays are, so that a function
    that was traced with them is not traced again for the arrays.

    Args:
      tree: whole arrays, or their shapes.
      mesh: all devices.
      specs: the sharding of each array; a tree that is a prefix of ``tree``.
    """

    def shape(spec: P, x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return _by_spec(shape, specs, tree)


def from_parts(parts: Sequence[ArrayTree], mesh: Mesh, specs: Any) -> ArrayTree:
    """Combines the shards on this host's devices into arrays over the whole mesh, without copying.

    Args:
      parts: the arrays of each device of this host, in the mesh's order.
      mesh: the devices of all hosts.
      specs: the sharding of each array; a tree that is a prefix of each part.
    """
    shapes = global_shapes(parts[0], mesh, specs)
    return jax.tree.map(
        lambda x, *parts: jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts),
        shapes,
        *parts,
    )


@cache
def _replicate(mesh: Mesh) -> Callable[[ArrayTree], ArrayTree]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, REPLICATED))


def replicate(tree: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Arrays over a mesh, whole on each of its devices; copied only if they are not yet."""
    if all(x.is_fully_replicated for x in jax.tree.leaves(tree)):
        return tree
    return _replicate(mesh)(tree)


def process_all_gather(numbers: np.ndarray, mesh: Mesh) -> Callable[[], np.ndarray]:
    """Starts to gather numbers from all processes, through the devices of a mesh.

    All processes must call this in the same order.

    Args:
      numbers: ``[N]`` float64 of this process. Their bits are not changed.
      mesh: devices of all processes, with those of a process next to each other.

    Returns:
      A function that waits for the numbers of all processes, ``[processes, N]`` float64.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    firsts = [owners.index(p) for p in dict.fromkeys(owners)]
    if len(firsts) == 1:
        return lambda: numbers[None]
    # As pairs of uint32: by default JAX has no 64-bit types.
    own = numbers.view(np.uint32)[None]
    parts = [jax.device_put(own, d) for d in mesh.local_devices]
    sharding, shape = NamedSharding(mesh, EACH_DEVICE), (mesh.size, own.shape[1])
    gathered = _replicate(mesh)(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return lambda: jax.device_get(local(gathered))[firsts].view(np.float64)


def local(tree: ArrayTree) -> ArrayTree:
    """The copies of replicated arrays on this host's first device, without copying."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def _by_spec(function: Callable[[P, Any], Any], specs: Any, tree: ArrayTree) -> ArrayTree:
    """Maps ``function`` over a tree whose prefix ``specs`` is."""
    return jax.tree.map(
        lambda spec, branch: jax.tree.map(partial(function, spec), branch), specs, tree
    )


def device_index() -> Array:
    """Index of the device in its group, ``[]`` int32. Within ``per_device`` only."""
    return jax.lax.axis_index(AXIS)


def _reduce(tree: ArrayTree, collective: Callable[[Array, str], Array]) -> ArrayTree:
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    flat, unravel = ravel(tree)
    return unravel(collective(flat, AXIS))


def all_mean(tree: ArrayTree) -> ArrayTree:
    """The mean over a group, by one all-reduce for the whole tree. Within ``per_device`` only."""
    return _reduce(tree, jax.lax.pmean)


def all_max(tree: ArrayTree) -> ArrayTree:
    """The maximum over a group, by one all-reduce for the tree. Within ``per_device`` only."""
    return _reduce(tree, jax.lax.pmax)


def all_sum(tree: ArrayTree) -> ArrayTree:
    """The sum over a group, by one all-reduce for the whole tree. Within ``per_device`` only."""
    return _reduce(tree, jax.lax.psum)


def sum_groups(tree: ArrayTree) -> ArrayTree:
    """The sum over groups of a tree that the devices of a group have alike, by one all-reduce, in
    which each of them has its share: groups may be slices, with a slow network between them. Within
    ``per_device`` only."""
    flat, unravel = ravel(tree)
    shares = jax.lax.axis_size(AXIS)
    padded = jnp.pad(flat, (0, -flat.size % shares)).reshape(shares, -1)
    total = jax.lax.psum(padded[jax.lax.axis_index(AXIS)], GROUPS)
    return unravel(_gather(total, AXIS)[: flat.size])


def all_gather(tree: ArrayTree) -> ArrayTree:
    """The shards of a group's devices, concatenated along the first axis. Within ``per_device``
    only."""
    return _gather(tree, AXIS)


def own_agents(tree: ArrayTree) -> ArrayTree:
    """The agents of the device's group, of all agents, which are the first axis. Within
    ``per_device`` only."""
    group, groups = jax.lax.axis_index(GROUPS), jax.lax.axis_size(GROUPS)
    return jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:])[group], tree)


def gather_agents(tree: ArrayTree) -> ArrayTree:
    """The agents of all groups, which are the first axis. Within ``per_device`` only."""
    return _gather(tree, GROUPS)


def _gather(tree: ArrayTree, axis: str) -> ArrayTree:
    if jax.lax.axis_size(axis) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True), tree)
