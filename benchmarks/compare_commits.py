"""Whether today's code trains as that of an earlier commit does, to the last bit.

    python benchmarks/compare_commits.py COMMIT -- -m podracer.anakin --config=configs/minatar.py

runs the Python command after ``--`` with the code of the commit and with the working tree at the
same time, each on a core of its own, stops both after ``--seconds``, and compares the rows of both
metrics.jsonl. Returns and losses depend on all parameters, so that equal ones mean that a result of
the commit is also one of today's code. Exits with 1 if a metric differs.
"""

import argparse
import io
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np
import results_lines

from podracer.storage import workdir

# What depends on the clock, and not on what is trained.
CLOCK = ("wall_time", "time/")

Rows = Sequence[Mapping[str, float]]


def extract(commit: str, folder: pathlib.Path) -> None:
    """Writes the files of a commit into a new folder."""
    command = ["git", "archive", commit]
    content = subprocess.run(command, cwd=results_lines.ROOT, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(content.stdout)) as archive:
        archive.extractall(folder, filter="data")


def start(
    code: pathlib.Path, command: Sequence[str], run: pathlib.Path, core: int
) -> subprocess.Popen[bytes]:
    """Starts a Python command in a folder of code, on a core, with the workdir ``run``."""
    pinned = ["taskset", "--cpu-list", str(core), sys.executable, *command, f"--workdir={run}"]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(pinned, cwd=code, env=environment, stdout=log, stderr=log)


def stop(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits for processes until they end, or until ``seconds`` have passed and it ends them."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
    for process in processes:
        process.wait()


def read_rows(run: pathlib.Path) -> Rows:
    """The rows of a run; the error if it has none is what the run printed."""
    path = run / workdir.METRICS
    if not path.exists():
        raise SystemExit(f"no {path.name} after this time:\n{run.with_suffix('.log').read_text()}")
    return workdir.read_rows(run)


def differences(before: Rows, after: Rows) -> dict[str, int]:
    """The steps at which metrics begin to differ, of the rows and metrics that both runs have."""
    first: dict[str, int] = {}
    for x, y in zip(before, after, strict=False):
        for name in sorted({*x} & {*y}):
            if not name.startswith(CLOCK) and not np.array_equal(x[name], y[name], equal_nan=True):
                first.setdefault(name, int(x["step"]))
    return first


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--seconds", type=float, default=60, help="time for each run")
    parser.add_argument("command", nargs="+", help="arguments of python, without --workdir")
    args = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("both runs need a core of their own, and this process has one")

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        extract(args.commit, folder / "code")
        runs = folder / "before", folder / "after"
        codes = folder / "code", results_lines.ROOT
        stop(
            [
                start(code, args.command, run, core)
                for code, run, core in zip(codes, runs, cores, strict=False)
            ],
            args.seconds,
        )
        before, after = map(read_rows, runs)
    different = differences(before, after)
    rows = min(len(before), len(after))
    print(shlex.join(["python", *args.command]))
    for name, step in different.items():
        print(f"differs from step {step:,}: {name}")
    print(f"{rows} rows up to step {int(before[rows - 1]['step']):,} since {args.commit}")
    if different:
        raise SystemExit(1)
    print("all metrics are equal, to the last bit")


if __name__ == "__main__":
    main()
