"""Population-based training beside random sweeps of equal cost, for docs/sweeps.md.

    python benchmarks/populations.py pendulum breakout --jobs=2
    python benchmarks/populations.py pendulum_wide breakout_wide --jobs=2 --repetitions=10

The runs of a repetition have the same seed, the same random points and as many steps: one keeps the
settings of its agents, the others select. Of each, the agent that was best in the run's final
evaluation plays new episodes, whose mean return is compared. Policies sample their actions in both,
because a greedy one plays the same one or two episodes again and again in some of these games, so
that its return would be that of a single sample. A line for each run is appended to
docs/populations.jsonl, and what has a line is not run again. At the end, a table of all lines is
printed.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import results_lines

from podracer.monitoring.curves import mean_and_interval
from podracer.storage.workdir import SUMMARY, read_config
from podracer.training.saved_run import evaluate

LINES = results_lines.ROOT / "docs" / "populations.jsonl"
FOLDER = results_lines.ROOT / "runs" / "populations"
# Of the evaluation of the agent that was chosen, whose seed is one that no run has.
EPISODES, SEED = 1024, 1_000_000
FIXED, COPIED, EVOLVED = "random sweep", "population-based training", "evolution strategy"


class Comparison(NamedTuple):
    """What all runs of a repetition train, and how they differ.

    Attributes:
      config: name of a config in ``configs/``.
      changes: further settings of all, such as "anneal=False".
      kinds: further settings of each run, by what the table calls it.
    """

    config: str
    changes: tuple[str, ...]
    kinds: dict[str, tuple[str, ...]]


PENDULUM = ("total_steps=150_000", "population=16")
MINATAR = ("total_steps=500_000", "network.hidden=(64,64)", "population=8")
# What a user sweeps who has trained in this kind of environment before, and one who knows nothing.
NARROW = (
    *MINATAR,
    "sweep.learning_rate=log_uniform(1e-4,1e-2)",
    "sweep.discount=uniform(0.95,0.999)",
    "sweep.entropy_cost=log_uniform(1e-4,1e-1)",
    "sweep.ppo.gae_lambda=uniform(0.8,1)",
)
WIDE = (
    "sweep.learning_rate=log_uniform(1e-5,1e-1)",
    "sweep.discount=uniform(0.5,1)",
    "sweep.ppo.gae_lambda=uniform(0,1)",
)
COMPARISONS = {
    "pendulum": Comparison(
        config="pendulum",
        changes=(
            *PENDULUM,
            "sweep.learning_rate=log_uniform(1e-5,1e-2)",
            "sweep.discount=uniform(0.9,0.999)",
            "sweep.ppo.gae_lambda=uniform(0.8,1)",
            "sweep.ppo.clip=uniform(0.1,0.4)",
        ),
        kinds={
            FIXED: (),
            COPIED: ("selection.every=3",),
            EVOLVED: ("selection.every=3", "selection.rule=evolution"),
        },
    ),
    "breakout": Comparison(
        config="minatar", changes=NARROW, kinds={FIXED: (), COPIED: ("selection.every=4",)}
    ),
    # Rates are not annealed, so that the settings of the random sweep are fixed ones.
    "space_invaders": Comparison(
        config="minatar",
        changes=("env=gymnax:SpaceInvaders-MinAtar", "anneal=False", *NARROW),
        kinds={FIXED: (), COPIED: ("selection.every=10",)},
    ),
    "pendulum_wide": Comparison(
        config="pendulum",
        changes=(*PENDULUM, *WIDE, "sweep.ppo.clip=uniform(0.05,0.5)"),
        kinds={
            FIXED: (),
            COPIED: ("selection.every=6",),
            EVOLVED: ("selection.every=6", "selection.rule=evolution"),
        },
    ),
    "breakout_wide": Comparison(
        config="minatar",
        changes=(*MINATAR, *WIDE, "sweep.entropy_cost=log_uniform(1e-4,1)"),
        kinds={FIXED: (), COPIED: ("selection.every=8",)},
    ),
}


def make_command(name: str, kind: str, repetition: int) -> list[str]:
    """The arguments after ``python`` of a run, without its workdir."""
    comparison = COMPARISONS[name]
    common = ("evaluation.greedy=False", f"seed={repetition}")
    changes = (*comparison.changes, *comparison.kinds[kind], *common)
    config = f"--config=configs/{comparison.config}.py"
    return ["-m", "podracer.anakin", config, *(f"--config.{x}" for x in changes)]


def train(run: tuple[str, str, int], folder: pathlib.Path) -> dict[str, Any]:
    """Trains a population, and returns its line.

    Args:
      run: name of the comparison, kind of the run, and number of the repetition.
      folder: where the workdirs of runs are.
    """
    name, kind, repetition = run
    command = make_command(*run)
    shown = shlex.join(["python", *command])
    print(shown, flush=True)
    workdir = folder / f"{name}-{kind.replace(' ', '-')}-{repetition}"
    subprocess.run(
        [sys.executable, *command, "--quiet", f"--workdir={workdir}"],
        cwd=results_lines.ROOT,
        check=True,
    )
    summary = json.loads((workdir / SUMMARY).read_text())
    best = summary["best_member"]
    found = evaluate(workdir, member=best, num_episodes=EPISODES, seed=SEED + repetition)
    return {
        "task": name,
        "kind": kind,
        "repetition": repetition,
        "command": shown,
        "versions": read_config(workdir)["versions"],
        "hardware": results_lines.hardware(len(os.sched_getaffinity(0))),
        "steps": summary["env_steps"],
        "seconds": round(summary["wall_seconds"], 1),
        "best": summary["members"][best],
        "episode_return": found["return_mean"],
    }


def read() -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(x) for x in LINES.read_text().splitlines()] if LINES.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """A row for each comparison and kind of run, in Markdown: the mean return over repetitions with
    its 95 % interval, and the return of each."""
    rows = ["| task | settings | mean return | repetitions |", "|---|---|---|---|"]
    for name, comparison in COMPARISONS.items():
        for kind in comparison.kinds:
            chosen = {
                x["repetition"]: x["episode_return"]
                for x in lines
                if (x["task"], x["kind"]) == (name, kind)
            }
            if not chosen:
                continue
            returns = [chosen[i] for i in sorted(chosen)]
            mean, interval = mean_and_interval(np.array(returns))
            spread = "" if interval is None else f" ± {interval:.3g}"
            each = ", ".join(f"{x:.4g}" for x in returns)
            rows.append(f"| {name} | {kind} | {mean:.4g}{spread} | {each} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=COMPARISONS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="workdirs of the runs")
    args = parser.parse_args()
    done = {(x["task"], x["kind"], x["repetition"]) for x in read()}
    runs = [
        (name, kind, repetition)
        for repetition in range(args.repetitions)
        for name in args.names
        for kind in COMPARISONS[name].kinds
        if (name, kind, repetition) not in done
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(lambda run: train(run, args.folder), runs):
            with LINES.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table(read()))


if __name__ == "__main__":
    main()
