"""Small runs that stop and are resumed, and what tests compare of them."""

import functools
import json
import os
import pathlib
import shutil
import signal
import tempfile

import jax
import numpy as np
from etils import epath

from podracer import anakin, errors
from podracer.storage import checkpoint_files
from podracer.training.loop import Result
from podracer.training.session import Session
from tests.helpers import make_config

# An agent with a prioritised replay, which is full after four of the ten updates.
REPLAY = {
    "agent": "dqn",
    "replay__capacity": 16 * 8 * 4,
    "replay__begin": 200,
    "replay__batch": 16,
    "replay__gradient_steps": 2,
    "replay__priority_exponent": 0.6,
    "dqn__target_period": 5,
}
# Its replay holds memories and the actor's values as well.
R2D2 = {
    **REPLAY,
    "agent": "r2d2",
    "network__core": "lstm",
    "r2d2__burn_in": 4,
    "r2d2__trace": 8,
    "r2d2__target_period": 5,
}
# A share of each batch is searched again, with keys of its own.
MUZERO = {
    **REPLAY,
    "agent": "muzero",
    "muzero__unroll": 2,
    "muzero__n_step": 3,
    "muzero__reanalyze": 0.5,
    "muzero__entropy__start": 0.5,
    "muzero__target_period": 5,
    "muzero__search__policy": "muzero",
    "muzero__search__simulations": 4,
    "muzero__search__temperature_steps": 1000,
}
# It searches in the environment's own states.
ALPHAZERO = {"agent": "alphazero", "alphazero__search__simulations": 4}
# So near a target that the coefficient of the penalty rises.
PENALTY = {"ppo__objective": "kl_penalty", "ppo__target_kl": 1e-9, "num_epochs": 2}
# Two optimizers, and target networks that move a little.
D4PG = {
    **REPLAY,
    "agent": "d4pg",
    "env": "gymnax:Pendulum-v1",
    "d4pg__policy_hidden": (16,),
    "d4pg__critic_hidden": (16,),
    "d4pg__target_rate": 0.1,
}


def resumable(**changes):
    """Ten updates, a row and a checkpoint after each, an evaluation after every fourth."""
    return make_config(
        **{
            "num_envs": 16,
            "cpu_devices": 2,
            "total_steps": 16 * 8 * 10,
            "evaluation__every": 4,
            "checkpoint__every": 1,
            # Then programs do not depend on a run's length, so each is compiled only once.
            "anneal": False,
            **changes,
        }
    )


@functools.cache
def _finished() -> tuple[tempfile.TemporaryDirectory, Result]:
    folder = tempfile.TemporaryDirectory(prefix="podracer-tests-")
    return folder, anakin.train(resumable(), f"{folder.name}/run", quiet=True)


def finished_run(workdir: pathlib.Path) -> Result:
    """Makes a workdir with the finished run of ``resumable()``, which is trained only once."""
    folder, result = _finished()
    shutil.copytree(f"{folder.name}/run", workdir)
    return result


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


def without_times(rows):
    """Rows of metrics without measured times."""
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows]


class Stops:
    """Sends a signal to a run after certain updates, one at each start."""

    def __init__(self, monkeypatch, *updates, by=signal.SIGTERM):
        self._left = list(updates)
        profile = Session.profile

        def stop(session, state, update):
            if self._left and update >= self._left[0]:
                self._left.pop(0)
                # Recorded now; the run stops after the next call.
                os.kill(os.getpid(), by)
            return profile(session, state, update)

        monkeypatch.setattr(Session, "profile", stop)


def until_done(train, run, workdir) -> tuple:
    """Starts a run again and again; its result, and how often it stopped."""
    for stops in range(20):
        try:
            return train(run, workdir, quiet=True), stops
        except errors.PreemptedError:
            continue
    raise AssertionError("never done")


def last_arrays(workdir) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint."""
    folder = epath.Path(workdir) / checkpoint_files.FOLDER
    with checkpoint_files.open_manager(folder, writes=False) as manager:
        found = manager.restore(manager.latest_step())
    return {
        f"{item}/{name}": np.asarray(x)
        for item in (checkpoint_files.WEIGHTS, checkpoint_files.REPLAY, checkpoint_files.REST)
        for name, x in (found.get(item) or {}).items()
    }


def rows_of(workdir) -> list[dict]:
    file = workdir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
