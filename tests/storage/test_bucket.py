"""Workdirs in a bucket, with an emulator of Google Cloud Storage: they behave as folders do."""

import asyncio
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

import aiohttp
import fsspec
import gcsfs.retry
import google.cloud.storage
import jax
import pytest
import tenacity
from gcp_storage_emulator.server import create_server
from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from podracer import anakin, errors, look, plot
from podracer.distributed.processes import Processes
from podracer.storage import bucket, checkpoint, retry
from podracer.storage.workdir import CONFIG, METRICS, Workdir, read_rows
from podracer.training import saved_run
from tests.helpers import make_config
from tests.training.resuming import Stops, bits, resumable, without_times

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store():
    """An empty store with a bucket, which all clients of this process and its children use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
        patch.setenv("TENSORSTORE_GCS_HTTP_VERSION", "1.1")
        # No client looks for Google's metadata server or uses gRPC, which the emulator lacks.
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
            bucket.locate("gs://bucket/any")
            yield fsspec.filesystem("gcs")


@pytest.fixture
def run(store, request):
    """The path of a workdir that does not exist yet."""
    return f"gs://bucket/{request.node.originalname}"


@pytest.fixture(autouse=True)
def _local(tmp_path, monkeypatch):
    """Local folders that killed runs leave are deleted with the test's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def kill(workdir) -> None:
    """Releases a workdir as the end of its process does."""
    workdir._metrics.close()
    workdir._lock.close()


def files(store, path) -> set[str]:
    """The names in a folder, including those of folders."""
    return {name.rpartition("/")[2] for name in store.ls(path, detail=False)}


def row(step):
    return {"step": step, "wall_time": step / 2, "loss/total": math.nan}


def begin(path, logged=None, **options):
    """A workdir as a run opens it."""
    log = [].append if logged is None else logged.append
    workdir = Workdir(path, **{"restart": False, "log": log, **options})
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
    # The rows up to the last checkpoint are there.
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


def test_rows_are_copied_from_time_to_time(run, monkeypatch):
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


def test_the_process_that_started_last_holds_the_workdir(run):
    logged = []
    first = begin(run)
    first.append(row(10))
    first.sync()
    second = begin(run, logged)
    assert "was held by" in logged[0]
    assert f"process {os.getpid()}" in logged[0]
    with pytest.raises(errors.DisplacedError, match="now belongs to another run"):
        first.sync()
    second.append(row(20))
    first.close()
    second.close()
    assert steps(run) == [10, 20]


def test_a_rejected_start_does_not_take_the_workdir_over(run):
    first = begin(run)
    rejected = Workdir(run, restart=False, log=pytest.fail)
    rejected.close()
    assert not first.sync()
    first.close()


def test_a_workdir_that_is_deleted_during_the_run_is_copied_again(store, run):
    workdir = begin(run)
    workdir.append(row(10))
    workdir.sync()
    store.rm(run, recursive=True)
    assert workdir.sync()
    assert files(store, run) == {CONFIG, METRICS, bucket.LOCK}
    workdir.close()


def test_a_folder_that_was_listed_shows_what_others_write_later(run):
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
    logged = []
    again = begin(run, logged, restart=True)
    assert logged == [f"the earlier run in {run} was moved to {run}.1"]
    assert again.config is None
    again.append(row(20))
    again.close()
    assert steps(f"{run}.1") == [10]
    assert steps(run) == [20]
    assert store.cat_file(f"{run}.1/checkpoints/1/weights/d/x") == b"1"
    assert "checkpoints" not in files(store, run)


def test_files_that_can_not_be_copied_are_kept_and_logged(run, monkeypatch):
    logged = []
    workdir = begin(run, logged)

    def fail(*arguments):
        raise ConnectionError("network is down")

    monkeypatch.setattr(workdir._mirror._files, "put_file", fail, raising=False)
    monkeypatch.setattr(workdir._mirror, "_due", 0.0)
    workdir.append(row(10))
    with pytest.raises(errors.TransientError, match="written: ConnectionError: network is down"):
        workdir.sync()
    workdir.close()
    assert len(logged) == 2
    assert "is not up to date, training continues: ConnectionError: network is down" in logged[0]
    assert str(workdir.local) in logged[1]
    assert json.loads((workdir.local / METRICS).read_text())["step"] == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/run", "must be a folder or gs://BUCKET/FOLDER"),
        ("gs://bucket", "must be a folder or gs://BUCKET/FOLDER"),
        ("gs://nobucket/run", "is not writable: .*nobucket"),
    ],
)
def test_impossible_paths_are_rejected(path, message, store):
    with pytest.raises(errors.ConfigError, match=message):
        begin(path)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (api_exceptions.Forbidden("no storage.buckets.get"), errors.ConfigError),
        (api_exceptions.ServiceUnavailable("503"), errors.TransientError),
        (auth_exceptions.TransportError("no metadata server"), errors.TransientError),
    ],
    ids=repr,
)
def test_errors_at_the_start_are_final_only_if_the_user_must_act(error, expected, run, monkeypatch):
    """Orbax reads the bucket's properties, which needs a permission that writing does not."""

    def fail(self, name):
        raise error

    monkeypatch.setattr(retry, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(google.cloud.storage.Client, "get_bucket", fail)
    with pytest.raises(expected, match=f"is not writable: .*{error.args[0]}"):
        begin(run)


def test_an_error_that_gcsfs_raises_is_not_logged_as_well(store, caplog):
    async def fail():
        raise aiohttp.ClientError("no route to host")

    with pytest.raises(aiohttp.ClientError, match="no route"):
        asyncio.run(gcsfs.retry.retry_request(retries=1)(fail)())
    assert not caplog.records


def test_a_slash_that_pathlib_removes_is_restored(store):
    assert str(bucket.locate(Path("gs://bucket/a/b"))) == "gs://bucket/a/b"


@pytest.mark.parametrize("package", ["gcsfs", "google.cloud.storage"])
def test_a_missing_package_is_named_before_anything_starts(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for options in ({"workdir": "gs://bucket/run"}, {"init_from": "gs://bucket/run"}):
        with pytest.raises(errors.ConfigError, match=r"pip install -e '\.\[gcs\]'"):
            anakin.train(make_config(), quiet=True, **options)


@pytest.mark.slow
def test_a_run_in_a_bucket_equals_one_in_a_folder(store, run, tmp_path, monkeypatch, capsys):
    # Other tests compile these programs as well.
    config = resumable(evaluation__every=0, checkpoint__every=0)
    whole = anakin.train(config, tmp_path / "whole", quiet=True)
    Stops(monkeypatch, 2)
    with pytest.raises(errors.PreemptedError):
        anakin.train(config, run, quiet=True)
    assert steps(run) == [128, 256, 384]
    assert files(store, f"{run}/checkpoints") == {"3"}
    result = anakin.train(config, run, quiet=True)
    assert bits(result.weights) == bits(whole.weights)
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert without_times(read_rows(run)) == without_times(whole.metrics)
    assert files(store, run) == {
        CONFIG, METRICS, "summary.json", "learning_curve.png", "checkpoints", "tensorboard",
    }  # fmt: skip
    for command in (look, plot):
        assert command.main([run, f"--out={tmp_path / 'x.svg'}"]) == 0
    evaluated = saved_run.evaluate(run)
    assert evaluated["return_mean"] == result.summary["eval_return_mean"]
    store.get(f"{run}/tensorboard", str(tmp_path / "events"), recursive=True)
    events = EventAccumulator(str(tmp_path / "events")).Reload().Scalars("loss/total")
    assert [event.step for event in events] == [row["step"] for row in whole.metrics]
    # As for --init_from and podracer.evaluate.
    like = jax.eval_shape(lambda: result.weights)
    for which in ("last", "best"):
        weights, update = checkpoint.load_weights(run, which, like)
        assert update == 10
        assert bits(weights) == bits(result.weights)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_damaged_and_incomplete_checkpoints_are_skipped(store, run):
    state = {"train": {"weights": {"a": jax.numpy.arange(12.0)}}, "key": jax.numpy.arange(3)}
    logged = []

    def checkpoints():
        return checkpoint.Checkpoints(bucket.locate(run), 3, logged.append, Processes())

    saving = checkpoints()
    for update in (1, 2, 3):
        saving.save(state, checkpoint.Progress(update), None)
    saving.close()
    for name in store.find(f"{run}/checkpoints/2/weights"):
        if "/d/" in name:
            store.pipe_file(name, b"x" * store.size(name))
    # Its absence marks an incomplete checkpoint.
    store.rm_file(f"{run}/checkpoints/3/commit_success.txt")
    resumed = checkpoints()
    restored, progress = resumed.restore(jax.tree.map(lambda x: x + 1, state))
    assert progress.update == 1
    assert bits(restored) == bits(state)
    assert logged == [x for x in logged if x.startswith("checkpoint 2 is damaged (")] != []
    assert files(store, f"{run}/damaged_checkpoints") == {"2.0"}
    # The incomplete one does not keep the next one from being written.
    for update in (2, 3):
        resumed.save(restored, checkpoint.Progress(update), None)
    resumed.close()
    assert files(store, f"{run}/checkpoints") == {"1", "2", "3"}
    assert checkpoints().restore(restored)[1].update == 3


@pytest.mark.weekly
def test_kills_change_nothing(store, run, tmp_path):
    """``kill -9`` between rows, each time resumed by the same command, with a replay."""

    def command(workdir):
        return [
            sys.executable, "-m", "podracer.anakin", "--config=configs/cartpole_dqn.py",
            f"--workdir={workdir}", "--config.total_steps=15_000", "--config.checkpoint.every=8",
        ]  # fmt: skip

    subprocess.run(command(tmp_path / "whole"), cwd=ROOT, check=True, capture_output=True)
    for kill in range(2):
        before = len(steps_or_none(run))
        with subprocess.Popen(command(run), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while len(steps_or_none(run)) <= before + kill and process.poll() is None:
                time.sleep(0.1)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    subprocess.run(command(run), cwd=ROOT, check=True, capture_output=True)
    assert without_times(read_rows(run)) == without_times(read_rows(tmp_path / "whole"))


@pytest.mark.slow
# gcsfs gives aiohttp bytes, which is slow where the loop does more than that.
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_trace_ends_in_the_bucket(store, run):
    config = make_config(num_envs=16, total_steps=16 * 8 * 4, cpu_devices=1, num_minibatches=2)
    anakin.train(config, run, quiet=True, profile=1)
    assert any(name.endswith(".xplane.pb") for name in store.find(f"{run}/profile"))
