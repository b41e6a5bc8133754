"""Runs that stop for any reason and go on: what is exact, what may change, what goes wrong."""

import gc
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from podracer import anakin, checkpoint, cli, errors, sebulba
from podracer.session import Session
from tests.helpers import make_config

ROOT = Path(__file__).parent.parent
CARTPOLE = str(ROOT / "configs" / "cartpole.py")


def resumable(**changes):
    """Ten updates, a row and a checkpoint after each, an evaluation after every fourth."""
    return make_config(
        **{
            "num_envs": 16,
            "cpu_devices": 2,
            "total_steps": 16 * 8 * 10,
            "evaluation__every": 4,
            "checkpoint__every": 1,
            # By this no program knows how long a run is: each is compiled once.
            "anneal": False,
            **changes,
        }
    )


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


def timeless(rows):
    """Rows without what a clock says."""
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows]


class Stops:
    """Has a run asked to end after certain updates, one at each start."""

    def __init__(self, monkeypatch, *updates, by=signal.SIGTERM):
        self._left = list(updates)
        save_due = Session.save_due

        def stopping(session, before, after):
            if self._left and after >= self._left[0]:
                self._left.pop(0)
                # Noted now, obeyed after the next call.
                os.kill(os.getpid(), by)
            return save_due(session, before, after)

        monkeypatch.setattr(Session, "save_due", stopping)


def until_done(train, run, workdir) -> tuple:
    """Starts a run again and again; its result, and how often it stopped."""
    for stops in range(20):
        try:
            return train(run, workdir, quiet=True), stops
        except errors.PreemptedError:
            continue
    raise AssertionError("never done")


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_devices": 8, "normalize_observations": True},
        pytest.param(
            {"agent": "vtrace", "network__core": "gru", "normalize_observations": True},
            marks=pytest.mark.slow,
        ),
        pytest.param({"normalize_rewards": True, "cpu_devices": 1}, marks=pytest.mark.slow),
        pytest.param({"agent": "vtrace", "cpu_devices": 8}, marks=pytest.mark.slow),
        pytest.param({"network__core": "lstm", "stagger": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stopped_and_resumed_is_never_stopped(changes, tmp_path, monkeypatch):
    run = resumable(num_minibatches=2, anneal=True, **changes)
    whole = anakin.train(run, tmp_path / "whole", quiet=True)
    Stops(monkeypatch, 1, 3, 6)
    parts, stops = until_done(anakin.train, run, tmp_path / "parts")
    assert stops == 3
    assert bits(parts.weights) == bits(whole.weights)
    assert timeless(parts.metrics) == timeless(whole.metrics)
    # All of the state: optimizer, environments, memory, keys.
    states = [last_arrays(tmp_path / name) for name in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[1][name], err_msg=name)
    seconds = [row["wall_time"] for row in parts.metrics]
    assert seconds == sorted(seconds)
    rows = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [128 * (i + 1) for i in range(10)]


def last_arrays(workdir) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint."""
    manager = checkpoint._manager(checkpoint.epath.Path(workdir) / checkpoint.FOLDER, 1)
    found = manager.restore(manager.latest_step())
    return {
        f"{item}/{name}": np.asarray(x)
        for item in (checkpoint.WEIGHTS, checkpoint.REST)
        for name, x in found[item].items()
    }


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = anakin.train(resumable(), tmp_path / "run", quiet=True)
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(first.weights)
    assert again.metrics == first.metrics
    # A longer one goes on; that the curve anneals otherwise is the user's wish.
    longer = anakin.train(resumable(total_steps=16 * 8 * 12), tmp_path / "run", quiet=True)
    assert longer.metrics[:10] == first.metrics
    assert longer.summary["env_steps"] == 16 * 8 * 12


def test_a_run_that_is_made_shorter_is_judged_where_it_stands(tmp_path, monkeypatch):
    Stops(monkeypatch, 4)
    with pytest.raises(errors.PreemptedError):
        anakin.train(resumable(), tmp_path / "run", quiet=True)
    result = anakin.train(resumable(total_steps=16 * 8 * 3), tmp_path / "run", quiet=True)
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(5)]
    assert result.summary["eval_return_mean"] == result.metrics[-1]["eval/episode_return"]
    assert timeless(rows_of(tmp_path / "run")) == timeless(result.metrics)


def test_an_interrupt_before_an_evaluation_leaves_it_to_the_next_start(tmp_path, monkeypatch):
    run = resumable()
    whole = anakin.train(run, tmp_path / "whole", quiet=True)
    # The fourth and the last call end with an evaluation: the signal finds it due.
    Stops(monkeypatch, 3, 9)
    parts, stops = until_done(anakin.train, run, tmp_path / "parts")
    assert stops == 2
    assert timeless(parts.metrics) == timeless(whole.metrics)
    assert bits(parts.weights) == bits(whole.weights)
    rows = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 10


def test_ctrl_c_saves_too(tmp_path, monkeypatch):
    Stops(monkeypatch, 5, by=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        anakin.train(resumable(checkpoint__every=0), tmp_path / "run", quiet=True)
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert 6 in steps
    # Handlers are what they were.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("devices", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_other_numbers_of_devices_go_on(devices, tmp_path, monkeypatch):
    run = resumable()
    whole = anakin.train(run, None, quiet=True)
    Stops(monkeypatch, 4)
    with pytest.raises(errors.PreemptedError):
        anakin.train(run, tmp_path / "run", quiet=True)
    result = anakin.train(resumable(cpu_devices=devices), tmp_path / "run", quiet=True)
    for a, b in zip(jax.tree.leaves(result.weights), jax.tree.leaves(whole.weights), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_number_of_devices_that_does_not_divide_is_refused(tmp_path):
    anakin.train(resumable(), tmp_path / "run", quiet=True)
    with pytest.raises(
        errors.ConfigError, match=r"num_envs=16 .* 3 devices; 15 would.* 1, 2, 4, 8"
    ):
        anakin.train(resumable(cpu_devices=3), tmp_path / "run", quiet=True)


def test_what_may_change_is_told_and_what_may_not_is_refused(tmp_path, capsys):
    anakin.train(resumable(), tmp_path / "run", quiet=True)
    anakin.train(resumable(learning_rate=1e-3, total_steps=16 * 8 * 11), tmp_path / "run")
    out = capsys.readouterr().out
    assert "learning_rate was 0.00025 and is now 0.001" in out
    assert "total_steps was 1280 and is now 1408" in out
    assert "goes on from update 10, step 1,280" in out
    for change, message in [
        ({"agent": "vtrace"}, "agent='ppo', not 'vtrace'"),
        ({"env": "dummy:counting"}, "env='gymnax:CartPole-v1', not 'dummy:counting'"),
        ({"network__hidden": (8,)}, r"network.hidden=\[16\], not \[8\]"),
        ({"seed": 1}, "seed=0, not 1"),
    ]:
        with pytest.raises(errors.ConfigError, match=message):
            anakin.train(resumable(**change), tmp_path / "run", quiet=True)
    # What was refused holds nothing: the run still goes on.
    anakin.train(resumable(total_steps=16 * 8 * 12), tmp_path / "run", quiet=True)
    with pytest.raises(errors.ConfigError, match="architecture='anakin', not 'sebulba'"):
        sebulba.train(resumable(env="dummy:counting", cpu_devices=2), tmp_path / "run", quiet=True)


def test_restart_moves_the_run_aside(tmp_path):
    first = anakin.train(resumable(), tmp_path / "run", quiet=True)
    anakin.train(resumable(seed=1), tmp_path / "run", quiet=True, restart=True)
    again = anakin.train(resumable(), tmp_path / "run.1", quiet=True)
    assert bits(again.weights) == bits(first.weights)


def test_weights_can_be_taken_from_another_run(tmp_path, capsys):
    first = anakin.train(resumable(), tmp_path / "run", quiet=True)
    run = resumable(seed=1, learning_rate=1e-30, total_steps=16 * 8)
    second = anakin.train(run, tmp_path / "next", init_from=tmp_path / "run")
    assert "begins with the weights of" in capsys.readouterr().out
    for a, b in zip(jax.tree.leaves(second.weights), jax.tree.leaves(first.weights), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(
        errors.ConfigError, match=r"of another network: .*\(16,\) there and \(8,\) here"
    ):
        anakin.train(
            resumable(network__hidden=(8,)), tmp_path / "x", init_from=tmp_path / "run", quiet=True
        )
    with pytest.raises(errors.ConfigError, match="holds no checkpoints"):
        anakin.train(resumable(), tmp_path / "y", init_from=tmp_path / "nowhere", quiet=True)


def test_the_newest_and_the_best_checkpoints_stay(tmp_path):
    run = resumable(
        env="dummy:choice", total_steps=16 * 8 * 30, evaluation__every=3, evaluation__greedy=False,
        evaluation__episodes=64, learning_rate=0.01, checkpoint__keep=3,
    )  # fmt: skip
    result = anakin.train(run, tmp_path / "run", quiet=True)
    scores = {
        row["step"] // 128: row["eval/episode_return"]
        for row in result.metrics
        if "eval/episode_return" in row
    }
    best = max(scores, key=lambda update: scores[update])
    there = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert there == {28, 29, 30, best}
    like = jax.eval_shape(lambda: result.weights)
    assert checkpoint.load_weights(tmp_path / "run", "last", like)[1] == 30
    weights, update = checkpoint.load_weights(tmp_path / "run", "best", like)
    assert update == best
    assert jax.tree.structure(weights) == jax.tree.structure(result.weights)


# Of a read that fails, Orbax leaves coroutines behind, which complain when they are collected.
leftovers = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()


def damage(folder: Path, how: str) -> None:
    """Damages all files of arrays, as not each of them is in use."""
    if how == "half-written":
        shutil.rmtree(folder / "rest")
        return
    for file in [p for p in folder.rglob("*") if p.is_file() and p.parent.name == "d"]:
        content = bytearray(file.read_bytes())
        if how == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif how == "flipped":
            later = slice(len(content) // 4, None, 64)
            content[later] = bytes(x ^ 64 for x in content[later])
            file.write_bytes(content)
        elif how == "lost":
            file.unlink()


@leftovers
@pytest.mark.parametrize("how", ["truncated", "flipped", "lost", "half-written"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(how, tmp_path, capsys):
    whole = anakin.train(resumable(), tmp_path / "run", quiet=True)
    damage(tmp_path / "run" / "checkpoints" / "10", how)
    again = anakin.train(resumable(), tmp_path / "run")
    out = capsys.readouterr().out
    assert "checkpoint 10 is damaged and now" in out
    assert "goes on from update 9" in out
    assert bits(again.weights) == bits(whole.weights)
    assert timeless(again.metrics) == timeless(whole.metrics)
    assert list((tmp_path / "run" / "damaged_checkpoints").iterdir())
    # The new one is whole.
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


@leftovers
def test_only_damaged_checkpoints_are_an_error(tmp_path):
    anakin.train(resumable(), tmp_path / "run", quiet=True)
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        damage(folder, "truncated")
    with pytest.raises(errors.SaveError, match=r"no checkpoint in .* can be used: 10 .*--restart"):
        anakin.train(resumable(), tmp_path / "run", quiet=True)


@leftovers
def test_a_signal_while_a_checkpoint_is_read_damages_nothing(tmp_path, monkeypatch):
    whole = anakin.train(resumable(), tmp_path / "run", quiet=True)

    def asked(*_):
        raise errors.PreemptedError("by SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "_read", asked)
        with pytest.raises(errors.PreemptedError):
            anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "damaged_checkpoints").exists()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


def test_a_finished_run_whose_rows_are_lost_is_judged_again(tmp_path):
    whole = anakin.train(resumable(), tmp_path / "run", quiet=True)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    (row,) = again.metrics
    assert row["step"] == whole.metrics[-1]["step"]
    assert row["eval/episode_return"] == whole.metrics[-1]["eval/episode_return"]


def test_any_changed_element_changes_the_checksum():
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 4)).astype(np.float32),
        "b": rng.integers(0, 255, (5, 2, 2), np.uint8),
        "c": rng.random(7) < 0.5,
    }
    whole = int(checkpoint.checksum(arrays))
    assert whole == int(checkpoint.checksum(arrays))
    for name, x in arrays.items():
        for place in np.ndindex(x.shape):
            changed = x.copy()
            changed[place] = ~x[place] if x.dtype == bool else x[place] + 1
            assert int(checkpoint.checksum({**arrays, name: changed})) != whole
    swapped = arrays["a"][::-1]
    assert int(checkpoint.checksum({**arrays, "a": swapped})) != whole


def unwritable(monkeypatch, times: int) -> None:
    """Lets Orbax fail as a full disk does."""
    save = checkpoint.ocp.CheckpointManager.save
    left = [times]

    def full(manager, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return save(manager, *args, **kwargs)

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", full)


def test_training_goes_on_while_nothing_can_be_saved(tmp_path, monkeypatch, capsys):
    whole = anakin.train(resumable(), None, quiet=True)
    unwritable(monkeypatch, 7)
    result = anakin.train(resumable(), tmp_path / "run")
    out = capsys.readouterr().out
    assert "a checkpoint could not be written (OSError: [Errno 28] No space left on device)" in out
    assert bits(result.weights) == bits(whole.weights)
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


def test_a_run_whose_end_can_not_be_saved_says_so(tmp_path, monkeypatch):
    anakin.train(resumable(), tmp_path / "run", quiet=True)
    unwritable(monkeypatch, 1000)
    longer = resumable(total_steps=16 * 8 * 12)
    with pytest.raises(errors.SaveError, match="the last checkpoint could not be written"):
        anakin.train(longer, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    # The older one stays good.
    result = anakin.train(longer, tmp_path / "run", quiet=True)
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(12)]


def test_a_workdir_that_is_deleted_under_the_run_is_written_anew(tmp_path, monkeypatch, capsys):
    save = Session.save

    def deleting(session, state, progress, score):
        if progress.update == 5:
            shutil.rmtree(tmp_path / "run")
        return save(session, state, progress, score)

    monkeypatch.setattr(Session, "save", deleting)
    whole = anakin.train(resumable(), tmp_path / "run")
    assert "had been deleted, and is written anew" in capsys.readouterr().out
    monkeypatch.undo()
    assert (tmp_path / "run" / "config.json").exists()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)
    assert timeless(again.metrics) == timeless(whole.metrics)


def test_a_divergence_leaves_the_checkpoint_before_it(tmp_path):
    good = resumable(total_steps=16 * 8 * 4)
    anakin.train(good, tmp_path / "run", quiet=True)
    # Within one update, whose checkpoint is then not written.
    bad = resumable(learning_rate=1e38, max_grad_norm=0.0, num_epochs=4)
    with pytest.raises(errors.DivergedError):
        anakin.train(bad, tmp_path / "run", quiet=True)
    result = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.weights))
    assert result.summary["env_steps"] == 16 * 8 * 10


def test_sebulba_goes_on_with_its_learner(tmp_path, monkeypatch, capsys):
    run = resumable(
        env="dummy:counting",
        cpu_devices=8,
        sebulba__actor_devices=(0,),
        sebulba__learner_devices=(1, 2),
    )
    Stops(monkeypatch, 3)
    with pytest.raises(errors.PreemptedError):
        sebulba.train(run, tmp_path / "run", quiet=True)
    before = last_arrays(tmp_path / "run")
    assert before["rest/train/step"] == 4
    began = rows_of(tmp_path / "run")
    result = sebulba.train(run, tmp_path / "run")
    out = capsys.readouterr().out
    assert "goes on from update 4" in out
    assert "environments begin anew" in out
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(10)]
    after = last_arrays(tmp_path / "run")
    assert after["rest/train/step"] == 10
    np.testing.assert_array_equal(before["rest/key"], after["rest/key"])
    # The optimizer counted on.
    counts = [name for name in after if name.endswith("count")]
    assert counts
    for name in counts:
        assert after[name] / before[name] == 10 / 4
    # What the time went to is that of both starts, and of no start that has nothing left to do.
    updating = sum(row["time/learner_update"] for row in result.metrics)
    assert updating > sum(row["time/learner_update"] for row in began) > 0
    assert result.summary["breakdown"]["learner_update"] == pytest.approx(updating)
    again = sebulba.train(run, tmp_path / "run", quiet=True).summary
    assert again["breakdown"] == result.summary["breakdown"]


def command(workdir, *arguments):
    return [
        sys.executable, "-m", "podracer.anakin", f"--config={CARTPOLE}", f"--workdir={workdir}",
        "--config.total_steps=400_000", "--config.checkpoint.every=4", *arguments,
    ]  # fmt: skip


ENDLESS = (
    "--config.total_steps=100_000_000", "--config.network.hidden=(8,)", "--config.num_epochs=1",
    "--config.num_minibatches=1", "--config.cpu_devices=1",
)  # fmt: skip


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rows_of(workdir) -> list[dict]:
    file = workdir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_row(run, workdir) -> None:
    while not (workdir / "metrics.jsonl").exists() or not rows_of(workdir):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, cli.PREEMPTED, "SIGTERM"), (signal.SIGINT, cli.INTERRUPTED, "interrupted")],
)
def test_a_signal_saves_and_has_its_exit_code(number, code, words, tmp_path):
    with start(tmp_path / "run", *ENDLESS) as run:
        wait_for_row(run, tmp_path / "run")
        run.send_signal(number)
        _, stderr = run.communicate(timeout=60)
    assert run.returncode == code
    assert words in stderr
    assert "Traceback" not in stderr
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    rows = rows_of(tmp_path / "run")
    # Nothing that was shown has to be done again.
    assert max(steps) * 4096 == rows[-1]["step"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(second):
    program = """
import time
from podracer.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while stop.number is None:
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep(100)
"""
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.readline() == "noted\n"
        run.send_signal(second)
        assert run.wait(timeout=10) == -second


def test_two_runs_in_one_workdir(tmp_path):
    with start(tmp_path / "run", *ENDLESS) as first:
        wait_for_row(first, tmp_path / "run")
        with start(tmp_path / "run") as second:
            _, stderr = second.communicate(timeout=60)
        first.kill()
    assert second.returncode == cli.BAD_CONFIG
    assert "belongs to a run that is going on" in stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_change_nothing(tmp_path):
    """``kill -9`` at 20 random moments, each time resumed by the same command."""
    subprocess.run(command(tmp_path / "whole"), cwd=ROOT, check=True, capture_output=True)
    rng = np.random.default_rng(0)
    kills = 0
    while kills < 20:
        with start(tmp_path / "run") as run:
            # Anywhere: in the imports, the compilation, between two saves, in one.
            seconds = rng.uniform(0.5, 8) if kills % 2 else None
            if seconds is None:
                before = len(rows_of(tmp_path / "run"))
                while run.poll() is None and len(rows_of(tmp_path / "run")) <= before:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.05))
            else:
                time.sleep(seconds)
            if run.poll() is None:
                run.kill()
                kills += 1
            run.communicate()
        if run.returncode == 0:
            break
    assert kills == 20, "the run was over before it was killed twenty times"
    subprocess.run(command(tmp_path / "run"), cwd=ROOT, check=True, capture_output=True)
    whole, killed = (last_arrays(tmp_path / name) for name in ("whole", "run"))
    for name, x in whole.items():
        np.testing.assert_array_equal(x, killed[name], err_msg=name)
    rows = rows_of(tmp_path / "run")
    steps = [row["step"] for row in rows]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert timeless(rows) == timeless(rows_of(tmp_path / "whole"))
    assert math.isclose(rows[-1]["eval/episode_return"], 500, abs_tol=100)
