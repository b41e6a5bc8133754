"""What TensorBoard's HParams tab shows: settings and final evaluation of each agent of a run."""

import dataclasses
import pathlib
import time

from tensorboardX import summary
from tensorboardX.record_writer import RecordWriter

from podracer.config import Config
from podracer.monitoring.figures import EVALUATION
from podracer.monitoring.writers import Event, Summary
from podracer.storage.compatibility import flatten
from podracer.types import Row

# In the folder of an agent; it is overwritten when a resumed run finishes again.
FILE = "events.out.tfevents.hparams"


def write(folder: pathlib.Path, config: Config, last: Row) -> None:
    """Writes a session for each agent of a run, which TensorBoard compares with those of all runs
    that it reads.

    TensorBoard takes the metrics of a session from its folder, so each agent has a folder of its
    own. No list of the settings is written, as TensorBoard would read that of one run only.

    Args:
      folder: the folder of the run's event files.
      config: the run's configuration.
      last: its last row of metrics, with an evaluation.
    """
    for member in config.members:
        name = EVALUATION if len(config.members) == 1 else f"{member.name}/{EVALUATION}"
        settings = flatten(dataclasses.asdict(config.alone(member.at(last))))
        values = {
            key: x if isinstance(x, str | int | float) else str(x) for key, x in settings.items()
        }
        _, start, end = summary.hparams(values, {})
        metric = Summary(value=[Summary.Value(tag=EVALUATION, simple_value=last[name])])
        own = folder / member.name
        own.mkdir(parents=True, exist_ok=True)
        file = RecordWriter(str(own / FILE))
        for content in (
            {"file_version": "brain.Event:2"},
            *({"step": int(last["step"]), "summary": x} for x in (start, metric, end)),
        ):
            file.write(Event(wall_time=time.time(), **content).SerializeToString())
        file.close()
