"""Checks that the processes of a run were started by the same command and share a workdir."""

import dataclasses
import json
import uuid

from etils import epath

from podracer.config import Config
from podracer.distributed.processes import Processes
from podracer.errors import ConfigError
from podracer.storage import bucket, retry
from podracer.storage.compatibility import differences
from podracer.storage.versions import versions
from podracer.training.options import Options

# Packages whose versions must be the same in all processes.
ALIKE = ("podracer", "jax", "jaxlib")


def check_alike(architecture: str, config: Config, options: Options, processes: Processes) -> None:
    """Raises ``ConfigError`` if the processes were not started by the same command."""
    own = {
        "architecture": architecture,
        "workdir": options.workdir is not None,
        "init_from": options.init_from is not None,
        **{x: version for x, version in versions().items() if x in ALIKE},
        **dataclasses.asdict(config),
    }
    first, *others = processes.all_gather(json.loads(json.dumps(own, default=str)))
    for index, other in enumerate(others, 1):
        for key, (expected, got) in differences(first, other).items():
            raise ConfigError(
                f"process {index} has {key}={got!r} and process 0 has {expected!r}: all must be "
                "started by the same command"
            )


def check_shared(path: epath.Path, processes: Processes) -> None:
    """Raises ``ConfigError`` if the processes do not see the same workdir, and ``TransientError``
    if it can't be accessed at present."""
    if processes.count == 1:
        return
    what = f"workdir {str(path)!r} can't be used"

    def write() -> str:
        # A new name: no machine can have cached that the file does not exist.
        mark = path / f".shared-{uuid.uuid4().hex}"
        retry.call(what, lambda: mark.write_text(""))
        return mark.name

    mark = path / processes.broadcast(write)
    found = processes.all_gather(retry.call(what, lambda: bucket.exists(mark)))
    if processes.first:
        retry.call(what, lambda: mark.unlink(missing_ok=True))
    if not all(found):
        missing = [str(index) for index, here in enumerate(found) if not here]
        raise ConfigError(
            f"workdir {str(path)!r} is not the same folder for process 0 and process "
            f"{', '.join(missing)}; specify one that all processes share with --workdir"
        )
