"""The benchmark of returns against the batch: what it changes, what it skips, what it tabulates."""

import argparse
import json
import pathlib

import numpy as np
import pytest

from podracer.config import default_config

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scaling

    return scaling


def config(**changes):
    """Its own batch is 64 transitions, 16 a gradient step."""
    config = default_config()
    config.num_envs, config.unroll_length, config.total_steps = 8, 8, 4096
    config.num_minibatches, config.network.hidden = 4, (8,)
    config.evaluation.episodes = 8
    config.update(changes)
    return config


def test_ways_refer_to_a_gradient_steps_transitions(scaling):
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


def test_what_has_its_line_is_not_run_again(scaling, monkeypatch, tmp_path):
    ran = []

    def run(config, batch, way):
        ran.append((batch, way, config.seed))
        return {"train": [1.0, 2.0], "eval": [3.0, 4.0]}

    monkeypatch.setattr(scaling, "read_config", lambda _: config())
    monkeypatch.setattr(scaling, "run", run)
    out = tmp_path / "lines.jsonl"
    scaling.measure(arguments(out, 64, 128))
    assert ran == [(64, "reference", 0), (128, "none", 0), (128, "sqrt", 0)]

    # What a run that was interrupted did not write down is run again, and other seeds are others.
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    ran.clear()
    scaling.measure(arguments(out, 64, 128))
    assert ran == [(128, "sqrt", 0)]
    scaling.measure(arguments(out, 64, seed=2))
    assert ran[1:] == [(64, "reference", 2)]
    assert [line["seeds"] for line in scaling.read(out)] == [[0, 1], [0, 1], [0, 1], [2, 3]]

    with pytest.raises(SystemExit, match="100 is no multiple of 8 steps"):
        scaling.measure(arguments(out, 100))


def line(batch, way, *returns):
    return {"env": "e", "batch": batch, "way": way, "train": list(returns), "eval": list(returns)}


def test_tables_merge_seeds_and_set_out_from_the_reference(scaling):
    lines = [
        line(256, "none", 1.0),
        line(64, "reference", 10.0, 14.0),
        line(256, "none", 3.0),
        line(128, "sqrt", 5.0),
        line(256, "linear", 1234.56),
    ]
    # Student's t of one degree of freedom is 12.706, times a deviation of sqrt(2) over sqrt(2).
    assert scaling.tabulate(scaling.collect(lines, "train")) == "\n".join(
        [
            "| batch | none | sqrt | linear |",
            "| --- | --- | --- | --- |",
            "| 64 | 12.0 ± 25.4 | 12.0 ± 25.4 | 12.0 ± 25.4 |",
            "| 128 |  | 5.0 |  |",
            "| 256 | 2.0 ± 12.7 |  | 1,234.6 |",
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
def test_what_comes_of_a_run(seeds, scaling):
    found = scaling.run(config(num_seeds=seeds, cpu_devices=1), 128, "sqrt")
    assert json.loads(json.dumps(found)) == found
    assert (found["steps"], found["updates"]) == (4096, 32)
    assert len(found["train"]) == len(found["eval"]) == seeds
    # Of CartPole: who acts at random falls after some twenty steps, nobody stands longer than 500.
    assert min(found["train"]) > 10
    assert max(found["eval"]) <= 500
