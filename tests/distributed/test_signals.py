"""Signals end a process that waits inside C++, where Python handles none."""

import pathlib
import signal
import subprocess
import time

import pytest

from podracer.errors import ExitCode
from tests.distributed.jobs import start

WAITS_IN_C = """
import ctypes, signal, threading
from podracer.distributed.signals import StopSignals, exit_on_signal
lock, libc = (ctypes.c_char * 64)(), ctypes.CDLL(None)
before = signal.set_wakeup_fd(-1)
with exit_on_signal(2, lambda number: 128 + number):
    pass
assert signal.set_wakeup_fd(-1) == before
assert threading.active_count() == 1
with exit_on_signal(2, lambda number: 128 + number), StopSignals():
    print("waits", flush=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""


def wait_for_status(pid: int, name: str, value: str) -> None:
    """Waits until a line of /proc/PID/status has this first word."""
    status = pathlib.Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + 60
    while True:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if lines[name].split()[0] == value:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_signal_ends_a_process_that_waits_in_c():
    with start("-c", WAITS_IN_C) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            wait_for_status(process.pid, "State", "S")
            process.send_signal(signal.SIGTERM)
            # Signals that are pending together may arrive in any order.
            wait_for_status(process.pid, "ShdPnd", "0" * 16)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.INTERRUPTED
        finally:
            process.kill()
