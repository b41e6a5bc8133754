"""What a larger batch costs in learning: returns after the same number of steps, as JSON lines.

    python benchmarks/scaling.py --config=configs/cartpole.py --out=cartpole.jsonl
    python benchmarks/scaling.py --draw cartpole.jsonl --figure=scaling

More chips are more environments: ``num_envs`` differs from run to run, ``unroll_length`` stays, and
beside it changes what one of the ``ways`` says. A run that has its line already is not run again.
The second command prints tables and draws a figure of such lines.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from common import override, read_config, versions

from podracer import config as config_lib
from podracer import plot
from podracer.anakin import train
from podracer.curves import INTERVAL, mean_and_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = [512, 2048, 4096, 8192, 16_384, 32_768, 65_536]
# The config as it is, which all ways set out from.
REFERENCE = "reference"
WAYS = [
    REFERENCE,
    "none",
    "sqrt",
    "linear",
    "linear, warm-up",
    "sqrt, 2 x epochs",
    "same minibatch",
]
METRICS = {
    "train": "mean return of all training",
    "eval": "return of the final, greedy evaluation",
}
Line = dict[str, Any]


def ways(config: Any, batch: int) -> dict[str, dict[str, Any]]:
    """What changes with a total batch beside ``num_envs``, by name.

    A rule counts the transitions of a gradient step, and those of the config as it is are its
    reference. Below the config's own batch the rules alone are left.
    """
    own = config.num_envs * config.unroll_length
    if batch == own:
        return {REFERENCE: {}}
    reference = own // config.num_minibatches
    sqrt, linear = ({"batch_rule": x, "reference_batch": reference} for x in ("sqrt", "linear"))
    found = {"none": {}, "sqrt": sqrt, "linear": linear}
    if batch > own:
        updates = config.total_steps // batch
        found |= {
            "linear, warm-up": {**linear, "warmup": max(1, updates // 8)},
            "sqrt, 2 x epochs": {**sqrt, "num_epochs": 2 * config.num_epochs},
            "same minibatch": {"num_minibatches": batch // reference},
        }
    return found


def run(config: Any, batch: int, way: str) -> dict[str, Any]:
    """Trains, and returns what came of it, ``METRICS`` as lists over seeds."""
    changes = ways(config, batch)[way]
    config = config.copy_and_resolve_references()
    config.num_envs = batch // config.unroll_length
    # A row is as many steps whatever the batch, so that means over rows are of the same kind.
    config.updates_per_call = max(1, max(BATCHES) // batch)
    config.update(changes)
    parsed = config_lib.parse(config)
    result = train(parsed, quiet=True)
    names = [f"seed_{seed}/" if parsed.num_seeds > 1 else "" for seed in parsed.seeds]

    def values(name: str, metric: str) -> list[float]:
        return [row[f"{name}{metric}"] for row in result.metrics if f"{name}{metric}" in row]

    return {
        "changes": changes,
        "steps": result.summary["env_steps"],
        "updates": result.summary["env_steps"] // batch,
        "train": [float(np.mean(values(name, plot.RETURN))) for name in names],
        "eval": [values(name, plot.EVALUATION)[-1] for name in names],
        "steps_per_second": round(result.summary["steps_per_second"]),
        "seconds": round(result.summary["wall_seconds"], 1),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": versions("podracer", "jax", "flax"),
    }


def read(path: pathlib.Path) -> list[Line]:
    """The lines of a file; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(args: argparse.Namespace) -> None:
    """Runs what has no line yet, and appends its line."""
    config = read_config(args.config)
    override(config, args, "agent", "total_steps", "seed", "num_seeds", "cpu_devices")
    override(config.network, args, "torso")
    out = pathlib.Path(args.out)
    for batch in args.batches:
        if batch % config.unroll_length:
            raise SystemExit(f"--batches: {batch} is no multiple of {config.unroll_length} steps")
        for way in ways(config, batch):
            case = {
                "env": config.env,
                "agent": config.agent,
                "torso": config.network.torso,
                "batch": batch,
                "way": way,
                "total_steps": config.total_steps,
                "seeds": list(range(config.seed, config.seed + config.num_seeds)),
            }
            known = any(case.items() <= line.items() for line in read(out))
            if known or way not in args.ways:
                continue
            line = json.dumps({**case, **run(config, batch, way)})
            with out.open("a") as file:
                file.write(f"{line}\n")
            print(line, flush=True)


# Mean and half its interval's width, which is NaN of a single seed; by way and batch.
Cells = dict[str, dict[int, tuple[float, float]]]


def collect(lines: Sequence[Line], metric: str) -> Cells:
    """Means over the seeds of all lines; the reference is in every way."""
    values: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        values.setdefault(line["way"], {}).setdefault(line["batch"], []).extend(line[metric])
    # Alone, the reference is a way of its own.
    reference = values.pop(REFERENCE, {}) if len(values) > 1 else {}
    cells: Cells = {}
    for way, found in sorted(values.items(), key=lambda item: WAYS.index(item[0])):
        cells[way] = {}
        for batch, returns in sorted((found | reference).items()):
            mean, half = mean_and_interval(np.array(returns))
            cells[way][batch] = float(mean), np.nan if half is None else float(half)
    return cells


def tabulate(cells: Cells) -> str:
    """Markdown: a row for each batch, a column for each way."""
    batches = sorted({batch for column in cells.values() for batch in column})

    def cell(way: str, batch: int) -> str:
        if batch not in cells[way]:
            return ""
        mean, half = cells[way][batch]
        return f"{mean:,.1f}" + ("" if np.isnan(half) else f" ± {half:,.1f}")

    rows = [["batch", *cells], ["---"] * (len(cells) + 1)]
    rows += [[f"{batch:,}", *(cell(way, batch) for way in cells)] for batch in batches]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(lines: Sequence[Line]) -> "Figure":
    """A row of panels for each environment, a panel for each metric, a curve for each way."""
    from matplotlib.figure import Figure

    environments = list(dict.fromkeys(line["env"] for line in lines))
    figure = Figure(figsize=(9, 3 * len(environments) + 0.5), layout="constrained")
    panels = figure.subplots(len(environments), len(METRICS), sharex=True, squeeze=False)
    for row, env in zip(panels, environments, strict=True):
        for axes, (metric, title) in zip(row, METRICS.items(), strict=True):
            cells = collect([line for line in lines if line["env"] == env], metric)
            for number, (way, column) in enumerate(cells.items()):
                mean, half = zip(*column.values(), strict=True)
                style = {"color": plot.COLORS[number], "label": way, "linewidth": 1.2}
                axes.errorbar(list(column), mean, half, marker="o", ms=3, capsize=2, **style)
            axes.set_xscale("log", base=2)
            axes.set_title(f"{env}: {title}", fontsize="small")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.9", linewidth=0.6)
    ticks = sorted({line["batch"] for line in lines})
    for axes in panels[-1]:
        axes.set_xlabel("transitions of an update")
        axes.set_xticks(ticks, [f"{batch:,}" for batch in ticks], rotation=30, fontsize="small")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        title=f"mean over seeds and its {INTERVAL}",
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a config file; its own batch is the reference")
    parser.add_argument("--out", default="scaling.jsonl", help="lines are appended to it")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--agent")
    parser.add_argument("--torso", help="of the network")
    parser.add_argument("--total_steps", type=int)
    parser.add_argument("--seed", type=int, help="the first")
    parser.add_argument("--num_seeds", type=int, default=5)
    parser.add_argument("--cpu_devices", type=int, default=1)
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="of lines; nothing is run")
    parser.add_argument("--figure", help="writes FIGURE.png and FIGURE.svg")
    args = parser.parse_args()
    if not args.draw:
        measure(args)
        return
    lines = [line for path in args.draw for line in read(pathlib.Path(path))]
    for env in dict.fromkeys(line["env"] for line in lines):
        for metric, title in METRICS.items():
            cells = collect([line for line in lines if line["env"] == env], metric)
            print(f"{env}: {title}\n\n{tabulate(cells)}\n")
    if args.figure:
        print(f"written: {' and '.join(plot.save(draw(lines), args.figure))}")


if __name__ == "__main__":
    main()
