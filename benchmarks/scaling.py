"""Measures how learning depends on the batch size: returns after the same number of steps.

    python benchmarks/scaling.py --config=configs/cartpole.py --out=cartpole.jsonl
    python benchmarks/scaling.py --draw cartpole.jsonl --figure=scaling

A run on more chips has more environments, so the batch size is changed by ``num_envs``, and other
settings follow it by one of the scaling rules in ``ways``. Each run appends one JSON line; runs
that have a line already are skipped. The second command prints tables and draws a figure of such
lines.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from common import override, read_config, versions

from podracer import anakin
from podracer import config as config_lib
from podracer.monitoring import figures
from podracer.monitoring.curves import INTERVAL, mean_and_interval
from podracer.monitoring.formatting import mean_and_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = [512, 2048, 4096, 8192, 16_384, 32_768, 65_536]
# The unchanged config, to which all scaling rules refer.
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
    """The scaling rules for a batch size: the settings that change besides ``num_envs``, by name.

    Learning rate rules compare the transitions per gradient step with those of the unchanged
    config. For batches smaller than the config's own there are only these rules.

    Args:
      config: the unchanged config.
      batch: transitions per update.
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
    """Trains with a batch size and a scaling rule.

    Args:
      config: the unchanged config.
      batch: transitions per update.
      way: name of the scaling rule.

    Returns:
      Results as values that JSON can represent, with ``METRICS`` as lists over seeds.
    """
    changes = ways(config, batch)[way]
    config = config.copy_and_resolve_references()
    config.num_envs = batch // config.unroll_length
    # Rows cover the same number of steps for all batch sizes, so that their means are comparable.
    config.updates_per_call = max(1, max(BATCHES) // batch)
    config.update(changes)
    parsed = config_lib.parse(config)
    result = anakin.train(parsed, quiet=True)
    names = [f"{x.name}/" if parsed.num_seeds > 1 else "" for x in parsed.members]

    def values(name: str, metric: str) -> list[float]:
        return [row[f"{name}{metric}"] for row in result.metrics if f"{name}{metric}" in row]

    return {
        "changes": changes,
        "steps": result.summary["env_steps"],
        "updates": result.summary["env_steps"] // batch,
        "train": [float(np.mean(values(name, figures.RETURN))) for name in names],
        "eval": [values(name, figures.EVALUATION)[-1] for name in names],
        "steps_per_second": round(result.summary["steps_per_second"]),
        "seconds": round(result.summary["wall_seconds"], 1),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": versions("podracer", "jax", "flax"),
    }


def read(path: pathlib.Path) -> list[Line]:
    """The lines of a file; none if it doesn't exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(args: argparse.Namespace) -> None:
    """Runs everything that has no line yet, and appends the lines; see ``main`` for arguments."""
    config = read_config(args.config)
    override(config, args, "agent", "total_steps", "seed", "num_seeds", "cpu_devices")
    override(config.network, args, "torso")
    out = pathlib.Path(args.out)
    for batch in args.batches:
        if batch % config.unroll_length:
            raise SystemExit(
                f"--batches: {batch} is not a multiple of unroll_length={config.unroll_length}"
            )
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


# The mean over seeds and half its interval's width (None for a single seed), by rule and batch.
Cells = dict[str, dict[int, tuple[float, float | None]]]


def collect(lines: Sequence[Line], metric: str) -> Cells:
    """Means over the seeds of all lines; the reference's are added to each scaling rule."""
    values: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        values.setdefault(line["way"], {}).setdefault(line["batch"], []).extend(line[metric])
    # Without any other rule, the reference is shown by itself.
    reference = values.pop(REFERENCE, {}) if len(values) > 1 else {}
    cells: Cells = {}
    for way, found in sorted(values.items(), key=lambda item: WAYS.index(item[0])):
        cells[way] = {}
        for batch, returns in sorted((found | reference).items()):
            mean, half = mean_and_interval(np.array(returns))
            cells[way][batch] = float(mean), None if half is None else float(half)
    return cells


def tabulate(cells: Cells) -> str:
    """A Markdown table with a row for each batch size and a column for each scaling rule."""
    batches = sorted({batch for column in cells.values() for batch in column})

    def cell(way: str, batch: int) -> str:
        return mean_and_error(*cells[way][batch]) if batch in cells[way] else ""

    rows = [["batch", *cells], ["---"] * (len(cells) + 1)]
    rows += [[f"{batch:,}", *(cell(way, batch) for way in cells)] for batch in batches]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(lines: Sequence[Line]) -> "Figure":
    """A figure with a row for each environment, a panel for each metric, a curve for each rule."""
    from matplotlib.figure import Figure

    environments = list(dict.fromkeys(line["env"] for line in lines))
    figure = Figure(figsize=(9, 3 * len(environments) + 0.5), layout="constrained")
    panels = figure.subplots(len(environments), len(METRICS), sharex=True, squeeze=False)
    for row, env in zip(panels, environments, strict=True):
        for axes, (metric, title) in zip(row, METRICS.items(), strict=True):
            cells = collect([line for line in lines if line["env"] == env], metric)
            for i, (way, column) in enumerate(cells.items()):
                mean = [mean for mean, _ in column.values()]
                error = [np.nan if half is None else half for _, half in column.values()]
                style = {"color": figures.COLORS[i], "label": way, "linewidth": 1.2}
                axes.errorbar(list(column), mean, error, marker="o", ms=3, capsize=2, **style)
            axes.set_xscale("log", base=2)
            axes.set_title(f"{env}: {title}", fontsize="small")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.9", linewidth=0.6)
    ticks = sorted({line["batch"] for line in lines})
    for axes in panels[-1]:
        axes.set_xlabel("transitions per update")
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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="config file, whose own batch size is the reference")
    parser.add_argument("--out", default="scaling.jsonl", help="file to append JSON lines to")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="batch sizes in transitions"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="scaling rules")
    parser.add_argument("--agent", help="name of the agent")
    parser.add_argument("--torso", help="torso of the network")
    parser.add_argument("--total_steps", type=int, help="environment steps per run")
    parser.add_argument("--seed", type=int, help="first seed")
    parser.add_argument("--num_seeds", type=int, default=5, help="number of seeds; default: 5")
    parser.add_argument("--cpu_devices", type=int, default=1, help="number of CPU devices")
    parser.add_argument(
        "--draw", nargs="+", metavar="FILE", help="only print and draw the lines of these files"
    )
    parser.add_argument("--figure", help="with --draw: write FIGURE.png and FIGURE.svg")
    args = parser.parse_args(argv)
    if not args.draw:
        measure(args)
        return
    lines = [line for path in args.draw for line in read(pathlib.Path(path))]
    for env in dict.fromkeys(line["env"] for line in lines):
        for metric, title in METRICS.items():
            cells = collect([line for line in lines if line["env"] == env], metric)
            print(f"{env}: {title}\n\n{tabulate(cells)}\n")
    if args.figure:
        print(f"written: {' and '.join(figures.save(draw(lines), args.figure))}")


if __name__ == "__main__":
    main()
