"""Trains the shipped configs with several seeds and writes what they reach into docs/results.md.

    python benchmarks/results.py SET ...

trains what has no line in docs/results.jsonl yet of the tasks in these sets (``results_tasks.py``),
appends a line for each run that has ended, and then writes docs/results.md, its figures and the
table of README.md from all lines (``results_page.py``). What is interrupted is resumed by the same
command. Without a set, it only writes the page.
"""

import argparse
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import results_lines
import results_page
from results_tasks import SETS, Task

# Exit codes of runs that were stopped by a signal, see README.md.
PREEMPTED, INTERRUPTED = 42, 130
FOLDER = results_lines.ROOT / "runs" / "results"


def train(task: Task, seed: int, folder: pathlib.Path, cores: Sequence[int]) -> int:
    """Trains a task with a seed on some cores, appends its line, and returns the exit code."""
    workdir = folder / task.folder(seed)
    command = task.command(seed)
    shown = shlex.join(["python", *command])
    print(shown, flush=True)
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), sys.executable, *command]
    process = subprocess.run([*pinned, "--quiet", f"--workdir={workdir}"], cwd=results_lines.ROOT)
    if process.returncode == 0:
        line = results_lines.read_line(task.name, seed, shown, len(cores), workdir, task.metric)
        results_lines.append(line, results_lines.LINES)
        print(f"return {line.episode_return:.4g} in {line.seconds:.0f} s: {shown}", flush=True)
    return process.returncode


def train_all(tasks: Sequence[Task], folder: pathlib.Path, jobs: int) -> int:
    """Trains the seeds of tasks that have no line: first one seed of every task, then the next.

    Args:
      tasks: the tasks.
      folder: where the workdirs of runs are.
      jobs: number of runs at a time, each on its share of the cores.

    Returns:
      0, or the largest exit code of the runs that failed. The others are trained all the same, but
      none is begun after one was stopped by a signal.
    """
    done = {(line.task, line.seed) for line in results_lines.read_lines(results_lines.LINES)}
    most = max((task.seeds for task in tasks), default=0)
    runs = [(task, seed) for seed in range(most) for task in tasks if seed < task.seeds]
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= jobs <= len(cores):
        raise SystemExit(f"--jobs={jobs} must be at least 1 and at most the {len(cores)} cores")
    shares: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for i in range(jobs):
        shares.put(cores[i::jobs])

    stopped = threading.Event()

    def run(task: Task, seed: int) -> int:
        if stopped.is_set():
            return INTERRUPTED
        share = shares.get()
        try:
            code = train(task, seed, folder, share)
        finally:
            shares.put(share)
        if code in (PREEMPTED, INTERRUPTED):
            stopped.set()
        return code

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, *it) for it in runs if (it[0].name, it[1]) not in done]
        try:
            return max((future.result() for future in futures), default=0)
        except KeyboardInterrupt:
            # The runs have got the signal, too, and save themselves.
            stopped.set()
            return INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share the cores")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="workdirs of the runs")
    args = parser.parse_args(argv)
    if unknown := set(args.sets) - SETS.keys():
        parser.error(f"no set {', '.join(unknown)}; there are {', '.join(SETS)}")
    code = train_all([task for name in args.sets for task in SETS[name]], args.folder, args.jobs)
    results_page.write(*map(results_lines.read_lines, (results_lines.LINES, results_lines.PEERS)))
    return code


if __name__ == "__main__":
    sys.exit(main())
