"""Workdirs in folders: locks, files that survive a power failure, and errors at the start."""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import pathlib

import pytest
import tenacity
from etils import epath

from podracer.agents.dqn import Config as DQNConfig
from podracer.config import Config
from podracer.errors import ConfigError, SaveError, TransientError
from podracer.storage import bucket, retry
from podracer.storage.compatibility import check_same_run
from podracer.storage.workdir import CHECKPOINTS, CONFIG, METRICS, Workdir
from tests.helpers import make_config


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(retry, "WAIT", tenacity.wait_none())


def row(step):
    return {"step": step, "wall_time": step / 2}


def opened(path, logged=None, **options):
    log = [].append if logged is None else logged.append
    return contextlib.closing(Workdir(path, **{"restart": False, "log": log, **options}))


def written(path):
    """A workdir with a config, a row and a folder for checkpoints."""
    with opened(path) as workdir:
        workdir.make_folder(CHECKPOINTS)
        workdir.dump(CONFIG, {"architecture": "anakin", "config": {"seed": 0}, "sizes": {}})
        workdir.append(row(10))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_warning(number, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    logged = []
    with opened(tmp_path / "run", logged) as workdir:
        workdir.append(row(10))
    (line,) = logged
    assert f"has no locks ({os.strerror(number)})" in line


def failing(monkeypatch, error, times):
    """Makes locks fail a number of times."""
    flock, left = fcntl.flock, [times]

    def fail(*arguments):
        if left[0]:
            left[0] -= 1
            raise error
        return flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", fail)


STALE = OSError(errno.ESTALE, "Stale file handle")


def test_a_transient_error_at_the_start_is_retried(tmp_path, monkeypatch):
    failing(monkeypatch, STALE, 2)
    logged = []
    with opened(tmp_path / "run", logged):
        pass
    assert len(logged) == 2


def test_a_lasting_transient_error_at_the_start_can_be_tried_again_later(tmp_path, monkeypatch):
    failing(monkeypatch, STALE, 1000)
    with pytest.raises(TransientError, match="is not writable: Stale file handle"):
        Workdir(tmp_path / "run", restart=False, log=[].append)


def test_a_missing_permission_is_a_config_error(tmp_path, monkeypatch):
    failing(monkeypatch, PermissionError(errno.EACCES, "Permission denied"), 1000)
    with pytest.raises(ConfigError, match="is not writable: Permission denied; specify another"):
        Workdir(tmp_path / "run", restart=False, log=[].append)


def test_a_file_in_place_of_the_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not writable: "):
        Workdir(tmp_path / "file" / "run", restart=False, log=[].append)


def test_an_error_does_not_hide_an_earlier_run(tmp_path, monkeypatch):
    """A config that can't be read at present is not taken for one that does not exist."""
    written(tmp_path / "run")
    stat = os.stat

    def fail(path, *arguments, **options):
        if pathlib.Path(path).name == CONFIG:
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(TransientError, match="can't be read: Input/output error"):
        Workdir(tmp_path / "run", restart=False, log=[].append)


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, SaveError), (errno.EIO, TransientError)]
)
def test_an_error_in_a_save_keeps_its_kind(number, expected, tmp_path, monkeypatch):
    with opened(tmp_path / "run") as workdir:

        def fsync(_):
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(expected, match=f"can't be written: {os.strerror(number)}"):
                workdir.sync()


def test_a_file_is_durable_before_it_replaces_another(tmp_path, monkeypatch):
    """A power failure must leave the old content or the new one, and never an empty file."""
    path = epath.Path(tmp_path / CONFIG)
    path.write_text("old")
    synced, fsync = [], os.fsync

    def record(descriptor):
        fsync(descriptor)
        target = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((target, target.is_file() and target.read_text(), path.read_text()))

    monkeypatch.setattr(os, "fsync", record)
    bucket.write(path, "new")
    assert path.read_text() == "new"
    assert synced == [(tmp_path / f".{CONFIG}.tmp", "new", "old"), (tmp_path, False, "new")]


@pytest.mark.parametrize("content", [b"", b'{"architecture": "ana', b"\0" * 100, b"\xff\xff"])
def test_a_damaged_config_does_not_block_a_resume(content, tmp_path):
    written(tmp_path / "run")
    (tmp_path / "run" / CONFIG).write_bytes(content)
    logged = []
    with opened(tmp_path / "run", logged) as workdir:
        assert workdir.config is None
        assert [each["step"] for each in workdir.rows] == [10]
        workdir.dump(CONFIG, {"architecture": "anakin", "config": {"seed": 1}, "sizes": {}})
    (line,) = logged
    assert "is damaged (" in line
    assert "resumed with the settings of this command" in line
    assert (tmp_path / "run" / f"{CONFIG}.damaged").read_bytes() == content
    with opened(tmp_path / "run") as workdir:
        assert workdir.config == {"architecture": "anakin", "seed": 1}


def test_a_damaged_config_without_checkpoints_is_rejected(tmp_path):
    """The folder may be anything: nothing in it is renamed."""
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match=r"is damaged .* delete it, or specify another --workdir"):
        Workdir(tmp_path, restart=False, log=[].append)
    assert (tmp_path / CONFIG).read_text() == "{"


def test_damaged_rows_do_not_block_a_resume(tmp_path):
    written(tmp_path / "run")
    good = (tmp_path / "run" / METRICS).read_text()
    damaged = good + "\0\0\0\n" + good.replace("10", "20") + '{"step": 3'
    (tmp_path / "run" / METRICS).write_text(damaged)
    logged = []
    with opened(tmp_path / "run", logged) as workdir:
        workdir.append(row(30))
        assert [each["step"] for each in workdir.rows] == [10, 20, 30]
    assert "is damaged (line 2 is not JSON; 1 lines in all)" in logged[0]
    assert (tmp_path / "run" / f"{METRICS}.damaged").read_text() == damaged
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30]


def test_a_run_from_before_a_setting_existed_had_its_default():
    now = {"architecture": "anakin", **dataclasses.asdict(make_config())}
    before = {key: x for key, x in now.items() if key not in ("replay", "observed")}
    check = functools.partial(
        check_same_run, defaults=dataclasses.asdict(Config()), fixed=DQNConfig.fixed
    )
    assert check(before, now) == []
    with pytest.raises(ConfigError, match=r"observed=\[\], not \[0\], which can't change"):
        check(before, {**now, "observed": (0,)})
    with pytest.raises(ConfigError, match=r"lpg\.units=32, not 8"):
        check(before, {**now, "lpg": {**now["lpg"], "units": 8}})
    with pytest.raises(ConfigError, match=r"replay\.batch=256, not 128"):
        check(before, {**now, "replay": {**now["replay"], "batch": 128}})
    with pytest.raises(ConfigError, match=r"dqn\.dueling=False, not True"):
        check(before, {**now, "dqn": {**now["dqn"], "dueling": True}})
    # Settings of other agents don't matter.
    assert len(check(now, {**now, "d4pg": {**now["d4pg"], "atoms": 7}})) == 1
    lines = check(now, {**now, "dqn": {**now["dqn"], "target_period": 7}})
    assert lines == ["dqn.target_period was 500 and is now 7"]
