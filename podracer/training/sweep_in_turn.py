"""The agents of a sweep, one after another under one command, each as a run of its own.

With environments on the host, each run uses all cores, so that several at once would share them.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from podracer.config import Config
from podracer.config.members import Point
from podracer.distributed import joining
from podracer.errors import ConfigError, DivergedError
from podracer.monitoring.curves import mean_and_interval
from podracer.monitoring.formatting import mean_and_error
from podracer.storage import workdir as workdir_lib
from podracer.storage.versions import versions
from podracer.storage.workdir import Workdir
from podracer.training.loop import Result
from podracer.training.options import Options, RunOptions
from podracer.training.rows import comparable
from podracer.training.session import check_resumed
from podracer.training.sweep_report import make_report
from podracer.types import Row


def train_in_turn(
    architecture: str,
    train: Callable[..., Result],
    config: Config,
    workdir: epath.PathLike | None,
    options: RunOptions,
) -> Result:
    """Trains the agents of a sweep, or of several seeds.

    Args:
      architecture: its name, "sebulba" or "anakin".
      train: trains one agent, as ``podracer.sebulba.train``.
      config: the configuration of all.
      workdir: a folder, in which the run of each agent has one of its own, named after it; None
        writes nothing. Agents that it holds are resumed.
      options: see ``training.options.Options``.

    Returns:
      The result of the best agent, with a summary of all.

    Raises:
      ConfigError: a setting that these runs don't support, or that one of them doesn't.
      DivergedError: all agents have diverged; of others, the report says so.
      as ``train``: the runs after the one that failed have not begun.
    """
    given = Options(workdir, **options)
    _check(config, given)
    log: Callable[[str], None] = print if not given.quiet else lambda text: None
    # The folder of all is moved aside as a whole, and the command is that of all.
    of_one: RunOptions = {**options, "restart": False, "command": ()}
    last: Row = {"step": 0, "wall_time": 0.0}
    best: Result | None = None
    summaries: list[Mapping[str, Any]] = []
    with _folder(architecture, config, given, log) as folder:
        for member in config.members:
            own = None if folder is None else folder.path / member.name
            log(f"{member.name} of {len(config.members)}: {Point((member,)).text}")
            try:
                result = train(config.alone(member), own, **of_one)
            except DivergedError as error:
                log(f"{member.name}: {error}")
                last[f"{member.name}/train/diverged"] = 1.0
                continue
            summaries.append(result.summary)
            row = result.metrics[-1]
            last["step"] = max(last["step"], row["step"])
            last["wall_time"] += row["wall_time"]
            last |= {f"{member.name}/{name}": x for name, x in row.items()}
            if best is None or _return(result) > _return(best):
                best = result
        if best is None:
            raise DivergedError(f"each of the {len(config.members)} agents has diverged, see above")
        report = make_report(config, [last])
        summary = {**_summarize(config, summaries), **report}
        if folder is not None:
            folder.keep(-1)
            folder.append(last)
            folder.dump(workdir_lib.SUMMARY, summary)
    if "report" in report:
        log(report["report"])
    else:
        interval = summary.get("eval_return_interval")
        shown = mean_and_error(summary["eval_return_mean"], interval)
        log(f"evaluation {shown} over {len(summaries)} seeds")
    return best._replace(summary=summary)


def _return(result: Result) -> float:
    return float(comparable(result.summary["eval_return_mean"]))


def _summarize(config: Config, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As the summary of agents that learn together: evaluations are means over agents, and seconds
    those of all."""
    first, count = summaries[0], len(summaries)
    means = {
        name: sum(x[name] for x in summaries) / count for name in first if name.startswith("eval_")
    }
    _, interval = mean_and_interval(np.array([x["eval_return_mean"] for x in summaries]))
    seconds = sum((Counter(x["seconds"]) for x in summaries), Counter())
    return {
        "env_steps": first["env_steps"],
        "wall_seconds": sum(x["wall_seconds"] for x in summaries),
        "compile_seconds": sum(x["compile_seconds"] for x in summaries),
        "steps_per_second": count / sum(1 / x["steps_per_second"] for x in summaries),
        **means,
        **({} if interval is None else {"eval_return_interval": float(interval)}),
        "eval_episodes": first["eval_episodes"],
        "seed": config.seed,
        "num_seeds": config.num_seeds,
        "seconds": dict(seconds),
    }


def _check(config: Config, given: Options) -> None:
    """Raises ``ConfigError`` if several processes share the command."""
    address, _ = joining.find(given.address, config.hosts)
    if address.num_processes not in (None, 1):
        raise ConfigError(
            f"this command trains {len(config.members)} agents in turn, with environments on the "
            f"host, and there are {address.num_processes} processes; start one process for all, or "
            "a run for each"
        )


@contextlib.contextmanager
def _folder(
    architecture: str, config: Config, given: Options, log: Callable[[str], None]
) -> Iterator[Workdir | None]:
    """The folder of all runs, with ``config.json``; closed at the end."""
    if given.workdir is None:
        yield None
        return
    with contextlib.closing(Workdir(given.workdir, restart=given.restart, log=log)) as folder:
        check_resumed(folder, architecture, config, log)
        folder.hold()
        content: Mapping[str, object] = {
            "architecture": architecture,
            "config": dataclasses.asdict(config),
            "sizes": {"num_agents": len(config.members)},
            "members": [member.name for member in config.members],
            "versions": versions(),
            "command": list(given.command),
        }
        folder.dump(workdir_lib.CONFIG, content)
        yield folder
