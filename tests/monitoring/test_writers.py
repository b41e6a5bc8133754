"""What TensorBoard and Weights & Biases read of a run, also after it was resumed or failed."""

import contextlib
import json
import math
import resource
import struct
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from podracer.config import LoggingConfig, default_config
from podracer.errors import ConfigError, TransientError
from podracer.monitoring import writers

CONFIG = {"agent": "ppo", "network": {"hidden": [64, 64]}}


def rows(*steps):
    return [{"step": step, "loss/total": step / 2, "train/episodes": step} for step in steps]


def write(writer, *written):
    for row in written:
        writer.write(row)


def read(folder):
    return EventAccumulator(str(folder)).Reload()


def steps(folder, tag="loss/total"):
    return [event.step for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_scalars_and_config(tmp_path):
    writer = writers.tensorboard(tmp_path, CONFIG, 0)
    write(writer, *rows(10, 20))
    writer.write({"step": 30, "loss/total": math.nan})
    writer.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["loss/total", "train/episodes"]
    values = [(event.step, event.value) for event in events.Scalars("loss/total")]
    assert values[:2] == [(10, 5.0), (20, 10.0)]
    assert values[2][0] == 30
    assert math.isnan(values[2][1])
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown) == CONFIG
    assert all(line.startswith("    ") for line in shown.splitlines())


@pytest.fixture
def killed(tmp_path):
    """Writes rows and closes nothing, like a process that is killed after the last row."""
    left_open = []

    def write_and_die(first_step, *written):
        writer = writers.tensorboard(tmp_path, CONFIG, first_step)
        left_open.append(writer)
        write(writer, *written)

    yield write_and_die
    for writer in left_open:
        writer.close()


def test_tensorboard_has_each_step_once_however_often_a_run_is_killed(tmp_path, killed):
    # All of these files are created within a second or two, like those of a run killed at once.
    killed(0, *rows(10, 20, 30))
    assert steps(tmp_path) == [10, 20, 30]
    killed(20)
    assert steps(tmp_path) == [10, 20]
    killed(20, *rows(30, 40, 50))
    killed(40, *rows(50, 60))
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 60]
    # Also with another number of updates per row, where no step equals an earlier one.
    killed(50, *rows(57, 64))
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 57, 64]
    killed(0, *rows(10))
    assert steps(tmp_path) == [10]


def test_a_truncated_record_loses_no_other_record(tmp_path, killed):
    killed(0, *rows(10, 20, 30))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    killed(20, *rows(30))
    assert steps(tmp_path) == [10, 20, 30]


@contextlib.contextmanager
def full_disk():
    """Makes every write to a file of this process fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failing_writer_warns_once_and_the_run_continues(tmp_path):
    warnings = []
    writer = writers.make_writer(LoggingConfig(), tmp_path, CONFIG, 0, warnings.append)
    write(writer, *rows(10))
    with full_disk():
        write(writer, *rows(20, 30))
    write(writer, *rows(40))
    writer.close()
    (message,) = warnings
    assert "the run continues, but no longer writes metrics to TensorBoard: " in message
    assert "File too large" in message
    # The row that failed was buffered, and is written when the disk has room again at the end.
    assert steps(tmp_path / "tensorboard") == [10, 20]


def test_a_failing_writer_does_not_affect_others():
    warnings, written, closed = [], [], []

    def fail(row):
        raise OSError("network is down")

    broken = writers.guard(writers.Writer(fail, lambda: None), "A", warnings.append)
    whole = writers.Writer(written.append, lambda: closed.append(True))
    both = writers.combine([broken, writers.guard(whole, "B", warnings.append)])
    write(both, *rows(10, 20))
    both.close()
    assert written == rows(10, 20)
    assert closed == [True]
    assert len(warnings) == 1
    assert "no longer writes metrics to A" in warnings[0]


def test_an_interrupt_is_not_caught():
    def interrupted(row):
        raise KeyboardInterrupt

    writer = writers.guard(writers.Writer(interrupted, lambda: None), "A", pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        writer.write({"step": 1})


def test_a_disabled_writer_writes_nothing(tmp_path):
    config = LoggingConfig(tensorboard=False)
    writer = writers.make_writer(config, tmp_path, CONFIG, 0, pytest.fail)
    write(writer, *rows(10))
    writer.close()
    assert not list(tmp_path.iterdir())


def test_the_default_logging_config():
    assert default_config().logging.to_dict() == {
        "tensorboard": True,
        "wandb": False,
        "wandb_project": "podracer",
        "wandb_entity": "",
    }


def test_a_missing_package_is_rejected_before_the_run_starts(monkeypatch):
    writers.check(LoggingConfig(wandb=False))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[wandb\]'"):
        writers.check(LoggingConfig(wandb=True))


def wandb_rows(file):
    """The id and the values by step that Weights & Biases stored for an offline run.

    The file has a header of 7 bytes and LevelDB's log format: records in blocks of 32 KiB, which
    aren't split in a file smaller than a block.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, place, run_id, history = file.read_bytes(), 7, None, {}
    assert data[:4] == b":W&B"
    assert len(data) < 2**15, "records may be split between blocks"
    while place < len(data):
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        assert kind == 1, "the record is complete"
        record = Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        if record.HasField("run"):
            run_id = record.run.run_id
        if record.HasField("history"):
            items = {"/".join(x.nested_key) or x.key: x.value_json for x in record.history.item}
            values = {name: json.loads(x) for name, x in items.items() if name[0] != "_"}
            history[record.history.step.num] = values
    return run_id, history


def test_a_resumed_run_is_one_run_at_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LoggingConfig(tensorboard=False, wandb=True, wandb_project="probe")
    runs = [(0, rows(10, 20)), (20, [*rows(30), {"step": 40, "x": math.nan}])]
    try:
        for first_step, written in runs:
            writer = writers.make_writer(config, tmp_path, CONFIG, first_step, pytest.fail)
            write(writer, *written)
            writer.close()
    finally:
        # Ends its service process.
        wandb.teardown()
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    # Their names contain the time in seconds, which may be the same.
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    read_back = [wandb_rows(file) for file in files]
    assert {stored_id for stored_id, _ in read_back} == {run_id}
    history = {step: values for _, part in read_back for step, values in part.items()}
    assert list(history) == [10, 20, 30, 40]
    assert history[30] == {"loss/total": 15.0, "train/episodes": 30}
    assert list(history[40]) == ["x"]
    assert math.isnan(history[40]["x"])


def test_an_unreachable_wandb_is_final_only_before_it_was_ever_reached(tmp_path, monkeypatch):
    import wandb
    from wandb.errors import CommError

    def unreachable(**kwargs):
        raise CommError("connection refused")

    monkeypatch.setattr(wandb, "init", unreachable)
    message = r"connection refused; .* WANDB_MODE=offline"
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            writers.wandb(tmp_path, CONFIG, 0, project="probe")
    # A run that was preempted must not end for good.
    (tmp_path / "wandb_run_id").write_text("abcd1234\n")
    with pytest.raises(TransientError, match=message):
        writers.wandb(tmp_path, CONFIG, 10, project="probe")
