"""Runs of several real processes, each of two CPU devices, joined over the loopback; and what their
workdirs hold."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from podracer.storage import checkpoint_files

ROOT = pathlib.Path(__file__).parents[2]
ENVS = {"anakin": "gymnax:CartPole-v1", "sebulba": "dummy:counting"}
STEPS_PER_UPDATE = 16 * 8
# Seconds that several processes may take to compile on a machine that is busy with other work.
LONG_S = 600.0
# Three updates that compile quickly.
SETTINGS = {
    "num_envs": 16,
    "unroll_length": 8,
    "updates_per_call": 1,
    "cpu_devices": 2,
    "total_steps": 3 * STEPS_PER_UPDATE,
    "network.hidden": "(16,)",
    "num_epochs": 1,
    "num_minibatches": 1,
    "evaluation.episodes": 6,
    "replay.capacity": 16 * 8 * 8,
    "replay.begin": 16 * 8,
    "replay.batch": 16,
    "replay.gradient_steps": 2,
    "replay.priority_exponent": 0.6,
}
# The same with two minibatches of twice as many environments, so that processes shuffle.
SHUFFLED = {"num_minibatches": 2, "num_envs": 32, "total_steps": 3 * 32 * 8}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def flags(architecture: str, workdir, **changes) -> list[str]:
    """Flags of a run in this workdir, with changes of ``SETTINGS``."""
    values = {"env": ENVS[architecture], **SETTINGS, **changes}
    return [
        f"--config={ROOT / 'configs' / 'cartpole.py'}",
        *(f"--config.{key}={value}" for key, value in values.items()),
        f"--workdir={workdir}",
    ]


def start(*arguments: str) -> subprocess.Popen:
    """Starts Python with these arguments, on CPUs."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Job:
    """A number of processes that run one command; killed at the end, whatever happens."""

    def __init__(self, architecture: str, count: int, workdir, more=(), code="", **changes):
        """Starts the processes.

        Args:
          architecture: "anakin" or "sebulba".
          count: number of processes.
          workdir: folder of the run.
          more: further flags.
          code: Python code that each process runs before the command.
          **changes: of ``SETTINGS``.
        """
        module = f"podracer.{architecture}"
        run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        command = [
            *(["-c", f"{code}\n{run}"] if code else ["-m", module]),
            *flags(architecture, workdir, **changes),
            *(f"--num_processes={count}", f"--coordinator=127.0.0.1:{free_port()}", *more),
        ]
        self.workdir = pathlib.Path(workdir)
        self.processes = [start(*command, f"--process_id={number}") for number in range(count)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for_rows(self, count: int) -> None:
        """Waits until the run has written this many rows of metrics."""
        deadline = time.monotonic() + LONG_S
        while len(self.rows()) < count:
            assert time.monotonic() < deadline
            ended = [p.communicate()[1] for p in self.processes if p.poll() is not None]
            assert not ended, ended
            time.sleep(0.1)

    def rows(self) -> list[dict]:
        """The rows of metrics so far."""
        return read_rows(self.workdir)

    def finish(self, timeout: float = LONG_S) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each process, once all have ended."""
        ended = [p.communicate(timeout=timeout) for p in self.processes]
        return [(p.returncode, *texts) for p, texts in zip(self.processes, ended, strict=True)]

    def succeed(self) -> str:
        """Waits until all have ended, successfully; returns the output of process 0."""
        ended = self.finish()
        assert [code for code, *_ in ended] == [0] * len(ended), [errors for *_, errors in ended]
        return ended[0][1]


def read_rows(workdir: pathlib.Path) -> list[dict]:
    """The rows of metrics in a workdir."""
    path = workdir / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def saved_updates(workdir: pathlib.Path) -> list[int]:
    """The updates after which a checkpoint was saved. Killed processes leave parts of others."""
    return sorted(int(x.name) for x in (workdir / "checkpoints").iterdir() if x.name.isdigit())


def last_arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint, on whatever devices they were saved."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with checkpoint_files.open_manager(
        epath.Path(workdir) / checkpoint_files.FOLDER, writes=False
    ) as manager:
        saved = manager.item_metadata(manager.latest_step())
        shapes = {
            item: {
                k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in arrays.items()
            }
            for item in (checkpoint_files.WEIGHTS, checkpoint_files.REPLAY, checkpoint_files.REST)
            if (arrays := saved.get(item))
        }
        restore = {item: ocp.args.StandardRestore(x) for item, x in shapes.items()}
        found = manager.restore(manager.latest_step(), args=ocp.args.Composite(**restore))
    return {f"{item}/{k}": np.asarray(x) for item in shapes for k, x in found[item].items()}


def check_same_learning(one: pathlib.Path, many: pathlib.Path) -> None:
    """Asserts that two runs have learned the same, up to float rounding."""
    arrays, others = (last_arrays(workdir) for workdir in (one, many))
    assert arrays.keys() == others.keys()
    for name, x in arrays.items():
        np.testing.assert_allclose(others[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
    for row, other in zip(read_rows(one), read_rows(many), strict=True):
        assert row.keys() == other.keys()
        for name in [name for name in row if "time" not in name]:
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
