"""The options of a run besides its config."""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from etils import epath

from podracer.distributed.processes import Address
from podracer.errors import ConfigError
from podracer.storage import bucket


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run besides its config.

    Attributes:
      workdir: folder for checkpoints, config.json, metrics.jsonl and summary.json, or
        gs://BUCKET/FOLDER, which all processes must reach; an existing run in it is resumed. None
        writes nothing.
      restart: move an existing run in the workdir aside, and start over.
      init_from: workdir of another run, whose last weights the run starts from.
      quiet: print nothing.
      verbose: show all values of each row of metrics.
      profile: number of updates to trace; WORKDIR/profile gets the trace, for XProf or TensorBoard.
      coordinator, num_processes, process_id: see ``joining.Address``.
      command: the command line that starts the run, for config.json; empty if none does.
    """

    workdir: epath.PathLike | None = None
    restart: bool = False
    init_from: epath.PathLike | None = None
    quiet: bool = False
    verbose: bool = False
    profile: int = 0
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    command: Sequence[str] = ()

    def __post_init__(self):
        if self.profile < 0 or (self.profile and self.workdir is None):
            raise ConfigError(
                f"profile={self.profile} must not be negative, and needs a workdir to write to"
            )
        for path in (self.workdir, self.init_from):
            if path is not None:
                bucket.locate(path)

    @property
    def address(self) -> Address:
        """How to reach the other processes."""
        return Address(self.coordinator, self.num_processes, self.process_id)


class RunOptions(TypedDict, total=False):
    """``Options`` without the workdir, as keyword arguments; those left out have its defaults."""

    restart: bool
    init_from: epath.PathLike | None
    quiet: bool
    verbose: bool
    profile: int
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    command: Sequence[str]
