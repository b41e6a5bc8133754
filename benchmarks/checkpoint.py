"""Measures for how long a checkpoint of a large replay stops training.

    python benchmarks/checkpoint.py --gigabytes=2

Prints one line of JSON. A synthetic replay of Atari frames is written to by a compiled step that
reuses its memory, as training does. Each round makes a copy of the frames, some steps, a checkpoint
and the step after it, which has to copy what is still being written if the checkpoint did not.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from podracer.distributed import mesh as mesh_lib
from podracer.distributed.processes import Processes
from podracer.storage.checkpoint import Checkpoints, Progress

ENVS, FRAME = 16, (84, 84)


def seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the time that it took."""
    start = time.monotonic()
    result = jax.block_until_ready(function())
    return result, time.monotonic() - start


def make_state(gigabytes: float, devices: int) -> Any:
    """A state with a replay buffer of noise, which can't be compressed, spread over devices."""
    mesh = mesh_lib.make_mesh(jax.devices()[:devices])
    sharded = jax.sharding.NamedSharding(mesh, mesh_lib.SHARDED)
    replicated = jax.sharding.NamedSharding(mesh, mesh_lib.REPLICATED)
    slots = int(gigabytes * 1e9 / ENVS / np.prod(FRAME))

    def noise() -> jax.Array:
        # One hash of the element's number; random bits of JAX would need 4 times the memory.
        shape = (ENVS, slots, *FRAME)
        number = sum(
            jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(factor)
            for axis, factor in enumerate((3266489917, 668265263, 374761393, 2654435761))
        )
        number = (number ^ (number >> 15)) * jnp.uint32(2246822519)
        return ((number ^ (number >> 13)) >> 8).astype(jnp.uint8)

    frames = jax.jit(noise, out_shardings=sharded)()
    step = jax.device_put(jnp.int32(0), replicated)
    weights = jax.device_put(jnp.zeros(1000), replicated)
    return {"source": {"frames": frames}, "train": {"weights": {"w": weights}, "step": step}}


def write(state: Any) -> Any:
    """The state after one more step of all environments, in the memory of the old one."""
    frames, step = state["source"]["frames"], state["train"]["step"]
    new = jnp.full((ENVS, 1, *FRAME), step, jnp.uint8)
    frames = jax.lax.dynamic_update_slice_in_dim(frames, new, step % frames.shape[1], 1)
    train = {"weights": state["train"]["weights"], "step": step + 1}
    return {"source": {"frames": frames}, "train": train}


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the replay")
    parser.add_argument("--devices", type=int, default=1, help="devices that hold it")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    state = make_state(args.gigabytes, args.devices)
    frames = state["source"]["frames"]
    size = frames.nbytes
    step = jax.jit(write, donate_argnums=0).lower(state).compile()
    times: dict[str, list[float]] = {}
    folder = tempfile.mkdtemp()
    checkpoints = Checkpoints(epath.Path(folder), 1, print, Processes())
    copied = np.asarray(frames).copy()
    for number in range(args.rounds + 1):
        measured = {}
        view = np.asarray(state["source"]["frames"])
        _, measured["copy"] = seconds(lambda view=view: np.copyto(copied, view))
        _, measured["copy_to_new_memory"] = seconds(lambda view=view: view.copy())
        del view
        state, _ = seconds(lambda state=state: step(state))
        state, measured["step"] = seconds(lambda state=state: step(state))
        saved = number
        _, measured["save"] = seconds(
            lambda state=state, saved=saved: checkpoints.save(state, Progress(saved), None)
        )
        state, measured["step_after_save"] = seconds(lambda state=state: step(state))
        _, measured["background"] = seconds(checkpoints.finish)
        # The first round compiles.
        for name, x in measured.items() if number else ():
            times.setdefault(name, []).append(x)
    checkpoints.close()
    shutil.rmtree(folder)
    result = {
        "bytes": size,
        "devices": args.devices,
        "seconds": {name: round(median(x), 4) for name, x in times.items()},
        "all_seconds": {name: [round(y, 4) for y in x] for name, x in times.items()},
        "versions": common.versions("podracer", "jax"),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
