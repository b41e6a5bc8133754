"""Population-based training: bad agents copy good ones, and everything else stays as it was."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import anakin
from podracer.anakin.selection import make_select
from podracer.anakin.state import AnakinState, state_specs
from podracer.config import SelectionConfig, members
from podracer.config.sizes import make_sizes
from podracer.distributed.mesh import make_mesh, per_device
from podracer.errors import ConfigError, ExitCode
from podracer.learning import selection
from podracer.learning.selection import Distribution, Scores
from podracer.storage import checkpoint
from podracer.storage.workdir import read_rows
from podracer.training import builder, saved_run
from podracer.training.sweep_report import find_lineage
from podracer.types import TrainState, Weights
from tests.anakin.test_sweeps import config, run_sweep
from tests.helpers import make_config
from tests.training.resuming import Stops, without_times

SWEEP = {
    "learning_rate": "log_uniform(1e-4, 1e-2)",
    "discount": "uniform(0.9, 1)",
}
POPULATION = {
    "sweep": SWEEP,
    "population": 4,
    "selection": {"every": 2, "share": 0.25},
    "updates_per_call": 1,
    "total_steps": 16 * 8 * 8,
}


@pytest.mark.parametrize("share", [0.2, 0.25, 0.5])
def test_the_worst_copy_the_best(share):
    rng = np.random.default_rng(0)
    for count in (4, 5, 8):
        scores = rng.integers(0, 6, count).astype(np.float32)
        scores[0] = -np.inf
        found = selection.parents(jnp.asarray(scores), share)
        order = sorted(range(count), key=lambda i: (-scores[i], i))
        expected = list(range(count))
        for place in range(int(count * share)):
            expected[order[-1 - place]] = order[place]
        assert found.tolist() == expected


def test_those_that_have_diverged_are_not_copied():
    scores = jnp.array([-jnp.inf, -jnp.inf, 1.0, -jnp.inf])
    assert selection.parents(scores, 0.5).tolist() == [0, 1, 2, 2]


def weights_by_rank(scores, share):
    """CMA-ES's weights of the best, one after another."""
    best = int(len(scores) * share)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:best]
    found = [0.0] * len(scores)
    for rank, i in enumerate(order, 1):
        if np.isfinite(scores[i]):
            found[i] = np.log(best + 0.5) - np.log(rank)
    return np.array(found) / sum(found)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_best_count_by_their_rank(share):
    rng = np.random.default_rng(1)
    for count in (4, 5, 16):
        scores = rng.integers(0, 6, count).astype(np.float32)
        scores[rng.integers(count, size=count // 2 + 1)] = -np.inf
        found = np.asarray(selection.recombine(jnp.asarray(scores), share))
        np.testing.assert_allclose(found, weights_by_rank(scores, share), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_an_evolution_strategy_draws_settings_around_the_mean_of_the_best(devices):
    """Beside a loop over the rows: with a selection after each call, all that it knows is there."""
    changes = {**POPULATION, "cpu_devices": devices, "population": 8, "updates_per_call": 2}
    changes["selection"] = {"rule": "evolution", "every": 1, "share": 0.5, "resample": 0.0}
    run = config(**changes)
    scales = members.distributions(run.sweep)
    before = [dict(member.settings) for member in run.members]
    names = [f"member_{i}" for i in range(8)]
    *rows, last = anakin.train(run, quiet=True).metrics
    for row in rows:
        scores = [row[f"{name}/train/episode_return"] for name in names]
        weights = weights_by_rank(scores, 0.5)
        after = [{key: row[f"{name}/{key}"] for key in scales} for name in names]
        for key, scale in scales.items():
            position = sum(w * scale.position(x[key]) for w, x in zip(weights, before, strict=True))
            np.testing.assert_allclose(row[f"selection/{key}"], scale.at(position), rtol=1e-4)
            moved = [scale.position(x[key]) for x in after]
            ends = np.clip([position - 0.1, position + 0.1], 0, 1)
            closest = np.abs(np.subtract.outer(moved, ends)).min(1)
            np.testing.assert_allclose(closest, 0, atol=1e-4)
            assert len({round(float(x), 3) for x in moved}) == 2
        before = after
    # After the last update, each is reported with the settings that it was trained with.
    assert [{key: last[f"{name}/{key}"] for key in scales} for name in names] == before
    assert not any("parent" in key or key.startswith("selection/") for key in last)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_settings_move_by_a_share_of_their_scale_and_stay_on_it(logarithmic):
    drawn_from = Distribution(logarithmic, 1e-3, 1e-1)

    def explore(number, step, resample):
        keys = jax.random.split(jax.random.key(0), 500)
        return jax.vmap(
            lambda key: selection.explore(drawn_from, jnp.float32(number), key, step, resample)
        )(keys)

    middle = drawn_from.at(0.5)
    expected = [drawn_from.at(0.5 - 0.1), drawn_from.at(0.5 + 0.1)]
    found = np.unique(np.asarray(explore(middle, 0.1, 0.0)).round(7))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert set(np.asarray(explore(1e-1, 0.1, 0.0)) > 0.0999) == {True, False}
    assert float(explore(1e-1, 0.1, 0.0).max()) <= np.float32(1e-1)
    again = np.asarray(explore(middle, 0.0, 0.3))
    assert abs((np.abs(again - middle) > 1e-6).mean() - 0.3) < 0.07
    positions = np.sort(drawn_from.position(jnp.asarray(explore(middle, 0.0, 1.0))))
    np.testing.assert_allclose(positions, np.linspace(0, 1, 500), atol=0.08)


def test_a_selection_waits_for_an_episode_of_every_living_agent():
    def due(episodes, alive, updates):
        scores = Scores(jnp.asarray(episodes, float), jnp.zeros(2), jnp.full(2, 10))
        return bool(selection.is_due(scores, jnp.asarray(alive), jnp.int32(updates), 5))

    assert due([1, 1], [True, True], 15)
    assert not due([1, 1], [True, True], 14)
    assert not due([1, 0], [True, True], 99)
    assert due([1, 0], [True, False], 99)


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_take_over_all_that_is_learned_and_nothing_else(devices):
    sizes = make_sizes(config(num_seeds=4), devices)
    mesh, specs = make_mesh(jax.devices()[:devices], sizes.num_groups), state_specs(sizes)
    who = jnp.arange(4.0)
    state = AnakinState(
        train=TrainState(Weights(who, who), {"target": who}, (who, who), jnp.full(4, 10)),
        rollout=who[:, None],
        source=who[:, None],
        key=builder.run_keys([3] * 4, "cpu"),
        settings={"discount": 0.9 + who / 100},
        alive=jnp.full(4, True),
        # The second is the worst, and the last one the best.
        scores=Scores(jnp.ones(4), jnp.array([2.0, -5.0, 3.0, 7.0]), jnp.zeros(4, jnp.int32)),
    )

    def selected(num_updates):
        distributions = {"discount": Distribution(False, 0.9, 1.0)}
        select = make_select(SelectionConfig(every=10, share=0.25), distributions, num_updates)
        run = jax.jit(per_device(lambda x: select(x)[0], mesh, (specs,), specs))
        return jax.device_get(run(state))

    # None after the last update.
    assert selected(10).train.weights.params.tolist() == [0, 1, 2, 3]
    new = selected(11)
    for x in jax.tree.leaves((new.train.weights, new.train.target, new.train.opt_state)):
        assert x.tolist() == [0, 3, 2, 3]
    assert new.rollout[:, 0].tolist() == new.source[:, 0].tolist() == [0, 1, 2, 3]
    assert (new.scores.begin == 10).all()
    before, after = np.asarray(state.settings["discount"]), new.settings["discount"]
    np.testing.assert_array_equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert after[1] not in before[[1, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_copies_have_the_weights_of_others_and_settings_close_to_theirs(devices):
    """Without learning, weights show whose they are."""
    changes = {**POPULATION, "cpu_devices": devices, "population": 8}
    changes["selection"] = {"every": 2, "share": 0.5, "resample": 1.0}
    changes["sweep"] = {"value_cost": "uniform(0.25, 0.75)"}
    result = anakin.train(config(learning_rate=1e-30, **changes), quiet=True)
    start = anakin.train(
        config(learning_rate=1e-30, **{**changes, "selection": {"every": 99}}), quiet=True
    )
    first, last = (jax.tree.leaves(x.weights.params)[-2] for x in (start, result))
    names = [f"member_{i}" for i in range(8)]
    descends, copies = list(range(8)), 0
    settings = start.metrics[-1]
    values = [settings[f"{name}/value_cost"] for name in names]
    for number, row in enumerate(result.metrics, 1):
        parents = [row.get(f"{name}/parent") for name in names]
        assert (parents[0] is not None) == (number in (2, 4, 6))
        if parents[0] is None:
            continue
        for i, parent in enumerate(parents):
            new = row[f"member_{i}/value_cost"]
            assert 0.25 <= new <= 0.75
            assert parent == i or new != values[parent]
            assert parent != i or new == values[i]
        drawn = [row[f"member_{i}/value_cost"] for i, parent in enumerate(parents) if parent != i]
        # Each copy draws a number of its own.
        assert len(set(drawn)) == len(drawn)
        copies += len(drawn)
        descends = [descends[parent] for parent in parents]
        values = [row[f"{name}/value_cost"] for name in names]
    assert copies == 12
    for i, ancestor in enumerate(descends):
        np.testing.assert_allclose(last[i], first[ancestor], atol=1e-6)
    assert len(set(descends)) < 8


@pytest.fixture(scope="module")
def on_one_device():
    return anakin.train(config(**{**POPULATION, "cpu_devices": 1}), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_devices": 2, "agents_at_once": 1},
        {"cpu_devices": 4},
    ],
    ids=str,
)
def test_a_population_learns_the_same_on_any_devices_and_in_turns(changes, on_one_device):
    result = anakin.train(config(**{**POPULATION, **changes}), quiet=True)
    for a, b in zip(on_one_device.metrics, result.metrics, strict=True):
        assert {k: x for k, x in a.items() if "parent" in k} == {
            k: x for k, x in b.items() if "parent" in k
        }
        for name in ("loss/total", "member_3/learning_rate", "member_0/train/episode_return"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-4)


def test_one_that_has_diverged_goes_on_from_the_best():
    sweep = {"value_cost": "log_uniform(1, 1e38)"}
    whole = config(**{**POPULATION, "sweep": sweep}, max_grad_norm=0.0, learning_rate=1e-2, seed=1)
    rows = anakin.train(whole, quiet=True).metrics
    diverged = [[row[f"member_{i}/train/diverged"] for row in rows] for i in range(4)]
    # Until the next selection only, unless its new settings diverge as well.
    assert any(1 in x and x[x.index(1) :].count(0) for x in diverged), diverged


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["copy", "evolution"])
def test_resumed_is_never_stopped(rule, tmp_path, monkeypatch, capsys):
    def run(workdir, *more):
        changes = ["population=4", "selection.every=1", f"selection.rule={rule}"]
        changes += ["unroll_length=32", "total_steps=2048", "checkpoint.every=5"]
        flags = [*(f"--config.{x}" for x in changes), "--quiet", *more]
        return run_sweep(tmp_path / workdir, *flags)

    assert run("whole") == 0
    with monkeypatch.context() as patch:
        Stops(patch, 3)
        assert run("parts") == ExitCode.PREEMPTED
    assert run("parts") == 0
    rows = [without_times(read_rows(tmp_path / x)) for x in ("whole", "parts")]
    assert rows[0] == rows[1]
    assert any(row.get(f"member_{i}/parent", i) != i for row in rows[0] for i in range(4))
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    *_, birth = summary["lineage"]
    assert birth["member"] == summary["best_member"]
    best = f"member_{birth['member']}"
    assert (
        summary["members"][birth["member"]]["learning_rate"] == rows[0][-1][f"{best}/learning_rate"]
    )
    assert "each with its settings at the end" in summary["report"]
    # Each is evaluated with the settings that it had with the weights.
    settings = set()
    for update in checkpoint.list_updates(tmp_path / "whole"):
        found = [saved_run.read(tmp_path / "whole", i, update, None).config for i in range(4)]
        (row,) = [x for x in rows[0] if x["step"] == update * 8 * 32]
        assert [x.learning_rate for x in found] == [
            row[f"member_{i}/learning_rate"] for i in range(4)
        ]
        settings.add(tuple(x.learning_rate for x in found))
    assert len(settings) == 2
    assert run("whole", "--config.selection.every=0") == ExitCode.CONFIG
    assert "selection.every=1, not 0, which can't change" in capsys.readouterr().err


@pytest.mark.slow
def test_agents_that_differ_in_their_seed_are_selected():
    changes = {"num_seeds": 4, "sweep": {}, "population": 0, "selection": {"every": 1}}
    result = anakin.train(config(**{**POPULATION, **changes}), quiet=True)
    assert "seed_3/parent" in result.metrics[-2]
    assert result.summary["lineage"][-1]["member"] == result.summary["best_member"]


def test_ancestors_are_found_in_the_rows():
    population = make_config(sweep={"discount": [0.1, 0.2, 0.3]}).members
    rows = [
        {"step": step, **{f"member_{i}/parent": parent for i, parent in enumerate(parents)}}
        for step, parents in ((10, ()), (20, (0, 0, 2)), (30, (0, 1, 2)), (40, (0, 1, 1)))
    ]
    rows[1]["member_1/discount"] = 0.4
    rows[3]["member_2/discount"] = 0.5
    expected = [
        {"step": 0, "member": 0, "discount": 0.1},
        {"step": 20, "member": 1, "discount": 0.4},
        {"step": 40, "member": 2, "discount": 0.5},
    ]
    assert find_lineage(2, population, rows) == expected
    assert find_lineage(0, population, rows) == expected[:1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection": {"every": 1}}, "selection.share=0.25 of 1 agents is none"),
        ({"selection": {"rule": "best"}}, "unknown selection.rule 'best'"),
        ({"selection": {"every": -1}}, "selection.every must not be negative, got -1"),
        ({"selection": {"share": 0.6}}, r"selection.share must be in \(0, 0.5\], got 0.6"),
        ({"selection": {"step": 2.0}}, r"selection.step must be in \[0, 1\], got 2"),
        ({**POPULATION, "sweep": {"discount": [0.9, 1.0]}}, "sweep.discount is a list, but"),
        (
            {**POPULATION, "sweep": {"discount": "uniform(0, 1.01)"}},
            "an end of the sweep.*must be in",
        ),
        # What is in a replay buffer was raised to it.
        (
            {
                **{**POPULATION, "agent": "dqn"},
                "sweep": {"replay": {"priority_exponent": "uniform(0.2, 0.9)"}},
            },
            "sweep.replay.priority_exponent can't change during a run, as selection.every=",
        ),
    ],
)
def test_impossible_selections_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)
