"""Checkpoints of runs: which ones stay, damaged ones, and errors of storage."""

import errno
import gc
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tenacity
from etils import epath

from podracer import anakin, errors
from podracer.acting.statistics import Episodes
from podracer.anakin import trainer
from podracer.distributed.checksum import checksum, digests
from podracer.distributed.processes import Processes
from podracer.storage import checkpoint, retry
from podracer.storage.checkpoint import Checkpoints, Progress
from tests.training.resuming import Stops, bits, finished_run, resumable, without_times


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(retry, "WAIT", tenacity.wait_none())


def test_the_newest_and_the_best_checkpoints_stay(tmp_path):
    run = resumable(
        env="dummy:choice", total_steps=16 * 8 * 12, evaluation__every=2, evaluation__greedy=False,
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
    assert there == {10, 11, 12, best}
    like = jax.eval_shape(lambda: result.weights)
    assert checkpoint.load_weights(tmp_path / "run", "last", like)[1] == 12
    weights, update = checkpoint.load_weights(tmp_path / "run", "best", like)
    assert update == best
    assert jax.tree.structure(weights) == jax.tree.structure(result.weights)


def play(monkeypatch, *scores):
    """Gives each evaluation of runs by Anakin the next of these mean returns."""
    left, compile_program = list(scores), trainer.compile_program

    def compiled(*arguments):
        def evaluate(_):
            return Episodes(np.full(8, left.pop(0)), np.ones(8), np.ones(8, bool))

        return compile_program(*arguments)._replace(evaluate=evaluate)

    monkeypatch.setattr(trainer, "compile_program", compiled)
    return left


def best(workdir, result) -> int:
    """The update of the best weights."""
    return checkpoint.load_weights(workdir, "best", jax.eval_shape(lambda: result.weights))[1]


@pytest.mark.slow
def test_an_evaluation_after_an_interrupted_one_saves_the_best_weights(tmp_path, monkeypatch):
    # The signal interrupts the evaluation after update 4, whose weights turn out to be the best.
    config = resumable(checkpoint__keep=1)
    left = play(monkeypatch, 5.0, 2.0, 1.0)
    Stops(monkeypatch, 3)
    with pytest.raises(errors.PreemptedError):
        anakin.train(config, tmp_path / "run", quiet=True)
    result = anakin.train(config, tmp_path / "run", quiet=True)
    assert not left
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"4", "10"}
    assert best(tmp_path / "run", result) == 4


@pytest.mark.slow
@pytest.mark.parametrize("last", [7.0, 3.0], ids=["best", "not best"])
def test_an_interrupted_last_evaluation_is_done_once(last, tmp_path, monkeypatch):
    config = resumable(total_steps=16 * 8 * 8)
    left = play(monkeypatch, 5.0, last)
    Stops(monkeypatch, 7)
    with pytest.raises(errors.PreemptedError):
        anakin.train(config, tmp_path / "run", quiet=True)
    assert len(left) == 1
    result = anakin.train(config, tmp_path / "run", quiet=True)
    again = anakin.train(config, tmp_path / "run", quiet=True)
    assert again.metrics == result.metrics
    assert again.metrics[-1]["eval/episode_return"] == last
    folder = tmp_path / "run" / "checkpoints" / "8"
    score = last if last > 5.0 else None
    assert json.loads((folder / "metrics" / "metrics").read_text()) == {"score": score}
    progress = json.loads((folder / "progress" / "metadata").read_text())
    assert progress["pending"] is None
    assert progress["best"] == max(5.0, last)


@pytest.mark.parametrize("where", ["at once", "in the background"])
def test_an_evaluation_is_the_best_only_once_its_weights_are_saved(where, tmp_path, monkeypatch):
    config = resumable(checkpoint__every=0, checkpoint__minutes=0.0, checkpoint__keep=1)
    play(monkeypatch, 5.0, 4.0, 3.0)
    owner, name = {
        "at once": (ocp.CheckpointManager, "save"),
        "in the background": (ocp.StandardCheckpointHandler, "finalize"),
    }[where]
    function, left = getattr(owner, name), [1]

    def full(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, full)
    result = anakin.train(config, tmp_path / "run", quiet=True)
    assert not left[0]
    assert best(tmp_path / "run", result) == 8


# Orbax leaves coroutines of a failed read behind, which warn when they are collected.
leftovers = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected():
    # Only what the test makes: to search everything else takes more than a second.
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


def damage(folder: Path, how: str) -> None:
    """Damages all files of arrays, as not every file is in use."""
    if how in ("rest", "replay"):
        shutil.rmtree(folder / how)
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
def test_a_damaged_checkpoint_is_skipped_in_favour_of_the_one_before(tmp_path, capsys):
    whole = finished_run(tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "10", "flipped")
    again = anakin.train(resumable(), tmp_path / "run")
    out = capsys.readouterr().out
    assert "checkpoint 10 is damaged (" in out
    assert "resumed from update 9" in out
    assert bits(again.weights) == bits(whole.weights)
    assert without_times(again.metrics) == without_times(whole.metrics)
    assert list((tmp_path / "run" / "damaged_checkpoints").iterdir())
    # The new one is complete.
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


@leftovers
def test_a_run_without_an_undamaged_checkpoint_is_an_error(tmp_path):
    finished_run(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        damage(folder, "truncated")
    with pytest.raises(errors.SaveError, match=r"no checkpoint in .* can be used: 10 .*--restart"):
        anakin.train(resumable(), tmp_path / "run", quiet=True)


STATE = {
    "train": {"weights": {"a": np.arange(12.0)}},
    "source": {"frames": np.arange(96, dtype=np.uint8).reshape(4, 6, 4)},
    "key": np.arange(3),
}


def state(offset=0):
    return jax.tree.map(lambda x: jax.numpy.asarray(x + offset), STATE)


def checkpoints(folder, logged=None, keep=3):
    log = [].append if logged is None else logged.append
    return Checkpoints(epath.Path(folder), keep, log, Processes())


def saved(folder, updates):
    """A workdir with checkpoints of these updates."""
    saving = checkpoints(folder)
    for update in updates:
        saving.save(state(update), Progress(update), None)
    saving.close()


@leftovers
@pytest.mark.parametrize("how", ["truncated", "flipped", "lost", "rest", "replay"])
def test_whatever_is_damaged_is_noticed(how, tmp_path):
    saved(tmp_path, (1, 2))
    damage(tmp_path / "checkpoints" / "2", how)
    logged = []
    restored, progress = checkpoints(tmp_path, logged).restore(state())
    assert progress.update == 1
    assert bits(restored) == bits(state(1))
    assert "checkpoint 2 is damaged (" in logged[0]


def test_arrays_that_are_not_those_that_were_saved_are_damage(tmp_path):
    """Whole files, of another checkpoint: the storage's own checksums are right."""
    saved(tmp_path, (1, 2))
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "2" / "weights")
    shutil.copytree(folder / "1" / "weights", folder / "2" / "weights")
    restored, progress = checkpoints(tmp_path).restore(state())
    assert progress.update == 1
    assert bits(restored) == bits(state(1))


def test_arrays_are_found_by_the_names_of_earlier_commits(tmp_path):
    def state(carry):
        return jax.tree.map(jax.numpy.asarray, {**STATE, "rollout": {"carry": carry, "x": 1.0}})

    core = {"c": np.arange(3.0), "h": np.ones(2)}
    saving = checkpoints(tmp_path)
    saving.save(state({"memory": core, "total": 2.0}), Progress(1), None)
    saving.close()
    file = tmp_path / "checkpoints" / "1" / "progress" / "metadata"
    content = json.loads(file.read_text())
    del content["replay"]
    file.write_text(json.dumps(content))
    expected = state({"network": core, "total": 2.0})
    restored, progress = checkpoints(tmp_path).restore(jax.tree.map(lambda x: x * 0, expected))
    assert progress.update == 1
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    assert bits(restored) == bits(expected)


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        MemoryError(),
        ValueError("UNAVAILABLE: HTTP 503"),
        raised_from(Exception("while reading array index"), ValueError("DEADLINE_EXCEEDED: x")),
    ],
    ids=repr,
)
def test_a_transient_error_of_a_read_is_retried_and_moves_nothing(error, tmp_path, monkeypatch):
    saved(tmp_path, (1, 2))
    restore, left = ocp.CheckpointManager.restore, [1000]

    def fail(manager, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error
        return restore(manager, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(errors.TransientError, match="checkpoints/2 can't be read: "):
        checkpoints(tmp_path).restore(state())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}
    # It passes while the read is retried.
    left[0], logged = 2, []
    restored, progress = checkpoints(tmp_path, logged).restore(state())
    assert progress.update == 2
    assert bits(restored) == bits(state(2))
    assert len(logged) == 2
    assert not (tmp_path / "damaged_checkpoints").exists()


def test_a_device_that_is_full_while_a_checkpoint_is_verified_is_not_damage(tmp_path, monkeypatch):
    saved(tmp_path, (1, 2))

    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")

    monkeypatch.setattr(checkpoint.files, "verify", fail)
    with pytest.raises(errors.TransientError, match=r"a checkpoint can't be read: .*memory"):
        checkpoints(tmp_path).restore(state())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}


@leftovers
@pytest.mark.parametrize("which", ["last", "best"])
def test_damaged_weights_are_not_loaded(which, tmp_path):
    saved(tmp_path, (1,))
    item = {"last": "weights/manifest.ocdbt", "best": "metrics/metrics"}[which]
    (tmp_path / "checkpoints" / "1" / item).write_bytes(b"x")
    like = jax.eval_shape(lambda: state()["train"]["weights"])
    with pytest.raises(errors.ConfigError, match=r"a checkpoint of .* is damaged: .*; resuming"):
        checkpoint.load_weights(tmp_path, which, like)


@leftovers
def test_weights_of_each_checkpoint_are_loaded_by_its_number(tmp_path):
    like = jax.eval_shape(lambda: state()["train"]["weights"])
    with pytest.raises(errors.ConfigError, match="holds no checkpoints"):
        checkpoint.list_updates(tmp_path)
    saved(tmp_path, (1, 2))
    assert checkpoint.list_updates(tmp_path) == [1, 2]
    assert [checkpoint.load_weights(tmp_path, x, like)[1] for x in (1, 2)] == [1, 2]
    with pytest.raises(errors.ConfigError, match="holds no checkpoint 3"):
        checkpoint.load_weights(tmp_path, 3, like)
    (tmp_path / "checkpoints" / "1" / "weights" / "manifest.ocdbt").write_bytes(b"x")
    with pytest.raises(errors.ConfigError, match=r"^checkpoint 1 of .* is damaged: .*; move it"):
        checkpoint.load_weights(tmp_path, 1, like)
    assert checkpoint.load_weights(tmp_path, 2, like)[1] == 2


def test_a_checkpoint_without_read_permission_is_a_config_error(tmp_path, monkeypatch):
    saved(tmp_path, (1, 2))

    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(errors.ConfigError, match="checkpoints/2 can't be read: Permission denied"):
        checkpoints(tmp_path).restore(state())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}


def test_a_folder_that_can_not_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """A run whose checkpoints seem to be missing would start over."""
    saved(tmp_path, (1,))

    def fail(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fail)
        # How Orbax and epath ask whether a folder exists.
        patch.setattr("os.path.exists", lambda _: False)
        with pytest.raises(errors.TransientError, match="checkpoints can't be read: Stale file"):
            checkpoints(tmp_path).restore(state())


@leftovers
@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"null", b'{"score": "x"}'])
def test_a_damaged_score_does_not_keep_a_run_from_saving(content, tmp_path):
    saved(tmp_path, (1, 2))
    (tmp_path / "checkpoints" / "1" / "metrics" / "metrics").write_bytes(content)
    logged = []
    resumed = checkpoints(tmp_path, logged)
    restored, progress = resumed.restore(state())
    assert progress.update == 2
    resumed.save(restored, Progress(3), None)
    resumed.finish()
    resumed.close()
    assert "checkpoint 1 is damaged (" in logged[0]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "3"}


@leftovers
def test_a_signal_while_a_checkpoint_is_read_moves_nothing(tmp_path, monkeypatch):
    whole = finished_run(tmp_path / "run")

    def interrupt(*_):
        raise errors.PreemptedError("by SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "_read", interrupt)
        with pytest.raises(errors.PreemptedError):
            anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "damaged_checkpoints").exists()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


def test_any_changed_element_changes_the_checksum():
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 4)).astype(np.float32),
        "b": rng.integers(0, 255, (5, 2, 2), np.uint8),
        "c": rng.random(7) < 0.5,
    }
    whole = int(checksum(arrays))
    assert whole == int(checksum(arrays))
    for name, x in arrays.items():
        for place in np.ndindex(x.shape):
            changed = x.copy()
            changed[place] = ~x[place] if x.dtype == bool else x[place] + 1
            assert int(checksum({**arrays, name: changed})) != whole
    swapped = arrays["a"][::-1]
    assert int(checksum({**arrays, "a": swapped})) != whole


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("last", [4, 3])
def test_any_changed_element_changes_a_digest(last, dtype):
    """Whether whole words are summed, as with four bytes in the last axis, or single elements."""
    x = np.random.default_rng(0).integers(0, 2, (2, 3, 5, last)).astype(dtype)
    whole = digests({"x": jax.numpy.asarray(x)})["x"]
    assert whole.shape == (2, 3)
    for place in np.ndindex(x.shape):
        changed = x.copy()
        changed[place] = 1 - changed[place]
        differs = digests({"x": jax.numpy.asarray(changed)})["x"] != whole
        assert differs[place[:2]]
        assert differs.sum() == 1
    swapped = x.copy()
    swapped[0, 0, [0, 1]] = x[0, 0, [1, 0]]
    if (x[0, 0, 0] != x[0, 0, 1]).any():
        assert digests({"x": jax.numpy.asarray(swapped)})["x"][0, 0] != whole[0, 0]


def unwritable(monkeypatch, times: int) -> None:
    """Makes Orbax fail as on a full disk."""
    save = ocp.CheckpointManager.save
    left = [times]

    def full(manager, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return save(manager, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)


def test_training_does_not_wait_for_the_checksum(tmp_path, monkeypatch):
    slow = jax.jit(lambda x: x @ x @ x @ x @ x)
    matrix = jax.numpy.ones((2000, 2000))
    step, started = jax.jit(lambda x: x + 1), []

    def late(arrays):
        started.append(slow(matrix))
        return checksum(arrays)

    jax.block_until_ready((slow(matrix), step(0.0)))
    saver = checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.files, "checksum", late)
        saver.save(state(1), Progress(1), None)
        step(1.0).block_until_ready()
        assert not started[0].is_ready()
        saver.close()
    assert bits(checkpoints(tmp_path).restore(state())[0]) == bits(state(1))


def test_training_continues_while_nothing_can_be_saved(tmp_path, monkeypatch, capsys):
    whole = finished_run(tmp_path / "whole")
    unwritable(monkeypatch, 7)
    result = anakin.train(resumable(), tmp_path / "run")
    out = capsys.readouterr().out
    assert "a checkpoint could not be written (No space left on device)" in out
    assert bits(result.weights) == bits(whole.weights)
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)


def test_a_run_whose_last_checkpoint_fails_ends_by_an_error(tmp_path, monkeypatch):
    finished_run(tmp_path / "run")
    unwritable(monkeypatch, 1000)
    longer = resumable(total_steps=16 * 8 * 12)
    with pytest.raises(errors.SaveError, match="the last checkpoint could not be written"):
        anakin.train(longer, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    # The older checkpoint is still there.
    result = anakin.train(longer, tmp_path / "run", quiet=True)
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(12)]
