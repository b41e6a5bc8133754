"""A whole run by its command."""

import json

from podracer.errors import ExitCode
from podracer.sebulba import trainer
from podracer.training import command_line
from tests.helpers import ROOT


def test_a_run_writes_the_same_files_as_anakin(tmp_path, capsys):
    argv = [
        "sebulba",
        f"--config={ROOT}/configs/cartpole.py",
        "--config.env=envpool:CartPole-v1",
        "--config.env_kwargs.max_episode_steps=50",
        "--config.total_steps=4000",
        "--config.num_envs=8",
        "--config.unroll_length=16",
        "--config.evaluation.every=16",
        f"--workdir={tmp_path}/run",
    ]
    assert command_line.main(trainer.train, argv) == ExitCode.OK
    out = capsys.readouterr().out
    assert "actors         devices [0] (cpu), 2 threads each, lag 1" in out
    assert "learners       devices [0]" in out
    assert "where the time went" in out
    config, summary = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text())
        for name in ("config", "summary")
    )
    assert config["config"]["env_kwargs"] == {"max_episode_steps": 50}
    assert {"env_steps", "eval_return_mean", "seed", "breakdown", "report"} <= summary.keys()
    assert summary["env_steps"] == 4096
    assert 0 < summary["eval_return_mean"] <= 50
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    assert [row["step"] for row in rows] == [128 * (n + 1) for n in range(32)]
    assert [row["step"] for row in rows if "eval/episode_return" in row] == [2048, 4096]
    for name in ("environment", "inference", "transfer", "wait", "pause"):
        assert rows[-1][f"time/actor_{name}"] >= 0
    for name in ("learner_wait", "learner_update", "learner_publish", "steps_per_second"):
        assert rows[-1][f"time/{name}"] > 0
    episode_returns = [row["train/episode_return"] for row in rows if "train/episode_return" in row]
    assert episode_returns
    assert max(episode_returns) <= 50
