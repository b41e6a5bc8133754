"""Writes rows of metrics to TensorBoard and to Weights & Biases, besides ``metrics.jsonl``.

A run that resumes at step S has already written its rows up to S. Rows that an earlier process
wrote after S, before it was killed, are discarded, so that no step appears twice.
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
from podracer.errors import ConfigError, TransientError, missing_extra
from podracer.types import Row

# protobuf defines these classes at run time, which a type checker doesn't see.
Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
SessionLog: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

TENSORBOARD, WANDB_ID = "tensorboard", "wandb_run_id"


class Writer(NamedTuple):
    """Writes rows of metrics to one place.

    Attributes:
      write: ``(row)``, writes one row.
      close: ``()``, called once at the end of the run.
    """

    write: Callable[[Row], None]
    close: Callable[[], None]


def check(logging: LoggingConfig) -> None:
    """Raises ``ConfigError`` if a package that the config needs is not installed."""
    if logging.wandb:
        _import_wandb()


def make_writer(
    logging: LoggingConfig,
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    first_step: int,
    warn: Callable[[str], None],
) -> Writer:
    """One writer for all services of a run; its methods never raise an ``Exception``.

    Args:
      logging: which services to write to.
      workdir: workdir of the run, an existing local folder.
      config: config of the run, as a dictionary.
      first_step: step that this process resumes after; 0 begins a new run.
      warn: shows a warning to the user; called once for each service that fails.

    Raises:
      ConfigError: a package is not installed, or a service can't be used.
      TransientError: a service that the run has used before can't be used at present.
    """
    writers = []
    if logging.tensorboard:
        writer = tensorboard(workdir / TENSORBOARD, config, first_step)
        writers.append(guard(writer, "TensorBoard", warn))
    if logging.wandb:
        project, entity = logging.wandb_project, logging.wandb_entity
        writer = wandb(workdir, config, first_step, project=project, entity=entity)
        writers.append(guard(writer, "Weights & Biases", warn))
    return combine(writers)


def combine(writers: Sequence[Writer]) -> Writer:
    """A writer that writes each row with all of these."""

    def write(row: Row) -> None:
        for writer in writers:
            writer.write(row)

    def close() -> None:
        for writer in writers:
            writer.close()

    return Writer(write, close)


def guard(writer: Writer, name: str, warn: Callable[[str], None]) -> Writer:
    """A writer that stops writing with a warning at the first failure, so that the run continues.

    Any ``Exception`` counts as a failure: the errors that a library raises for a full disk or an
    unreachable network can't be enumerated.

    Args:
      writer: the writer that may fail.
      name: name of the service in the warning.
      warn: shows a warning to the user.
    """
    failed = False

    def attempt(function: Callable[..., None], *arguments: Row) -> None:
        nonlocal failed
        try:
            function(*arguments)
        except Exception as error:
            if not failed:
                warn(
                    f"warning: the run continues, but no longer writes metrics to {name}: {error!r}"
                )
            failed = True

    def write(row: Row) -> None:
        if not failed:
            attempt(writer.write, row)

    return Writer(write, lambda: attempt(writer.close))


def tensorboard(folder: pathlib.Path, config: Mapping[str, Any], first_step: int) -> Writer:
    """Writes TensorBoard event files: scalars by step, and the config of each process as a text.

    Args:
      folder: folder of the event files; those of earlier processes stay.
      config: config of the run, as a dictionary.
      first_step: see ``make_writer``.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Not tensorboardX's SummaryWriter, which writes in a thread: rows would be lost if the process
    # were killed, and if the thread failed because of a full disk, the run would block forever.
    # TensorBoard reads files in the order of their names, which contain the time in seconds; the
    # suffix orders files of the same second.
    events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")

    def write_event(step: int, **content: Any) -> None:
        events.write_event(Event(step=step, wall_time=time.time(), **content))

    def write(row: Row) -> None:
        values = [
            Summary.Value(tag=name, simple_value=x) for name, x in row.items() if name != "step"
        ]
        write_event(int(row["step"]), summary=Summary(value=values))
        events.flush()

    # Makes TensorBoard discard the scalars of this step and of later steps.
    discard_from = first_step + 1 if first_step else 0
    write_event(discard_from, session_log=SessionLog(status=SessionLog.START))
    # The text is Markdown, where indented lines are shown verbatim.
    text = "".join(
        f"    {line}\n" for line in json.dumps(config, indent=2, default=str).split("\n")
    )
    write_event(first_step, summary=summary.text("config", text))
    events.flush()
    return Writer(write, lambda: events.close() and None)


def wandb(
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    first_step: int,
    *,
    project: str,
    entity: str = "",
) -> Writer:
    """Sends rows to Weights & Biases; with ``WANDB_MODE=offline`` they stay in the workdir.

    The id of the run at Weights & Biases is stored in the workdir, so that a resumed run continues
    the same one there, which ignores rows up to its own last step.

    Args:
      workdir: workdir of the run.
      config: config of the run, as a dictionary.
      first_step: see ``make_writer``.
      project: project that the run belongs to.
      entity: user or team; "" is the user's default.

    Raises:
      ConfigError: the package is not installed, or the service can't be used.
      TransientError: an earlier start of the run has used the service, and now it can't be used.
    """
    library = _import_wandb()
    id_file = workdir / WANDB_ID
    worked_before = id_file.exists()
    if first_step and worked_before:
        run_id = id_file.read_text(encoding="utf-8").strip()
    else:
        run_id = uuid.uuid4().hex[:8]
    try:
        run = library.init(
            project=project,
            entity=entity or None,
            id=run_id,
            name=workdir.name,
            dir=workdir,
            config=dict(config),
            resume="allow",
            # Otherwise wandb captures the output of the process, including the live view.
            settings=library.Settings(console="off"),
        )
    except library.Error as error:
        what = f"logging.wandb: Weights & Biases can't be started: {error}"
        later = "set WANDB_MODE=offline to upload the run later"
        # Its errors don't tell a missing permission from an unreachable service.
        if worked_before:
            raise TransientError(f"{what}; the same command may work later, or {later}") from error
        raise ConfigError(f"{what}; run wandb login, or {later}") from error
    id_file.write_text(run_id + "\n", encoding="utf-8")

    def write(row: Row) -> None:
        values = {name: x for name, x in row.items() if name != "step"}
        run.log(values, step=int(row["step"]))

    return Writer(write, run.finish)


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise missing_extra("wandb", "logging.wandb=True") from error
