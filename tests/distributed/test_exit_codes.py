"""Exit codes of the command after faults of the machine, in one process."""

import errno
import threading

import jax
import pytest
from orbax.checkpoint import future

from podracer import anakin, errors
from podracer.errors import DriftError, ExitCode
from podracer.training import command_line
from podracer.training.session import Session
from tests.distributed.jobs import SHUFFLED, flags, saved_updates


def run(tmp_path, **changes) -> int:
    """Trains by the command line with the same program as test_two_processes.py, so that it is
    compiled once."""
    argv = ["anakin", *flags("anakin", tmp_path, **SHUFFLED, cpu_devices=4, **changes), "--quiet"]
    return command_line.main(anakin.train, argv)


def test_a_bug_ends_in_exit_code_1(tmp_path, monkeypatch, capsys):
    def begin(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Session, "begin", begin)
    assert run(tmp_path) == ExitCode.CRASHED == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("ZeroDivisionError: a bug\nSee docs/troubleshooting.md#a-crash\n")


@pytest.mark.slow
def test_a_full_disk_ends_in_exit_code_5(tmp_path, monkeypatch, capsys):
    original, waiting = future.ChainedFuture.result, threading.local()

    def result(*arguments, **options):
        # Futures contain others. Only the outermost one fails, when all of them have ended, so that
        # nothing is still being written when the next save cleans up.
        outermost = not getattr(waiting, "inside", False)
        waiting.inside = True
        original(*arguments, **options)
        if outermost:
            waiting.inside = False
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(future.ChainedFuture, "result", result)
    assert run(tmp_path) == ExitCode.NOT_SAVED == 5
    error = capsys.readouterr().err
    assert error.startswith("error: the last checkpoint could not be written: No space left")
    assert "No space left on device" in error


def test_a_defective_device_ends_in_exit_code_6(tmp_path, monkeypatch, capsys):
    restore = Session.restore

    def drifting(session, *arguments):
        state, progress = restore(session, *arguments)

        def spoil(x):
            parts = [s.data + (1.0 if s.device.id == 2 else 0.0) for s in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

        weights = jax.tree.map(spoil, state.train.weights)
        return state.replace(train=state.train.replace(weights=weights)), progress

    monkeypatch.setattr(Session, "restore", drifting)
    assert run(tmp_path, **{"hosts.drift_every": 2}) == ExitCode.DRIFTED == 6
    error = capsys.readouterr().err
    assert "after update 2 not all devices hold the same weights: cpu:2 of process 0" in error
    assert "differ from 3 of 4" in error
    # Nothing that has drifted was saved.
    assert saved_updates(tmp_path) == []


def test_only_our_own_errors_have_a_code():
    class HttpError(Exception):
        code = 404

    assert errors.code_of(None) == ExitCode.OK
    assert errors.code_of(HttpError()) == ExitCode.CRASHED
    assert errors.code_of(KeyboardInterrupt()) == ExitCode.INTERRUPTED
    assert errors.code_of(DriftError()) == ExitCode.DRIFTED


@pytest.fixture(autouse=True)
def eight_devices():
    """JAX runs before a test asks for fewer devices."""
    assert len(jax.devices()) == 8
