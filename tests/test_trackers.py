"""Trackers: what TensorBoard and Weights & Biases read of a run, also of one that was resumed."""

import contextlib
import json
import math
import resource
import struct
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from podracer import trackers
from podracer.config import LoggingConfig, default_config
from podracer.errors import ConfigError

CONFIG = {"agent": "ppo", "network": {"hidden": [64, 64]}}


def rows(*steps):
    return [{"step": step, "loss/total": step / 2, "train/episodes": step} for step in steps]


def write(tracker, *written):
    for row in written:
        tracker.write(row)


def read(folder):
    return EventAccumulator(str(folder)).Reload()


def steps(folder, tag="loss/total"):
    return [event.step for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_scalars_and_config(tmp_path):
    tracker = trackers.tensorboard(tmp_path, CONFIG, 0)
    write(tracker, *rows(10, 20))
    tracker.write({"step": 30, "loss/total": math.nan})
    tracker.close()
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
    """Writes rows as a process does that is killed after the last of them."""
    trackers_left = []

    def write_and_die(first_step, *written):
        tracker = trackers.tensorboard(tmp_path, CONFIG, first_step)
        trackers_left.append(tracker)
        write(tracker, *written)

    yield write_and_die
    for tracker in trackers_left:
        tracker.close()


def test_tensorboard_has_each_step_once_however_often_a_run_is_killed(tmp_path, killed):
    # All of these files are begun within a second or two, as in a run that is killed at once.
    killed(0, *rows(10, 20, 30))
    assert steps(tmp_path) == [10, 20, 30]
    killed(20)
    assert steps(tmp_path) == [10, 20]
    killed(20, *rows(30, 40, 50))
    killed(40, *rows(50, 60))
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 60]
    # Also where another number of updates to a row lets no step fall on an earlier one.
    killed(50, *rows(57, 64))
    assert steps(tmp_path) == [10, 20, 30, 40, 50, 57, 64]
    killed(0, *rows(10))
    assert steps(tmp_path) == [10]


def test_a_record_that_was_cut_off_costs_nothing_else(tmp_path, killed):
    killed(0, *rows(10, 20, 30))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    killed(20, *rows(30))
    assert steps(tmp_path) == [10, 20, 30]


@contextlib.contextmanager
def full_disk():
    """No file of this process can grow any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path):
    told = []
    tracker = trackers.make(LoggingConfig(), tmp_path, CONFIG, 0, told.append)
    write(tracker, *rows(10))
    with full_disk():
        write(tracker, *rows(20, 30))
    write(tracker, *rows(40))
    tracker.close()
    (message,) = told
    assert message.startswith("warning: TensorBoard gets no more rows, the run goes on without: ")
    assert "File too large" in message
    # The row that found no room is still on its way when there is some at the end.
    assert steps(tmp_path / "tensorboard") == [10, 20]


def test_one_tracker_s_failure_is_not_the_others():
    told, written, closed = [], [], []

    def fail(row):
        raise OSError("network is down")

    broken = trackers.guarded(trackers.Tracker(fail, lambda: None), "A", told.append)
    whole = trackers.Tracker(written.append, lambda: closed.append(True))
    both = trackers.combined([broken, trackers.guarded(whole, "B", told.append)])
    write(both, *rows(10, 20))
    both.close()
    assert written == rows(10, 20)
    assert closed == [True]
    assert len(told) == 1
    assert "A gets no more rows" in told[0]


def test_an_interrupt_is_no_failure():
    def interrupted(row):
        raise KeyboardInterrupt

    tracker = trackers.guarded(trackers.Tracker(interrupted, lambda: None), "A", pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        tracker.write({"step": 1})


def test_what_is_off_writes_nothing(tmp_path):
    config = LoggingConfig(tensorboard=False)
    tracker = trackers.make(config, tmp_path, CONFIG, 0, pytest.fail)
    write(tracker, *rows(10))
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_config_has_the_section():
    assert default_config().logging.to_dict() == {
        "tensorboard": True,
        "wandb": False,
        "wandb_project": "podracer",
        "wandb_entity": "",
    }


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    trackers.check(LoggingConfig(wandb=False))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'podracer\[wandb\]'"):
        trackers.check(LoggingConfig(wandb=True))


def wandb_rows(file):
    """What Weights & Biases would send of an offline run: its id, and the values by step.

    The file is LevelDB's log format after a header of 7 bytes: records in blocks of 32 KiB, which
    small ones fit into whole.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, run_id, history = file.read_bytes(), 7, None, {}
    assert data[:4] == b":W&B"
    assert len(data) < 2**15, "records may be split between blocks"
    while place < len(data):
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        assert kind == 1, "a whole record"
        record = Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        if record.HasField("run"):
            run_id = record.run.run_id
        if record.HasField("history"):
            items = {"/".join(x.nested_key) or x.key: x.value_json for x in record.history.item}
            values = {name: json.loads(x) for name, x in items.items() if name[0] != "_"}
            history[record.history.step.num] = values
    return run_id, history


def test_wandb_offline_is_one_run_however_often_it_continues(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LoggingConfig(tensorboard=False, wandb=True, wandb_project="probe")
    runs = [(0, rows(10, 20)), (20, [*rows(30), {"step": 40, "x": math.nan}])]
    try:
        for first_step, written in runs:
            tracker = trackers.make(config, tmp_path, CONFIG, first_step, pytest.fail)
            write(tracker, *written)
            tracker.close()
    finally:
        # Ends its process.
        wandb.teardown()
    kept = (tmp_path / "wandb_run_id").read_text().strip()
    # Named by second, which may be one and the same.
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    read_back = [wandb_rows(file) for file in files]
    assert {run_id for run_id, _ in read_back} == {kept}
    history = {step: values for _, part in read_back for step, values in part.items()}
    assert list(history) == [10, 20, 30, 40]
    assert history[30] == {"loss/total": 15.0, "train/episodes": 30}
    assert list(history[40]) == ["x"]
    assert math.isnan(history[40]["x"])


def test_wandb_that_does_not_answer_is_said_in_one_line(tmp_path, monkeypatch):
    import wandb

    def unreachable(**kwargs):
        raise wandb.errors.CommError("connection refused")

    monkeypatch.setattr(wandb, "init", unreachable)
    with pytest.raises(ConfigError, match=r"connection refused; .* WANDB_MODE=offline"):
        trackers.wandb(tmp_path, CONFIG, 0, project="probe")
