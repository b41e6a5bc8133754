"""The benchmark of batch sizes: its scaling rules, skipped runs, tables and figures."""

import argparse
import json

import numpy as np
import pytest

from podracer.config import default_config


@pytest.fixture
def scaling(load):
    return load("scaling")


def config(**changes):
    """A config with 64 transitions per update and 16 per gradient step."""
    config = default_config()
    config.num_envs, config.unroll_length, config.total_steps = 8, 8, 4096
    config.num_minibatches, config.network.hidden = 4, (8,)
    config.evaluation.episodes = 8
    config.update(changes)
    return config


def test_scaling_rules_refer_to_the_transitions_per_gradient_step(scaling):
    sqrt, linear = ({"batch_rule": x, "reference_batch": 16} for x in ("sqrt", "linear"))
    assert scaling.ways(config(), 64) == {"reference": {}}
    assert scaling.ways(config(), 32) == {"none": {}, "sqrt": sqrt, "linear": linear}
    assert scaling.ways(config(), 256) == {
        "none": {},
        "sqrt": sqrt,
        "linear": linear,
        "linear, warm-up": {**linear, "warmup": 2},
        "sqrt, 2 x epochs": {**sqrt, "num_epochs": 8},
        "same minibatch": {"num_minibatches": 16},
    }
    assert [*scaling.ways(config(), 64), *scaling.ways(config(), 128)] == scaling.WAYS


def arguments(out, *batches, **changes):
    given = {"config": None, "ways": ["none", "sqrt", "reference"], "num_seeds": 2, "torso": None}
    keys = ("agent", "total_steps", "seed", "cpu_devices")
    return argparse.Namespace(
        out=str(out), batches=batches, **{**dict.fromkeys(keys), **given, **changes}
    )


def test_runs_that_have_a_line_are_skipped(scaling, monkeypatch, tmp_path):
    ran = []

    def run(config, batch, way):
        ran.append((batch, way, config.seed))
        return {"train": [1.0, 2.0], "eval": [3.0, 4.0]}

    monkeypatch.setattr(scaling, "read_config", lambda _: config())
    monkeypatch.setattr(scaling, "run", run)
    out = tmp_path / "lines.jsonl"
    scaling.measure(arguments(out, 64, 128))
    assert ran == [(64, "reference", 0), (128, "none", 0), (128, "sqrt", 0)]

    # The run without a line is repeated, and other seeds are other runs.
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    ran.clear()
    scaling.measure(arguments(out, 64, 128))
    assert ran == [(128, "sqrt", 0)]
    scaling.measure(arguments(out, 64, seed=2))
    assert ran[1:] == [(64, "reference", 2)]
    assert [line["seeds"] for line in scaling.read(out)] == [[0, 1], [0, 1], [0, 1], [2, 3]]

    with pytest.raises(SystemExit, match="100 is not a multiple of unroll_length=8"):
        scaling.measure(arguments(out, 100))


def line(batch, way, *returns):
    return {"env": "e", "batch": batch, "way": way, "train": list(returns), "eval": list(returns)}


def test_tables_merge_seeds_and_contain_the_reference_in_each_column(scaling):
    lines = [
        line(256, "none", 1.0),
        line(64, "reference", 10.0, 14.0),
        line(256, "none", 3.0),
        line(128, "sqrt", 5.0),
        line(256, "linear", 1234.56),
    ]
    # The quantile for one degree of freedom is 12.706; the standard error is sqrt(2) / sqrt(2) = 1.
    assert scaling.tabulate(scaling.collect(lines, "train")) == "\n".join(
        [
            "| batch | none | sqrt | linear |",
            "| --- | --- | --- | --- |",
            "| 64 | 12.00 ± 25.41 | 12.00 ± 25.41 | 12.00 ± 25.41 |",
            "| 128 |  | 5.000 |  |",
            "| 256 | 2.00 ± 12.71 |  | 1,235 |",
        ]
    )
    assert list(scaling.collect(lines[1:2], "eval")) == ["reference"]


def test_a_figure_has_a_panel_for_each_environment_and_metric(scaling):
    lines = [line(256, "none", 1.0, 3.0), line(64, "reference", 4.0, 6.0), line(128, "none", 7.0)]
    figure = scaling.draw([*lines, {**line(64, "sqrt", 1.0), "env": "f"}])
    assert [axes.get_title() for axes in figure.axes] == [
        f"{env}: {title}" for env in "ef" for title in scaling.METRICS.values()
    ]
    curve = figure.axes[0].containers[0].lines[0].get_xydata()
    np.testing.assert_array_equal(curve, [[64, 5], [128, 7], [256, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_the_results_of_a_run(seeds, scaling):
    found = scaling.run(config(num_seeds=seeds, cpu_devices=1), 128, "sqrt")
    assert json.loads(json.dumps(found)) == found
    assert (found["steps"], found["updates"]) == (4096, 32)
    assert len(found["train"]) == len(found["eval"]) == seeds
    # CartPole episodes last about 20 steps under random actions, and at most 500.
    assert min(found["train"]) > 10
    assert max(found["eval"]) <= 500
