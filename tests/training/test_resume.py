"""Runs that stop for any reason and are resumed: what is exact, and what may change."""

import json
import shutil

import jax
import numpy as np
import pytest

from podracer import anakin, errors, sebulba
from podracer.sebulba.threads import HangLimits
from podracer.training.session import Session
from tests.training.resuming import (
    ALPHAZERO,
    D4PG,
    MUZERO,
    PENALTY,
    R2D2,
    REPLAY,
    Stops,
    bits,
    finished_run,
    last_arrays,
    resumable,
    rows_of,
    until_done,
    without_times,
)


def name_of(value) -> str:
    """The name of a test's parameter."""
    return value.get("agent", str(value)) if isinstance(value, dict) else str(value)


# Before a replay learns, before it is full, and after that.
THRICE = (1, 3, 6)
SLOW = [
    R2D2, MUZERO, ALPHAZERO, {"normalize_rewards": True, "cpu_devices": 1},
    {**PENALTY, "whole_episodes": True}, {"num_seeds": 2, **REPLAY},
    {"network__core": "lstm", "stagger": 3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "stop_at"),
    [
        # Observations are dictionaries.
        ({"env": "dummy:masked", "normalize_observations": True, **REPLAY}, THRICE),
        pytest.param(D4PG, THRICE, marks=pytest.mark.slow),
        *(pytest.param(x, (4,), marks=pytest.mark.slow) for x in SLOW),
    ],
    ids=name_of,
)
def test_a_resumed_run_equals_an_uninterrupted_one(changes, stop_at, tmp_path, monkeypatch):
    run = resumable(num_minibatches=2, anneal=True, **changes)
    whole = anakin.train(run, tmp_path / "whole", quiet=True)
    Stops(monkeypatch, *stop_at)
    parts, stops = until_done(anakin.train, run, tmp_path / "parts")
    assert stops == len(stop_at)
    assert bits(parts.weights) == bits(whole.weights)
    assert without_times(parts.metrics) == without_times(whole.metrics)
    # All of the state: optimizer, environments, memory, keys.
    states = [last_arrays(tmp_path / name) for name in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[1][name], err_msg=name)
    seconds = [row["wall_time"] for row in parts.metrics]
    assert seconds == sorted(seconds)
    rows = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [128 * (i + 1) for i in range(10)]


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = finished_run(tmp_path / "run")
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(first.weights)
    assert again.metrics == first.metrics
    assert again.summary == first.summary
    # Settings that nothing was trained with are not recorded.
    config = (tmp_path / "run" / "config.json").read_bytes()
    anakin.train(resumable(learning_rate=1.0), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "config.json").read_bytes() == config
    # A longer run is resumed; that its learning rate is annealed differently is the user's choice.
    longer = anakin.train(resumable(total_steps=16 * 8 * 12), tmp_path / "run", quiet=True)
    assert longer.metrics[:10] == first.metrics
    assert longer.summary["env_steps"] == 16 * 8 * 12


@pytest.mark.slow
def test_a_run_that_is_made_shorter_is_evaluated_where_it_stopped(tmp_path, monkeypatch):
    Stops(monkeypatch, 4)
    with pytest.raises(errors.PreemptedError):
        anakin.train(resumable(), tmp_path / "run", quiet=True)
    result = anakin.train(resumable(total_steps=16 * 8 * 3), tmp_path / "run", quiet=True)
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(5)]
    assert result.summary["eval_return_mean"] == result.metrics[-1]["eval/episode_return"]
    assert without_times(rows_of(tmp_path / "run")) == without_times(result.metrics)


@pytest.mark.slow
def test_an_evaluation_that_a_signal_interrupts_is_left_to_the_next_start(tmp_path, monkeypatch):
    run = resumable()
    whole = finished_run(tmp_path / "whole")
    # The fourth and the last call end with an evaluation, which the signal interrupts.
    Stops(monkeypatch, 3, 9)
    parts, stops = until_done(anakin.train, run, tmp_path / "parts")
    assert stops == 2
    assert without_times(parts.metrics) == without_times(whole.metrics)
    assert bits(parts.weights) == bits(whole.weights)
    rows = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 10


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        pytest.param({}, 2, 1, marks=pytest.mark.slow),
        pytest.param(REPLAY, 1, 8, marks=pytest.mark.slow),
        pytest.param(REPLAY, 8, 2, marks=pytest.mark.slow),
        pytest.param(R2D2, 1, 8, marks=pytest.mark.slow),
        pytest.param(R2D2, 8, 2, marks=pytest.mark.weekly),
        pytest.param(D4PG, 1, 8, marks=pytest.mark.slow),
        pytest.param(D4PG, 8, 2, marks=pytest.mark.weekly),
    ],
    ids=name_of,
)
def test_a_run_is_resumed_on_another_number_of_devices(
    changes, before, after, tmp_path, monkeypatch
):
    whole = anakin.train(resumable(cpu_devices=before, **changes), quiet=True)
    Stops(monkeypatch, 4)
    with pytest.raises(errors.PreemptedError):
        anakin.train(resumable(cpu_devices=before, **changes), tmp_path / "run", quiet=True)
    result = anakin.train(resumable(cpu_devices=after, **changes), tmp_path / "run", quiet=True)
    for a, b in zip(jax.tree.leaves(result.weights), jax.tree.leaves(whole.weights), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_a_replay_that_was_not_saved_refills(tmp_path, monkeypatch, capsys):
    """And both ways: it is saved again as soon as the setting allows it."""
    Stops(monkeypatch, 4, 6)
    with pytest.raises(errors.PreemptedError):
        anakin.train(resumable(checkpoint__replay=False, **REPLAY), tmp_path / "run")
    before = last_arrays(tmp_path / "run")
    assert not [name for name in before if name.startswith("replay/")]
    out = capsys.readouterr().out
    assert "refills" not in out
    assert "  replay         512 steps, 8.6 KiB on each of 2 devices" in out
    with pytest.raises(errors.PreemptedError):
        anakin.train(resumable(**REPLAY), tmp_path / "run")
    out = capsys.readouterr().out
    assert "checkpoint.replay was False and is now True" in out
    assert (
        "the replay was not saved and refills: learning continues after at least 200 more steps"
        in out
    )
    fills = [row["replay/fill"] for row in rows_of(tmp_path / "run")]
    assert fills == [0.25, 0.5, 0.75, 1, 1, 0.25, 0.5]
    # Of checkpoints with and without it, the newest has it.
    result = anakin.train(resumable(checkpoint__replay=False, **REPLAY), tmp_path / "run")
    assert "refills" not in capsys.readouterr().out
    assert [row["replay/fill"] for row in result.metrics[7:]] == [0.75, 1, 1]
    assert not [name for name in last_arrays(tmp_path / "run") if name.startswith("replay/")]


def test_a_number_of_devices_that_does_not_divide_is_rejected(tmp_path):
    finished_run(tmp_path / "run")
    with pytest.raises(
        errors.ConfigError, match=r"num_envs=16 .* 3 devices; 15 would.* 1, 2, 4, 8"
    ):
        anakin.train(resumable(cpu_devices=3), tmp_path / "run", quiet=True)


def test_changed_settings_are_reported_or_rejected(tmp_path, capsys):
    finished_run(tmp_path / "run")
    anakin.train(resumable(learning_rate=1e-3, total_steps=16 * 8 * 11), tmp_path / "run")
    out = capsys.readouterr().out
    assert "learning_rate was 0.00025 and is now 0.001" in out
    assert "total_steps was 1280 and is now 1408" in out
    assert "resumed from update 10, step 1,280" in out
    for change, message in [
        ({"agent": "vtrace"}, "agent='ppo', not 'vtrace'"),
        ({"env": "dummy:counting"}, "env='gymnax:CartPole-v1', not 'dummy:counting'"),
        ({"network__hidden": (8,)}, r"network.hidden=\[16\], not \[8\]"),
        ({"seed": 1}, "seed=0, not 1"),
    ]:
        with pytest.raises(errors.ConfigError, match=message):
            anakin.train(resumable(**change), tmp_path / "run", quiet=True)
    # A rejected start leaves the run as it was.
    anakin.train(resumable(total_steps=16 * 8 * 12), tmp_path / "run", quiet=True)
    with pytest.raises(errors.ConfigError, match="architecture='anakin', not 'sebulba'"):
        sebulba.train(resumable(env="dummy:counting", cpu_devices=2), tmp_path / "run", quiet=True)


@pytest.mark.slow
def test_restart_moves_the_run_aside(tmp_path):
    first = finished_run(tmp_path / "run")
    anakin.train(resumable(seed=1), tmp_path / "run", quiet=True, restart=True)
    again = anakin.train(resumable(), tmp_path / "run.1", quiet=True)
    assert bits(again.weights) == bits(first.weights)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(tmp_path, capsys):
    first = finished_run(tmp_path / "run")
    run = resumable(seed=1, learning_rate=1e-30, total_steps=16 * 8)
    second = anakin.train(run, tmp_path / "next", init_from=tmp_path / "run")
    assert "starts from the weights of" in capsys.readouterr().out
    for a, b in zip(jax.tree.leaves(second.weights), jax.tree.leaves(first.weights), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(
        errors.ConfigError, match=r"of another network: .*\(16,\) there and \(8,\) here"
    ):
        anakin.train(
            resumable(network__hidden=(8,)), tmp_path / "x", init_from=tmp_path / "run", quiet=True
        )
    with pytest.raises(errors.ConfigError, match="nowhere' is not a run"):
        anakin.train(resumable(), tmp_path / "y", init_from=tmp_path / "nowhere", quiet=True)


@pytest.mark.slow
def test_targets_start_from_the_weights_of_another_run(tmp_path):
    def train(changes, name, **options):
        run = resumable(num_seeds=2, **changes)
        result = anakin.train(run, tmp_path / name, quiet=True, **options)
        found = last_arrays(tmp_path / name)
        return result, [x for key, x in found.items() if key.startswith("rest/train/target/")]

    start = {"seed": 7, "learning_rate": 1e-30, "total_steps": 16 * 8 * 3}
    dqn = {**REPLAY, "dqn__target_period": 1000}
    first, before = train(dqn, "dqn")
    _, after = train({**dqn, **start}, "next dqn", init_from=tmp_path / "dqn")
    for x, old, weights in zip(after, before, jax.tree.leaves(first.weights.params), strict=True):
        np.testing.assert_allclose(x, weights, atol=1e-6)
        assert (old != x).any()

    # The coefficient of a penalty begins anew; a policy that does not change divides it by 1.5.
    _, before = train(PENALTY, "ppo")
    coefficient, divergence = train({**PENALTY, **start}, "next", init_from=tmp_path / "ppo")[1]
    np.testing.assert_allclose(coefficient.ravel(), [1.5**-3] * 2, rtol=1e-6)
    assert (divergence == 0).all()
    assert (before[0] > 1).all()


def test_a_finished_run_whose_rows_are_lost_is_evaluated_again(tmp_path):
    whole = finished_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    (row,) = again.metrics
    assert row["step"] == whole.metrics[-1]["step"]
    assert row["eval/episode_return"] == whole.metrics[-1]["eval/episode_return"]


@pytest.mark.slow
def test_a_workdir_that_is_deleted_during_the_run_is_written_again(tmp_path, monkeypatch, capsys):
    save = Session.save

    def deleting(session, state, progress, score):
        if progress.update == 5:
            shutil.rmtree(tmp_path / "run")
        return save(session, state, progress, score)

    monkeypatch.setattr(Session, "save", deleting)
    whole = anakin.train(resumable(), tmp_path / "run")
    assert "had been deleted and was written again" in capsys.readouterr().out
    monkeypatch.undo()
    assert (tmp_path / "run" / "config.json").exists()
    again = anakin.train(resumable(), tmp_path / "run", quiet=True)
    assert bits(again.weights) == bits(whole.weights)
    assert without_times(again.metrics) == without_times(whole.metrics)


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


@pytest.mark.parametrize(
    ("changes", "begin", "learners"),
    [
        pytest.param(REPLAY, 1, (1, 2), marks=pytest.mark.slow),
        pytest.param({}, 0, (1, 2), marks=pytest.mark.slow),
        pytest.param(REPLAY, 1, (1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param(R2D2, 1, (1, 2, 3, 4), marks=pytest.mark.slow),
        pytest.param(
            {**D4PG, "env_kwargs": {"continuous": True}}, 1, (1, 2), marks=pytest.mark.slow
        ),
    ],
    ids=["dqn", "ppo", "dqn_on_more_learners", "r2d2_on_more_learners", "d4pg"],
)
def test_sebulba_resumes_its_learner(changes, begin, learners, tmp_path, monkeypatch, capsys):
    """Two learner devices learn until the run stops, and ``learners`` then; ``begin`` is the number
    of updates before the first gradient step."""
    measured = []
    monkeypatch.setattr(HangLimits, "add_update", lambda limits, seconds: measured.append(seconds))

    def run_on(learners):
        devices = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": learners}
        return resumable(**{**changes, "env": "dummy:counting", "cpu_devices": 8, **devices})

    Stops(monkeypatch, 3)
    with pytest.raises(errors.PreemptedError):
        sebulba.train(run_on((1, 2)), tmp_path / "run", quiet=True)
    run = run_on(learners)
    before = last_arrays(tmp_path / "run")
    assert before["rest/train/step"] == 4
    began = rows_of(tmp_path / "run")
    result = sebulba.train(run, tmp_path / "run")
    out = capsys.readouterr().out
    assert "resumed from update 4" in out
    assert "environments start new episodes" in out
    assert [row["step"] for row in result.metrics] == [128 * (i + 1) for i in range(10)]
    after = last_arrays(tmp_path / "run")
    assert after["rest/train/step"] == 10
    np.testing.assert_array_equal(before["rest/key"], after["rest/key"])
    # The optimizer's counts continue.
    counts = [name for name in after if name.startswith("rest/") and name.endswith("count")]
    assert counts
    for name in counts:
        assert after[name] / before[name] == (10 - begin) / (4 - begin)
    # Updates that only fill the replay buffer do not tell how long one may take.
    assert len(measured) == 10 - begin
    if changes:
        assert (after["replay/ring/count"] == 10).all()
    # Times are those of both starts; a start with nothing left to do adds none.
    updating = sum(row["time/learner_update"] for row in result.metrics)
    assert updating > sum(row["time/learner_update"] for row in began) > 0
    assert result.summary["breakdown"]["learner_update"] == pytest.approx(updating)
    again = sebulba.train(run, tmp_path / "run", quiet=True).summary
    assert again["breakdown"] == result.summary["breakdown"]
