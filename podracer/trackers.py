"""Where rows of metrics go beside ``metrics.jsonl``: TensorBoard, and Weights & Biases.

A run that continues at step S has its rows up to S there already. What an earlier process wrote
after S, and lost when it was killed, is taken back, so that no step is there twice.
"""

import importlib
import json
import pathlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from podracer.config import LoggingConfig
from podracer.errors import ConfigError
from podracer.view import Row

# protobuf makes these while it loads, unseen by a type checker.
Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
SessionLog: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

TENSORBOARD, WANDB_ID = "tensorboard", "wandb_run_id"


class Tracker(NamedTuple):
    """What takes rows.

    Attributes:
      write: takes one.
      close: is called once, at the end.
    """

    write: Callable[[Row], None]
    close: Callable[[], None]


def check(logging: LoggingConfig) -> None:
    """Raises ``ConfigError`` if a package that is asked for is not installed."""
    if logging.wandb:
        _import_wandb()


def make(
    logging: LoggingConfig,
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    first_step: int,
    warn: Callable[[str], None],
) -> Tracker:
    """All trackers of a run as one, which never fails once it is made.

    Args:
      logging: which.
      workdir: of the run, an existing local folder.
      config: of the run, as a dictionary.
      first_step: of this process; 0 begins anew, else rows after it follow.
      warn: tells a person, once for each tracker that fails.

    Raises:
      ConfigError: a package is not installed, or a service does not answer.
    """
    trackers = []
    if logging.tensorboard:
        tracker = tensorboard(workdir / TENSORBOARD, config, first_step)
        trackers.append(guarded(tracker, "TensorBoard", warn))
    if logging.wandb:
        project, entity = logging.wandb_project, logging.wandb_entity
        tracker = wandb(workdir, config, first_step, project=project, entity=entity)
        trackers.append(guarded(tracker, "Weights & Biases", warn))
    return combined(trackers)


def combined(trackers: Sequence[Tracker]) -> Tracker:
    """All of them as one."""

    def write(row: Row) -> None:
        for tracker in trackers:
            tracker.write(row)

    def close() -> None:
        for tracker in trackers:
            tracker.close()

    return Tracker(write, close)


def guarded(tracker: Tracker, name: str, warn: Callable[[str], None]) -> Tracker:
    """The tracker, whose first failure is told and ends it, but not the run.

    What a full disk or a network throws through a library can't be listed: any ``Exception``
    counts.
    """
    failed = False

    def attempt(function: Callable[..., None], *arguments: Row) -> None:
        nonlocal failed
        try:
            function(*arguments)
        except Exception as error:
            if not failed:
                warn(f"warning: {name} gets no more rows, the run goes on without: {error!r}")
            failed = True

    def write(row: Row) -> None:
        if not failed:
            attempt(tracker.write, row)

    return Tracker(write, lambda: attempt(tracker.close))


def tensorboard(folder: pathlib.Path, config: Mapping[str, Any], first_step: int) -> Tracker:
    """Writes event files: scalars by step, and the config of each process as a text.

    Args:
      folder: for them; an earlier process' files stay.
      config: of the run, as a dictionary.
      first_step: see ``make``.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Not tensorboardX's SummaryWriter: it writes in a thread, whose rows are lost when the process
    # is killed, and whose end by a full disk would make the run wait for ever.
    # Files are read in the order of their names, which know the second: this is for within one.
    events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")

    def write_event(step: int, **content: Any) -> None:
        events.write_event(Event(step=step, wall_time=time.time(), **content))

    def write(row: Row) -> None:
        values = [
            Summary.Value(tag=name, simple_value=x) for name, x in row.items() if name != "step"
        ]
        write_event(int(row["step"]), summary=Summary(value=values))
        events.flush()

    # TensorBoard forgets the scalars it has of this step and later ones.
    forget = first_step + 1 if first_step else 0
    write_event(forget, session_log=SessionLog(status=SessionLog.START))
    # Markdown: what is indented is shown as it is.
    text = "".join(
        f"    {line}\n" for line in json.dumps(config, indent=2, default=str).split("\n")
    )
    write_event(first_step, summary=summary.text("config", text))
    events.flush()
    return Tracker(write, lambda: events.close() and None)


def wandb(
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    first_step: int,
    *,
    project: str,
    entity: str = "",
) -> Tracker:
    """Sends rows to Weights & Biases; ``WANDB_MODE=offline`` keeps them in the workdir.

    The run's id is kept in the workdir, so that a run that continues is one run there. Rows up to
    the last step it has are not taken again.

    Args:
      workdir: of the run.
      config: of the run, as a dictionary.
      first_step: see ``make``.
      project: that the run belongs to.
      entity: user or team; "" takes the user's default.

    Raises:
      ConfigError: the package is not installed, or the service does not answer.
    """
    library = _import_wandb()
    kept = workdir / WANDB_ID
    if not (first_step and kept.exists()):
        kept.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    try:
        run = library.init(
            project=project,
            entity=entity or None,
            id=kept.read_text(encoding="utf-8").strip(),
            name=workdir.name,
            dir=workdir,
            config=dict(config),
            resume="allow",
            # The terminal belongs to the live view.
            settings=library.Settings(console="off"),
        )
    except library.Error as error:
        raise ConfigError(
            f"logging.wandb: Weights & Biases does not start: {error}; run `wandb login`, or set "
            "WANDB_MODE=offline to send the run later"
        ) from error

    def write(row: Row) -> None:
        values = {name: x for name, x in row.items() if name != "step"}
        run.log(values, step=int(row["step"]))

    return Tracker(write, run.finish)


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "logging.wandb=True needs the package wandb: pip install 'podracer[wandb]'"
        ) from error
