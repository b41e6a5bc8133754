"""Workdirs in a bucket, by an emulator of Google Cloud Storage: what a folder promises holds."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import google.cloud.storage
import jax
import pytest
from gcp_storage_emulator.server import create_server
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from podracer import anakin, bucket, checkpoint, errors, evaluate, look, plot
from podracer.processes import Processes
from podracer.workdir import CONFIG, METRICS, Workdir, read_rows
from tests.helpers import make_config
from tests.test_resume import Stops, bits, resumable, timeless

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def store():
    """An empty store with a bucket; all clients of this process and those it starts go there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
        patch.setenv("TENSORSTORE_GCS_HTTP_VERSION", "1.1")
        # None of them looks for Google's machines, nor speaks gRPC, which the emulator does not.
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
            bucket.locate("gs://bucket/any")
            yield fsspec.filesystem("gcs")


@pytest.fixture
def run(store, request):
    """The path of a workdir that is not there yet."""
    return f"gs://bucket/{request.node.originalname}"


@pytest.fixture(autouse=True)
def _local(tmp_path, monkeypatch):
    """What killed runs leave goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def kill(workdir) -> None:
    """Lets go of a workdir as the end of a process does."""
    workdir._metrics.close()
    workdir._lock.close()


def files(store, path) -> set[str]:
    """Names of what is in a folder, folders among them."""
    return {name.rpartition("/")[2] for name in store.ls(path, detail=False)}


def row(step):
    return {"step": step, "wall_time": step / 2, "loss/total": math.nan}


def begin(path, told=None, **options):
    """A workdir as a run begins it."""
    say = [].append if told is None else told.append
    workdir = Workdir(path, **{"restart": False, "say": say, **options})
    with contextlib.ExitStack() as on_error:
        on_error.callback(workdir.close)
        workdir.hold()
        workdir.dump(CONFIG, {"architecture": "anakin", "config": {"seed": 0}, "sizes": {}})
        on_error.pop_all()
    return workdir


def steps(path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_are_there_from_each_sync_on_and_at_the_end(store, run):
    workdir = begin(run)
    for step in (10, 20):
        workdir.append(row(step))
    assert not workdir.sync()
    workdir.append(row(30))
    kill(workdir)
    # What is left is what the last checkpoint counts on.
    assert steps(run) == [10, 20]
    again = begin(run)
    assert again.config == {"architecture": "anakin", "seed": 0}
    again.keep(10)
    for step in (20, 30, 40):
        again.append(row(step))
    again.close()
    assert steps(run) == [10, 20, 30, 40]
    assert files(store, run) == {CONFIG, METRICS}
    assert not again.local.exists()


def test_who_looks_on_sees_rows_after_a_while(run, monkeypatch):
    workdir = begin(run)
    workdir.append(row(10))
    assert steps_or_none(run) == []
    monkeypatch.setattr(workdir._mirror, "_due", 0.0)
    workdir.append(row(20))
    assert steps(run) == [10, 20]
    workdir.append(row(30))
    assert steps(run) == [10, 20]
    workdir.close()


def steps_or_none(path) -> list[int]:
    try:
        return steps(path)
    except errors.ConfigError:
        return []


def test_the_one_that_began_last_holds_the_workdir(run):
    told = []
    first = begin(run)
    first.append(row(10))
    first.sync()
    second = begin(run, told)
    assert "was held by" in told[0]
    assert f"process {os.getpid()}" in told[0]
    with pytest.raises(errors.SaveError, match="now belongs to another run"):
        first.sync()
    second.append(row(20))
    first.close()
    second.close()
    assert steps(run) == [10, 20]


def test_what_is_refused_takes_nothing_over(run):
    first = begin(run)
    refused = Workdir(run, restart=False, say=pytest.fail)
    refused.close()
    assert not first.sync()
    first.close()


def test_a_workdir_that_is_deleted_under_the_run_is_copied_anew(store, run):
    workdir = begin(run)
    workdir.append(row(10))
    workdir.sync()
    store.rm(run, recursive=True)
    assert workdir.sync()
    assert files(store, run) == {CONFIG, METRICS, bucket.LOCK}
    workdir.close()


def test_who_listed_a_folder_sees_what_others_write_there_later(run):
    other = fsspec.filesystem("gcs", skip_instance_cache=True)
    path = bucket.locate(run)
    other.pipe_file(f"{run}/1", b"")
    assert [x.name for x in path.iterdir()] == ["1"]
    other.pipe_file(f"{run}/2", b"")
    assert (path / "2").exists()
    assert [x.name for x in path.iterdir()] == ["1", "2"]


def test_restart_moves_all_objects_aside(store, run):
    workdir = begin(run)
    workdir.append(row(10))
    workdir.close()
    store.pipe_file(f"{run}/checkpoints/1/weights/d/x", b"1")
    told = []
    again = begin(run, told, restart=True)
    assert told == [f"the earlier run in {run} is now {run}.1"]
    assert again.config is None
    again.append(row(20))
    again.close()
    assert steps(f"{run}.1") == [10]
    assert steps(run) == [20]
    assert store.cat_file(f"{run}.1/checkpoints/1/weights/d/x") == b"1"
    assert "checkpoints" not in files(store, run)


def test_what_can_not_be_copied_is_told_of_and_kept(run, monkeypatch):
    told = []
    workdir = begin(run, told)

    def fail(*arguments):
        raise RuntimeError("network is down")

    monkeypatch.setattr(workdir._mirror._files, "put_file", fail, raising=False)
    monkeypatch.setattr(workdir._mirror, "_due", 0.0)
    workdir.append(row(10))
    with pytest.raises(errors.SaveError, match="can't be written: RuntimeError: network is down"):
        workdir.sync()
    workdir.close()
    assert len(told) == 2
    assert "is not up to date, training goes on: RuntimeError: network is down" in told[0]
    assert str(workdir.local) in told[1]
    assert json.loads((workdir.local / METRICS).read_text())["step"] == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/run", "must be a folder or gs://BUCKET/FOLDER"),
        ("gs://bucket", "must be a folder or gs://BUCKET/FOLDER"),
        ("gs://nobucket/run", "is not writable: .*nobucket"),
    ],
)
def test_impossible_paths_are_refused(path, message, store):
    with pytest.raises(errors.ConfigError, match=message):
        begin(path)


def test_a_bucket_whose_properties_are_secret_is_refused(run, monkeypatch):
    def forbid(self, name):
        raise PermissionError(f"403: no storage.buckets.get on {name}")

    monkeypatch.setattr(google.cloud.storage.Client, "get_bucket", forbid)
    with pytest.raises(errors.ConfigError, match=r"is not writable: .*\.buckets\.get on bucket"):
        begin(run)


def test_a_slash_that_pathlib_took_away_is_given_back(store):
    assert str(bucket.locate(Path("gs://bucket/a/b"))) == "gs://bucket/a/b"


@pytest.mark.parametrize("package", ["gcsfs", "google.cloud.storage"])
def test_a_missing_package_is_named_before_anything_starts(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for options in ({"workdir": "gs://bucket/run"}, {"init_from": "gs://bucket/run"}):
        with pytest.raises(errors.ConfigError, match=r"pip install 'podracer\[gcs\]'"):
            anakin.train(make_config(), quiet=True, **options)


def test_a_run_in_a_bucket_is_that_of_a_folder(store, run, tmp_path, monkeypatch, capsys):
    # Its programs are compiled for other tests as well.
    config = resumable(evaluation__every=0, checkpoint__every=0)
    whole = anakin.train(config, tmp_path / "whole", quiet=True)
    Stops(monkeypatch, 2)
    with pytest.raises(errors.PreemptedError):
        anakin.train(config, run, quiet=True)
    assert steps(run) == [128, 256, 384]
    assert files(store, f"{run}/checkpoints") == {"3"}
    result = anakin.train(config, run, quiet=True)
    assert bits(result.weights) == bits(whole.weights)
    assert timeless(result.metrics) == timeless(whole.metrics)
    assert timeless(read_rows(run)) == timeless(whole.metrics)
    assert files(store, run) == {
        CONFIG, METRICS, "summary.json", "learning_curve.png", "checkpoints", "tensorboard",
    }  # fmt: skip
    for command in (look, plot):
        assert command.main([run, f"--out={tmp_path / 'x.svg'}"]) == 0
    judged = evaluate.evaluate(run)
    assert judged["return_mean"] == result.summary["eval_return_mean"]
    store.get(f"{run}/tensorboard", str(tmp_path / "events"), recursive=True)
    events = EventAccumulator(str(tmp_path / "events")).Reload().Scalars("loss/total")
    assert [event.step for event in events] == [row["step"] for row in whole.metrics]
    # What --init_from takes, and evaluate.
    like = jax.eval_shape(lambda: result.weights)
    for which in ("last", "best"):
        weights, update = checkpoint.load_weights(run, which, like)
        assert update == 10
        assert bits(weights) == bits(result.weights)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_checkpoints_that_are_damaged_or_half_written_give_way(store, run):
    state = {"train": {"weights": {"a": jax.numpy.arange(12.0)}}, "key": jax.numpy.arange(3)}
    told = []

    def checkpoints():
        return checkpoint.Checkpoints(bucket.locate(run), 3, told.append, Processes())

    saving = checkpoints()
    for update in (1, 2, 3):
        saving.save(state, checkpoint.Progress(update), None)
    saving.close()
    for name in store.find(f"{run}/checkpoints/2/weights"):
        if "/d/" in name:
            store.pipe_file(name, b"x" * store.size(name))
    # What tells that all was written.
    store.rm_file(f"{run}/checkpoints/3/commit_success.txt")
    resumed = checkpoints()
    restored, progress = resumed.restore(jax.tree.map(lambda x: x + 1, state))
    assert progress.update == 1
    assert bits(restored) == bits(state)
    assert told == [x for x in told if x.startswith("checkpoint 2 is damaged and now")] != []
    assert files(store, f"{run}/damaged_checkpoints") == {"2.0"}
    # The half-written one is out of the way of the next one.
    for update in (2, 3):
        resumed.save(restored, checkpoint.Progress(update), None)
    resumed.close()
    assert files(store, f"{run}/checkpoints") == {"1", "2", "3"}
    assert checkpoints().restore(restored)[1].update == 3


@pytest.mark.slow
def test_kills_change_nothing(store, run, tmp_path):
    """``kill -9`` between rows, each time resumed by the same command."""

    def command(workdir):
        return [
            sys.executable, "-m", "podracer.anakin", "--config=configs/cartpole.py",
            f"--workdir={workdir}", "--config.total_steps=200_000", "--config.checkpoint.every=4",
        ]  # fmt: skip

    subprocess.run(command(tmp_path / "whole"), cwd=ROOT, check=True, capture_output=True)
    for kill in range(4):
        before = len(steps_or_none(run))
        with subprocess.Popen(command(run), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while len(steps_or_none(run)) <= before + kill and process.poll() is None:
                time.sleep(0.1)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    subprocess.run(command(run), cwd=ROOT, check=True, capture_output=True)
    assert timeless(read_rows(run)) == timeless(read_rows(tmp_path / "whole"))


@pytest.mark.slow
# gcsfs gives aiohttp bytes, which is slow where the loop does more than that.
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_trace_ends_in_the_bucket(store, run):
    config = make_config(num_envs=16, total_steps=16 * 8 * 4, cpu_devices=1, num_minibatches=2)
    anakin.train(config, run, quiet=True, profile=1)
    assert any(name.endswith(".xplane.pb") for name in store.find(f"{run}/profile"))
