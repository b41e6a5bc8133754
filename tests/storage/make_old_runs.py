"""Makes runs that later versions must be able to use: ``python -m tests.storage.make_old_runs``.

It is run after each release of a new minor version, see docs/releases.md. Each run becomes a small
archive in ``old_runs``, with everything of the workdir that another version reads.
"""

import pathlib
import tarfile
import tempfile
from typing import Any

import podracer

FOLDER = pathlib.Path(__file__).parent / "old_runs"
SAME = {
    "env": "gymnax:CartPole-v1",
    "network": {"hidden": (16,)},
    "normalize_observations": True,
    "cpu_devices": 1,
    "evaluation": {"episodes": 16},
    "checkpoint": {"keep": 1},
}
# One with the contents of a replay buffer and one without.
RUNS: dict[str, dict[str, Any]] = {
    "dqn": {
        **SAME,
        "agent": "dqn",
        "num_envs": 16,
        "unroll_length": 8,
        "total_steps": 16 * 8 * 240,
        "updates_per_call": 8,
        "replay": {
            "capacity": 2048,
            "begin": 1024,
            "batch": 64,
            "gradient_steps": 16,
            "priority_exponent": 0.6,
        },
        "learning_rate": 3e-3,
        "dqn": {"epsilon_alpha": 2.0},
    },
    "ppo": {
        **SAME,
        "agent": "ppo",
        "num_envs": 16,
        "unroll_length": 32,
        "total_steps": 16 * 32 * 30,
        "learning_rate": 1e-2,
    },
}
KEPT = ("config.json", "metrics.jsonl", "checkpoints")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            podracer.train(**settings, workdir=f"{folder}/run")
            with tarfile.open(FOLDER / f"{name}.tar.gz", "w:gz") as archive:
                for part in KEPT:
                    archive.add(f"{folder}/run/{part}", f"run/{part}")


if __name__ == "__main__":
    main()
