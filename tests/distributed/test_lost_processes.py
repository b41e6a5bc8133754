"""The other processes report one that is killed, hangs or fails, and end."""

import signal
import time

import pytest

from podracer.errors import ExitCode
from tests.distributed.jobs import LONG_S, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("how", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 2)])
def test_a_lost_process_is_named(how, victim, tmp_path):
    changes = {"total_steps": 24 * 8 * 1_000_000, "hosts.timeout_s": 15.0, "num_envs": 24}
    with Job("anakin", 3, tmp_path, **changes) as job:
        job.wait_for_rows(3)
        # Each process publishes its state every tenth of the limit.
        time.sleep(4)
        job.processes[victim].send_signal(how)
        others = [p for number, p in enumerate(job.processes) if number != victim]
        for process in others:
            _, errors = process.communicate(timeout=LONG_S)
            assert process.returncode == ExitCode.STALLED, errors
            first = errors[errors.index("error: ") :].splitlines()[0]
            assert f"process {victim} " in first
            assert not any(f"process {i} " in first for i in {0, 1, 2} - {victim})
            # The last state of each process, and the stack of this one.
            assert sum("): step " in line for line in errors.splitlines()) == 3
            assert "podracer/training/loop.py" in errors
        if how == signal.SIGSTOP:
            job.processes[victim].send_signal(signal.SIGCONT)
            job.processes[victim].communicate(timeout=LONG_S)
            assert job.processes[victim].returncode == ExitCode.STALLED


def test_a_failure_of_one_ends_all_with_its_code(tmp_path):
    # Another run holds the workdir, which only process 0 notices.
    (tmp_path / "run").mkdir()
    with Job("anakin", 1, tmp_path / "run", total_steps=10**9) as holder:
        holder.wait_for_rows(1)
        with Job("anakin", 2, tmp_path / "run", **{"hosts.timeout_s": 20.0}) as job:
            ended = job.finish()
    assert [code for code, *_ in ended] == [ExitCode.CONFIG] * 2
    assert "process 0" in ended[1][2]
    assert "belongs to a run that is still running" in ended[1][2]
