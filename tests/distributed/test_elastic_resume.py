"""A run that is stopped in one process is saved by all, and resumes on any number of processes."""

import signal
import time

import pytest

from podracer.errors import ExitCode
from tests.distributed.jobs import STEPS_PER_UPDATE, Job, saved_updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("architecture", ["anakin", "sebulba"])
def test_a_signal_to_one_saves_on_all_and_any_number_resumes(architecture, tmp_path):
    def total(updates: int) -> dict[str, int]:
        return {"total_steps": updates * STEPS_PER_UPDATE}

    def check_rows(updates: int) -> None:
        every = [STEPS_PER_UPDATE * (i + 1) for i in range(updates)]
        assert [row["step"] for row in job.rows()] == every

    changes = {**total(100_000), "agent": "dqn", "evaluation.episodes": 2}
    with Job(architecture, 2, tmp_path, **changes) as job:
        job.wait_for_rows(3)
        job.processes[1].send_signal(signal.SIGTERM)
        ended = job.finish()
        assert [code for code, *_ in ended] == [ExitCode.PREEMPTED] * 2, ended
        assert all("stopped by SIGTERM after update" in errors for *_, errors in ended)
    (saved,) = saved_updates(tmp_path)
    assert job.rows()[-1]["step"] == saved * STEPS_PER_UPDATE
    # As many learners as both processes had together.
    alone = {"anakin": {"cpu_devices": 4}, "sebulba": {"cpu_devices": 3}}[architecture]
    alone |= {"sebulba.actor_devices": "(0,)", "agent": "dqn"}
    refills = architecture == "sebulba"
    alone |= {"checkpoint.replay": not refills}
    with Job(architecture, 1, tmp_path, **total(saved + 2), **alone) as job:
        job.succeed()
    check_rows(saved + 2)
    assert saved_updates(tmp_path) == [saved, saved + 2]
    with Job(architecture, 2, tmp_path, agent="dqn", **total(saved + 4)) as job:
        assert ("the replay was not saved and refills" in job.succeed()) == refills
    check_rows(saved + 4)


def test_ctrl_c_to_one_after_the_other_saves_on_all(tmp_path):
    with Job("anakin", 2, tmp_path, total_steps=10**9) as job:
        job.wait_for_rows(2)
        job.processes[1].send_signal(signal.SIGINT)
        # As a scheduler does: the other process has learned of the signal by then, and saves.
        time.sleep(0.1)
        job.processes[0].send_signal(signal.SIGINT)
        ended = job.finish()
    assert [code for code, *_ in ended] == [ExitCode.INTERRUPTED] * 2, ended
    assert job.rows()[-1]["step"] == saved_updates(tmp_path)[-1] * STEPS_PER_UPDATE
