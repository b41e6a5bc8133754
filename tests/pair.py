"""What two processes do together that need no run; test_processes.py starts both.

python -m tests.pair INDEX PORT FOLDER
"""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import future

from podracer import checkpoint, cli, mesh
from podracer import config as config_lib
from podracer.checkpoint import Checkpoints, Progress
from podracer.errors import ConfigError
from podracer.processes import Address, HostsConfig, Processes, joined
from podracer.session import Options, check_alike, check_shared

# So much that each process' part gets a file of its own.
NOISE = np.random.default_rng(0).random(4096, np.float32)


def agree(processes: Processes) -> None:
    """Answers are those of the first, or of all, whoever comes first."""
    for number in range(3):
        assert processes.from_first(lambda n=number: [n, processes.index]) == [number, 0]
        assert processes.from_all(processes.index + number) == [number, 1 + number]


def share(processes: Processes, folder: epath.Path) -> None:
    """A folder that only looks the same is refused by both."""
    check_shared(folder, processes)
    own = folder / f"of_{processes.index}"
    own.mkdir()
    with pytest.raises(ConfigError, match="not the same folder for process 0 and process 1"):
        check_shared(own, processes)
    assert not list(folder.glob(".shared*"))


def start_alike(processes: Processes) -> None:
    """What was not started by the same command is refused by both."""
    config = config_lib.parse(config_lib.default_config())
    check_alike("anakin", config, Options(), processes)
    other = dataclasses.replace(config, learning_rate=1.0 + processes.index)
    with pytest.raises(ConfigError, match=r"learning_rate=2\.0 and process 0 has 1\.0"):
        check_alike("anakin", other, Options(), processes)
    options = Options(workdir="runs/x" if processes.first else None)
    with pytest.raises(ConfigError, match="process 1 has workdir=False and process 0 has True"):
        check_alike("anakin", config, options, processes)


def state(value: float) -> dict:
    """Of four devices: weights that all hold, and a part of something for each."""
    devices = mesh.make_mesh(jax.devices())

    def make(spec):
        sharding = jax.sharding.NamedSharding(devices, spec)
        return jax.make_array_from_callback(
            NOISE.shape, sharding, lambda index: (NOISE + np.float32(value))[index]
        )

    return {"train": {"weights": {"w": make(mesh.REPLICATED)}}, "env": make(mesh.SHARDED)}


def damage(workdir: epath.Path) -> None:
    """Truncates what only the other process has written, and will read."""
    rest = pathlib.Path(workdir) / checkpoint.FOLDER / "2" / checkpoint.REST
    for path in rest.glob("ocdbt.process_1/d/*"):
        path.write_bytes(b"")


def restore(processes: Processes, workdir: epath.Path) -> Checkpoints:
    """A checkpoint that one process can't read is left by both for the one before."""
    warned = []
    checkpoints = Checkpoints(workdir, 3, warned.append, processes)
    for update in (1, 2):
        checkpoints.save(state(update), Progress(update), None)
    checkpoints.finish()
    processes.from_first(lambda: damage(workdir))
    restored, progress = checkpoints.restore(state(0))
    assert progress.update == 1
    for x, first in zip(jax.tree.leaves(restored), jax.tree.leaves(state(1)), strict=True):
        np.testing.assert_array_equal(x.addressable_data(0), first.addressable_data(0))
    like = restored["train"]["weights"]
    weights, update = checkpoint.load_weights(workdir, "last", like, processes)
    assert update == 1
    np.testing.assert_array_equal(weights["w"].addressable_data(0), NOISE + np.float32(1))
    if processes.first:
        assert "checkpoint 2 is damaged" in warned[0], warned
        assert "process 1: " in warned[0], warned
        assert "process 0: " not in warned[0], warned
    return checkpoints


def fail(processes: Processes, checkpoints: Checkpoints) -> None:
    """A save that fails in one process alone ends both: this does not come back."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if processes.index == 1:
        future.ChainedFuture.result = full
    processes.reached(128, "saving")
    checkpoints.save(state(3), Progress(3), None)
    checkpoints.finish()


def main(index: int, port: int, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    address = Address(f"127.0.0.1:{port}", 2, index)
    with joined(address, HostsConfig(timeout_s=10.0)) as processes:
        processes.check_devices()
        agree(processes)
        start_alike(processes)
        share(processes, epath.Path(folder))
        checkpoints = restore(processes, epath.Path(folder))
        print("restored", flush=True)
        fail(processes, checkpoints)


if __name__ == "__main__":
    cli.leave(cli.exit_code(lambda: main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
