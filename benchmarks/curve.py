"""Draws learning curves of runs: mean and range over seeds, a line for each label.

python benchmarks/curve.py --out=docs/cartpole.svg PPO:runs/ppo-0 PPO:runs/ppo-1 ...
"""

import argparse
import json
import pathlib

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt


def read(workdir: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and episode returns of a run, where an episode ended."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "train/episode_return" in row]
    return (
        np.array([row["step"] for row in rows]),
        np.array([row["train/episode_return"] for row in rows]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("runs", nargs="+", metavar="LABEL:WORKDIR")
    args = parser.parse_args()
    groups: dict[str, list[str]] = {}
    for run in args.runs:
        label, _, workdir = run.partition(":")
        groups.setdefault(label, []).append(workdir)

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for label, workdirs in groups.items():
        runs = [read(workdir) for workdir in workdirs]
        grid = np.linspace(max(s[0] for s, _ in runs), min(s[-1] for s, _ in runs), 100)
        curves = np.array([np.interp(grid, steps, returns) for steps, returns in runs])
        (line,) = axes.plot(grid, curves.mean(0), label=f"{label}, {len(runs)} seeds")
        axes.fill_between(grid, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15)
    axes.set(xlabel="environment steps", ylabel="episode return", title=args.title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
