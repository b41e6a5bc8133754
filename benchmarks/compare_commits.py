"""Whether today's code trains as that of an earlier commit does, to the last bit.

    python benchmarks/compare_commits.py COMMIT -- -m podracer.anakin --config=configs/minatar.py

runs the Python command after ``--`` with the code of the commit and with the working tree at the
same time, each on a core of its own, stops what has not ended after so many seconds, and compares
the rows of both metrics.jsonl. What a metric depends on is computed in all rows before, so that
equal returns and losses mean equal parameters. A result of the commit is then one of today's code,
too. Exits with 1 if a metric differs.
"""

import argparse
import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence

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
    """Waits for processes, and ends those that are not done after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(x.poll() is None for x in processes):
        time.sleep(0.5)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait()


def read_rows(run: pathlib.Path) -> Rows:
    """The rows of a run's metrics.jsonl; what the run printed is the error if it has none."""
    path = run / workdir.METRICS
    if not path.exists():
        raise SystemExit(f"no {path.name} after this time:\n{run.with_suffix('.log').read_text()}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(before: Rows, after: Rows) -> dict[str, int]:
    """The steps at which metrics begin to differ, of the rows and metrics that both runs have."""
    first: dict[str, int] = {}
    for x, y in zip(before, after, strict=False):
        for name in sorted({*x} & {*y}):
            if not name.startswith(CLOCK) and x[name] != y[name]:
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
