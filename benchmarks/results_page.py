"""docs/results.md, its figures and the table of results in README.md, all made from the lines."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from results_lines import ROOT, Line
from results_tasks import PEERS, SETS, Task

from podracer.monitoring.curves import INTERVAL, MetricHistory, SeedGroup, mean_and_interval
from podracer.monitoring.figures import EVALUATION, RETURN, draw, save
from podracer.monitoring.formatting import duration, mean_and_error

PAGE, FIGURES, README = ROOT / "docs" / "results.md", ROOT / "docs" / "results", ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/results.py -->\n", "<!-- end of what it makes -->\n"

INTRODUCTION = f"""{BEGIN}# Results

Each row is a shipped config, with the changes that its command names. The return is that of the
final, greedy evaluation: the mean over seeds with the {INTERVAL} of this mean. The time is the
mean wall-clock time of a run, compilation and evaluation included; steps per second leave out both.
The lines that this page is made from, with all settings and versions, are in
[results.jsonl](results.jsonl). The command of a row is that of seed 0; the others add
`--config.seed=SEED`, and each run needs a `--workdir` of its own. Other versions of packages and
other processors round differently, so that a seed's return is another one. Runs of earlier
commits were [compared](../benchmarks/README.md#results-of-earlier-commits) with today's code.
A first run compiles, and those after it find the compiled program in the cache. Other programs ran
beside them, so that times are upper bounds. PureJaxRL, CleanRL, Stoix and Brax were trained with
their own code and networks for as many steps ([results_peers.jsonl](results_peers.jsonl);
`python benchmarks/purejaxrl.py` and `python benchmarks/peers.py`). Compared are the returns at the
end of training, whose policies sample, of both programs; of Brax, those of its evaluations.
Learning curves are of the returns of training, and of two-player games of those of evaluations
against random moves.

    python benchmarks/results.py {" ".join(SETS)}

trains what is missing and writes this page.
"""

# What the returns of a learning curve are of, by its metric.
CURVES = {RETURN: "training", EVALUATION: "evaluations"}
HEADER = (
    "| task | agent | config | return | seeds | reference | steps | time | steps/s | hardware |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def by_task(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The runs of each task, by seed."""
    tasks: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.seed):
        tasks.setdefault(line.task, []).append(line)
    return tasks


def agent(lines: Sequence[Line]) -> str:
    """Name of the agent that a task's runs have trained."""
    return lines[0].config["agent"]


def over_seeds(returns: Sequence[float]) -> str:
    """The mean of returns of runs that differ in their seeds, with its interval."""
    mean, error = mean_and_interval(np.array(returns))
    return mean_and_error(float(mean), None if error is None else float(error))


def episode_return(lines: Sequence[Line]) -> str:
    """The return of the final evaluations."""
    return over_seeds([line.episode_return for line in lines])


def trained_return(lines: Sequence[Line]) -> str:
    """The return at the end of the learning curves."""
    return over_seeds([line.curve["return"][-1] for line in lines])


def project(task: Task) -> str:
    """The other project that a task is compared with."""
    return PEERS[task.peer.split("-")[0]]


def references(task: Task, ours: Sequence[Line], peers: Sequence[Line]) -> str:
    """The returns to compare with: those that are published, and those of peers' runs."""
    texts = [f"{x.value:g} ([{x.name}]({x.source}))" for x in task.references]
    if lines := by_task(peers).get(task.peer):
        seeds = "one seed" if len(lines) == 1 else f"{len(lines)} seeds"
        theirs, own = trained_return(lines), trained_return(ours)
        texts.append(f"at the end of training {theirs} ({project(task)}, {seeds}), podracer {own}")
    return "; ".join(texts)


def row(task: Task, lines: Sequence[Line], peers: Sequence[Line]) -> str:
    """The row of a task in a table."""
    columns = (
        task.title,
        agent(lines),
        f"`{task.config}.py`",
        episode_return(lines),
        str(len(lines)),
        references(task, lines, peers),
        f"{lines[0].steps:,}",
        duration(float(np.mean([line.seconds for line in lines]))),
        f"{np.mean([line.steps_per_second for line in lines]):,.0f}",
        ", ".join(sorted({line.hardware for line in lines})),
    )
    return f"| {' | '.join(columns)} |\n"


def page(lines: Sequence[Line], peers: Sequence[Line]) -> str:
    """The text of docs/results.md."""
    done, text = by_task(lines), INTRODUCTION
    for name, tasks in SETS.items():
        trained = [task for task in tasks if task.name in done]
        if not trained:
            continue
        rows = "".join(row(task, done[task.name], peers) for task in trained)
        commands = "".join(f"    {done[task.name][0].command}\n" for task in trained)
        text += f"\n## `{name}`\n\n{HEADER}{rows}\n{commands}"
        for title in titles(trained):
            what = CURVES[metric(title)]
            text += f"\n![{title}: returns of {what}]({FIGURES.name}/{figure(title).name}.svg)\n"
    return text


def readme_table(lines: Sequence[Line], peers: Sequence[Line]) -> str:
    """The part of README.md that shows some of the rows."""
    done = by_task(lines)
    tasks = [task for tasks in SETS.values() for task in tasks if task.top and task.name in done]
    rows = "".join(row(task, done[task.name], peers) for task in tasks)
    return BEGIN + HEADER + rows + END


def titles(tasks: Iterable[Task]) -> list[str]:
    """The environments of tasks, each once."""
    return list(dict.fromkeys(task.title for task in tasks))


def figure(title: str) -> pathlib.Path:
    """The path of an environment's figure, without suffix."""
    return FIGURES / title.lower().replace(" ", "_").replace(",", "")


def metric(title: str) -> str:
    """The metric of an environment's learning curves."""
    return next(t.metric for tasks in SETS.values() for t in tasks if t.title == title)


def curves(title: str, lines: Sequence[Line], peers: Sequence[Line]) -> list[SeedGroup]:
    """The learning curves of all tasks in an environment, labelled by agent and config, and those
    of the projects that they are compared with."""
    done, others, groups = by_task(lines), by_task(peers), []
    tasks = [task for tasks in SETS.values() for task in tasks if task.title == title]
    for task in tasks:
        if ours := done.get(task.name):
            label = task.label or f"{agent(ours)}, {task.name}"
            groups.append(SeedGroup(label, [history(line, line.config) for line in ours]))
            if theirs := others.get(task.peer):
                runs = [history(line, ours[0].config) for line in theirs]
                groups.append(SeedGroup(project(task), runs))
    return groups


def history(line: Line, config: dict[str, Any]) -> MetricHistory:
    """The learning curve of a line, as that of a run with a config."""
    return MetricHistory(
        workdir=f"{line.task}-{line.seed}",
        config=config,
        seed=line.seed,
        x={name: np.array(line.curve[name]) for name in ("step", "wall_time")},
        value=np.array(line.curve["return"]),
        num_nonfinite=0,
        steps=line.steps,
        total_steps=line.steps,
        seconds=line.seconds,
        steps_per_second=line.steps_per_second,
    )


def write(lines: Sequence[Line], peers: Sequence[Line]) -> None:
    """Writes the page, its figures and README's table."""
    PAGE.write_text(page(lines, peers))
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + readme_table(lines, peers) + rest.partition(END)[2])
    done = by_task(lines)
    for title in titles(task for tasks in SETS.values() for task in tasks if task.name in done):
        drawn = draw(curves(title, lines, peers), metric(title), ["step"])
        save(drawn, str(figure(title)), [".svg"])
