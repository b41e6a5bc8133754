"""One of the two processes that test_two_processes.py starts.

python -m tests.distributed.pair INDEX PORT FOLDER
"""

import dataclasses
import errno
import functools
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import future

from podracer import anakin
from podracer import config as config_lib
from podracer.distributed import mesh
from podracer.distributed.joining import Address, HostsConfig
from podracer.distributed.processes import Processes, joined
from podracer.errors import ConfigError, ExitCode, run_command
from podracer.storage import checkpoint, checkpoint_files
from podracer.storage.checkpoint import Checkpoints, Progress
from podracer.training import command_line
from podracer.training.session import Options, check_alike, check_shared
from tests.distributed.jobs import SHUFFLED, flags

# So large that Orbax writes each process's part to a file of its own.
NOISE = np.random.default_rng(0).random(4096, np.float32)


def agree(processes: Processes) -> None:
    """Answers are those of process 0, or of all, in whatever order they arrive."""
    for number in range(3):
        assert processes.broadcast(lambda n=number: [n, processes.index]) == [number, 0]
        assert processes.all_gather(processes.index + number) == [number, 1 + number]
        processes.barrier()


def share(processes: Processes, folder: epath.Path) -> None:
    """Both processes reject a folder that differs between them."""
    check_shared(folder, processes)
    own = folder / f"of_{processes.index}"
    own.mkdir()
    with pytest.raises(ConfigError, match="not the same folder for process 0 and process 1"):
        check_shared(own, processes)
    assert not list(folder.glob(".shared*"))


def start_alike(processes: Processes) -> None:
    """Both processes reject commands that differ between them."""
    config = config_lib.parse(config_lib.default_config())
    check_alike("anakin", config, Options(), processes)
    other = dataclasses.replace(config, learning_rate=1.0 + processes.index)
    with pytest.raises(ConfigError, match=r"learning_rate=2\.0 and process 0 has 1\.0"):
        check_alike("anakin", other, Options(), processes)
    options = Options(workdir="runs/x" if processes.first else None)
    with pytest.raises(ConfigError, match="process 1 has workdir=False and process 0 has True"):
        check_alike("anakin", config, options, processes)


def make_state(value: float) -> dict:
    """A state on four devices: replicated weights, and an array that is sharded."""
    devices = mesh.make_mesh(jax.devices())

    def make(spec):
        sharding = jax.sharding.NamedSharding(devices, spec)
        return jax.make_array_from_callback(
            NOISE.shape, sharding, lambda index: (NOISE + np.float32(value))[index]
        )

    return {"train": {"weights": {"w": make(mesh.REPLICATED)}}, "env": make(mesh.SHARDED)}


def damage(workdir: epath.Path) -> None:
    """Truncates files that only process 1 has written, and will read."""
    rest = pathlib.Path(workdir) / checkpoint_files.FOLDER / "2" / checkpoint_files.REST
    for path in rest.glob("ocdbt.process_1/d/*"):
        path.write_bytes(b"")


def restore(processes: Processes, workdir: epath.Path) -> None:
    """Both processes skip a checkpoint that one of them can't read."""
    warned = []
    checkpoints = Checkpoints(workdir, 3, warned.append, processes)
    for update in (1, 2):
        checkpoints.save(make_state(update), Progress(update), None)
    checkpoints.finish()
    processes.broadcast(lambda: damage(workdir))
    restored, progress = checkpoints.restore(make_state(0))
    assert progress.update == 1
    for x, first in zip(jax.tree.leaves(restored), jax.tree.leaves(make_state(1)), strict=True):
        np.testing.assert_array_equal(x.addressable_data(0), first.addressable_data(0))
    like = restored["train"]["weights"]
    weights, update = checkpoint.load_weights(workdir, "last", like, processes)
    assert update == 1
    np.testing.assert_array_equal(weights["w"].addressable_data(0), NOISE + np.float32(1))
    if processes.first:
        assert "checkpoint 2 is damaged" in warned[0], warned
        assert "process 1: " in warned[0], warned
        assert "process 0: " not in warned[0], warned
    checkpoints.close()


def train(folder: pathlib.Path, address: Address) -> None:
    """Trains by the command line, as one process of two, which both have the summary."""
    join = [f"--{name}={value}" for name, value in address._asdict().items()]
    argv = ["anakin", *flags("anakin", folder / "two", **SHUFFLED), *join]
    results = []

    @functools.wraps(anakin.train)
    def keep(*arguments, **options):
        results.append(anakin.train(*arguments, **options))

    assert command_line.main(keep, argv) == ExitCode.OK
    assert results[0].summary == json.loads((folder / "two" / "summary.json").read_text())


def fail(processes: Processes, folder: epath.Path) -> None:
    """Saves where process 1 alone fails, which ends both: this does not return."""

    original = future.ChainedFuture.result

    def full(*arguments, **options):
        original(*arguments, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(folder / "full", 3, print, processes)
    if processes.index == 1:
        future.ChainedFuture.result = full
    processes.begin(128, "saving")
    checkpoints.save(make_state(3), Progress(3), None)
    checkpoints.finish()


def main(index: int, port: int, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    address = Address(f"127.0.0.1:{port}", 2, index)
    path = epath.Path(folder)
    with joined(address, HostsConfig()) as processes:
        processes.check_devices()
        agree(processes)
        start_alike(processes)
        share(processes, path)
        restore(processes, path)
    train(pathlib.Path(folder), address)
    print("trained", flush=True)
    with joined(address, HostsConfig(timeout_s=10.0)) as processes:
        fail(processes, path)


if __name__ == "__main__":
    command_line.leave(run_command(lambda: main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
