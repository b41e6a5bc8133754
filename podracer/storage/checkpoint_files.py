"""Checkpoints as files: what a folder ``checkpoints/UPDATE`` of a workdir holds.

The folder has one item for the weights, one for the contents of a replay buffer if these are saved,
one for the rest of the state, one for the run's progress and one for the score of its evaluation.
Orbax writes it under another name and renames it once it is complete; in a bucket, Orbax instead
adds a file when it is complete.
"""

import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from podracer.distributed.checksum import checksum, digests, is_key, named_arrays, path_name
from podracer.storage import bucket, upgrading
from podracer.storage.deferred_json import (
    DeferredJsonHandler,
    DeferredJsonRestore,
    DeferredJsonSave,
)
from podracer.storage.versions import versions
from podracer.storage.workdir import CHECKPOINTS
from podracer.types import Array, ArrayTree, Row

T = TypeVar("T")

FOLDER = CHECKPOINTS
WEIGHTS, REPLAY, REST, PROGRESS = "weights", "replay", "rest", "progress"
# Items whose arrays are in a part of the state of either architecture, with the names' beginnings.
_PREFIXES = {WEIGHTS: "train/weights/", REPLAY: "source/"}
# Files of a checkpoint that Orbax writes, and that are read and replaced here.
_PROGRESS_FILE, _SCORE_FILE = "progress/metadata", "metrics/metrics"
_COMMITTED = "commit_success.txt"
# Beginnings of names under which earlier commits saved arrays, by the present ones. A new name
# must sort as the old one does, as the checksum depends on the order.
_RENAMED = {"rollout/carry/network": "rollout/carry/memory"}


class Progress(NamedTuple):
    """The progress of a run: what a checkpoint holds besides arrays.

    Attributes:
      update: the number of updates done.
      wall_time: seconds so far, over all starts of the run.
      seconds: how many of these seconds were spent on each activity, by name.
      best: the highest mean return of an evaluation whose weights are saved; None if there is none.
      pending: the last update's row of metrics, if the run stopped before its evaluation was done.
      replay: whether the contents of a replay buffer are saved, where there is one.
    """

    update: int = 0
    wall_time: float = 0.0
    seconds: Mapping[str, float] = {}
    best: float | None = None
    pending: Row | None = None
    replay: bool = True


def list_steps(folder: epath.Path) -> list[int]:
    """The complete checkpoints of a folder, newest first."""
    try:
        # Orbax would treat a folder that can't be read as empty.
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    steps = [int(name) for name in names if name.isdecimal()]
    if bucket.holds(folder):
        steps = [step for step in steps if (folder / str(step) / _COMMITTED).exists()]
    return sorted(steps, reverse=True)


def read_score(folder: epath.Path, step: int) -> float:
    """The mean return of a checkpoint's evaluation; -inf where it was not evaluated."""
    try:
        score = json.loads(bucket.read(folder / str(step) / _SCORE_FILE))["score"]
    except FileNotFoundError:
        score = None
    return _order({"score": score})


def read_writer(folder: epath.Path, step: int) -> str | None:
    """The version of podracer that wrote a checkpoint. None if it does not say, because it is older
    than that entry, or damaged."""
    try:
        return json.loads(bucket.read(folder / str(step) / _PROGRESS_FILE)).get("podracer")
    except (FileNotFoundError, ValueError):
        return None


def _order(metrics: Mapping[str, float | None]) -> float:
    score = metrics["score"]
    return -math.inf if score is None else float(score)


def describe(
    tree: ArrayTree,
) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[[Mapping[str, Array]], ArrayTree]]:
    """What is needed to restore a tree: the shapes and placement of its arrays by name, and a
    function that builds the tree from arrays by name."""
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in named_arrays(tree).items()
    }
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    kinds = {path_name(path): jax.random.key_impl(x) if is_key(x) else None for path, x in paths}

    def build(named: Mapping[str, Array]) -> ArrayTree:
        leaves = (
            jax.random.wrap_key_data(named[name], impl=kind) if kind else named[name]
            for name, kind in kinds.items()
        )
        return structure.unflatten(leaves)

    return shapes, build


def _split(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The items of arrays, with names that omit the item's prefix. There always is one for the
    rest, and others only where they have arrays."""
    items: dict[str, dict[str, Any]] = {REST: {}}
    for name, x in named.items():
        item = next((k for k, prefix in _PREFIXES.items() if name.startswith(prefix)), REST)
        items.setdefault(item, {})[name.removeprefix(_PREFIXES.get(item, ""))] = x
    return items


def _join(items: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _PREFIXES.get(item, "") + name: x
        for item, arrays in items.items()
        if item != PROGRESS
        for name, x in arrays.items()
    }


def replay_arrays(named: Mapping[str, T]) -> dict[str, T]:
    """Those of a state's arrays, by name, that are the contents of its replay."""
    return {name: x for name, x in named.items() if name.startswith(_PREFIXES[REPLAY])}


def empty_replay(
    shapes: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, Array]
) -> dict[str, Array]:
    """The arrays of a replay buffer that a checkpoint does not hold: zeros, as of a new run."""
    return {
        name: jax.jit(partial(jnp.zeros, x.shape, x.dtype), out_shardings=x.sharding)()
        for name, x in replay_arrays(shapes).items()
        if name not in saved
    }


def has_replay(folder: epath.Path, step: int) -> bool:
    """Whether a checkpoint holds the contents of a replay buffer."""
    return bucket.exists(folder / str(step) / REPLAY)


def read(
    folder: epath.Path, step: int, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Reads a checkpoint.

    Args:
      folder: folder of the checkpoints.
      step: the checkpoint's number of updates.
      shapes: shapes and placement of the arrays to read, by name.

    Returns:
      The arrays, of which each process reads what its devices hold, and the progress with the
      checksum, as in the JSON file.
    """
    with open_manager(folder, writes=False) as manager:
        names = _saved_names(manager, step, shapes)
        items = _split({names[name]: x for name, x in shapes.items()})
        arguments = ocp.args.Composite(
            **{k: ocp.args.StandardRestore(x) for k, x in items.items()},
            **{PROGRESS: DeferredJsonRestore()},
        )
        found = manager.restore(step, args=arguments)
    arrays = _join(found)
    return {name: arrays[saved] for name, saved in names.items()}, dict(found[PROGRESS])


def _saved_names(manager: ocp.CheckpointManager, step: int, names: Iterable[str]) -> dict[str, str]:
    """The names of arrays in a checkpoint, by their present ones."""
    saved = {name: name for name in names}
    for new, old in _RENAMED.items():
        renamed = {name: old + name.removeprefix(new) for name in saved if name.startswith(new)}
        if renamed and not renamed.keys() & (manager.item_metadata(step)[REST] or {}).keys():
            saved |= renamed
    return saved


def verify(arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint that was read. Raises ``ValueError`` if its checksum is not that
    of the arrays; all processes compute it together."""
    content = {name: x for name, x in progress.items() if name in (*Progress._fields, "checksum")}
    expected, got = content.pop("checksum"), int(jax.device_get(_checksum(arrays)))
    if got != expected:
        raise ValueError(f"its checksum is {got}, not {expected}")
    return Progress(**content)


def _checksum(arrays: Mapping[str, Array]) -> Array:
    """The checksum of all arrays. Those of a replay buffer are too large to be summed in the order
    that checkpoints have always had, so it is that of their digests."""
    return checksum({**arrays, **digests(replay_arrays(arrays))})


def read_weights(
    folder: epath.Path, step: int, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Mapping[str, Array]:
    """The weights of a checkpoint by name, placed as ``shapes`` are.

    Raises:
      ShapeError: the saved weights have other shapes.
    """
    with open_manager(folder, writes=False) as manager:
        saved = manager.item_metadata(step)[WEIGHTS]
        for name in sorted(saved.keys() | shapes.keys()):
            there, here = (tuple(x[name].shape) if name in x else None for x in (saved, shapes))
            if there != here:
                raise ShapeError(
                    f"{name} has the shape {there} there and {here} here"
                    f"{upgrading.note(read_writer(folder, step))}"
                )
        arguments = ocp.args.Composite(**{WEIGHTS: ocp.args.StandardRestore(shapes)})
        return manager.restore(step, args=arguments)[WEIGHTS]


class ShapeError(Exception):
    """The weights of a checkpoint have other shapes than the network."""


def _copy(x: Array) -> Array:
    """A copy of an array on CPU devices.

    numpy asks the system for large pages of memory, so that this takes half as long as by JAX.
    """

    def copy(data: Array) -> Array:
        values = jax.device_get(data)
        # JAX uses memory that starts at a multiple of 64 bytes as it is.
        room = np.empty(values.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        copied = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        np.copyto(copied, values)
        return jax.device_put(copied, data.sharding, may_alias=True)

    shards = [copy(shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _unshared(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Arrays from which Orbax may write while training continues.

    From a GPU or a TPU, Orbax copies arrays to the host first. On a CPU it writes from the arrays
    themselves, and the next step would have to copy them while they are being written, which takes
    three times as long as to copy them before (benchmarks/README.md).
    """
    on_cpu = all(d.platform == "cpu" for x in arrays.values() for d in x.devices())
    return {name: _copy(x) for name, x in arrays.items()} if on_cpu else arrays


def write(
    manager: ocp.CheckpointManager,
    state: ArrayTree,
    progress: Progress,
    score: float | None,
    *,
    replay: bool = True,
) -> None:
    """Begins to write a checkpoint; Orbax does the rest in the background.

    Args:
      manager: a manager from ``open_manager``.
      state: the state to save; it may be donated as soon as this returns.
      progress: how far the run has come.
      score: the mean return of the evaluation of this state, if there was one.
      replay: whether the contents of a replay buffer are saved.
    """
    arrays = named_arrays(state)
    left_out = {} if replay else replay_arrays(arrays)
    arrays = {name: x for name, x in arrays.items() if name not in left_out}
    progress = progress._replace(replay=not left_out)
    wrote = versions().get("podracer")
    arrays = _unshared(arrays)
    # Training does not wait for the checksum. On a CPU, the next step would: computations that one
    # thread has begun run one after another.
    with ThreadPoolExecutor(1) as thread:
        total = thread.submit(_checksum, arrays).result()
    content = {**progress._asdict(), "checksum": total, "podracer": wrote}
    items = {k: ocp.args.StandardSave(x) for k, x in _split(arrays).items()}
    arguments = ocp.args.Composite(**items, **{PROGRESS: DeferredJsonSave(content)})
    # Orbax copies the arrays to the host in this thread with implicit transfers. JAX's guard checks
    # them on TPUs and GPUs but never on CPUs, where nothing has to be transferred.
    with jax.transfer_guard_device_to_host("allow"):
        manager.save(progress.update, args=arguments, metrics={"score": score}, force=True)


def amend(folder: epath.Path, progress: Progress, score: float | None) -> bool:
    """Replaces the progress and the score of a complete checkpoint, whose arrays stay.

    A run that was stopped during an evaluation has already saved the state that its next start
    evaluates.

    Args:
      folder: folder of the checkpoints.
      progress: the new progress.
      score: the new score; None leaves it as it is.

    Returns:
      Whether anything had to be replaced.
    """
    path = folder / str(progress.update)
    saved = json.loads(bucket.read(path / _PROGRESS_FILE))
    if score is None and saved["pending"] == progress.pending:
        return False
    if score is not None:
        bucket.write(path / _SCORE_FILE, json.dumps({"score": score}))
    # Last: as long as an evaluation is pending, the next start repeats it.
    content = {**saved, **progress._replace(replay=saved.get("replay", True))._asdict()}
    bucket.write(path / _PROGRESS_FILE, json.dumps(content))
    return True


def open_manager(
    folder: epath.Path, keep: int = 1, *, writes: bool = True
) -> ocp.CheckpointManager:
    """Orbax's manager of a folder of checkpoints.

    If processes are named, Orbax synchronises them through JAX's coordinator instead of with a
    collective over all devices. On CPUs, such a collective may still be running on some devices
    when the next one begins on others.

    Args:
      folder: folder of the checkpoints; must exist.
      keep: number of newest checkpoints to keep, in addition to the one with the highest score.
      writes: whether all processes write together; otherwise each one reads by itself.
    """
    processes = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        active = set(range(jax.process_count())) if writes else {jax.process_index()}
        processes = ocp.options.MultiprocessingOptions(
            primary_host=min(active), active_processes=active
        )
    policies = ocp.checkpoint_managers
    preserve = [policies.LatestN(keep), policies.BestN(get_metric_fn=_order, n=1)]
    return ocp.CheckpointManager(
        folder,
        item_handlers={
            **{item: ocp.StandardCheckpointHandler() for item in (*_PREFIXES, REST)},
            PROGRESS: DeferredJsonHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            best_fn=_order,
            preservation_policy=policies.AnyPreservationPolicy(preserve),
            # Removes what a process that was killed has left incomplete. A manager that neither
            # cleans up nor saves is read-only; Orbax's own read-only option logs warnings.
            cleanup_tmp_directories=writes,
            # A manager that reads one checkpoint must not fail because of the score of another.
            lightweight_initialize=not writes,
            # With named processes, Orbax does not create the folder.
            create=False,
            multiprocessing_options=processes,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=_barrier),
        ),
    )


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier in its background thread, skipped by a process that failed to write and
    cleans up: the others never arrive there, and the process must be able to report its error."""
    background = threading.current_thread() is not threading.main_thread()
    if not (background and sys.exception()):
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
