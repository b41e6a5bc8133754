"""The benchmark of returns against the batch: what it changes, what it skips, what it tabulates."""

import argparse
import json
import pathlib

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
    ]
    # Student's t of one degree of freedom is 12.706, times a deviation of sqrt(2) over sqrt(2).
    assert scaling.tabulate(scaling.collect(lines, "train")) == "\n".join(
        [
            "| batch | none | sqrt |",
            "| --- | --- | --- |",
            "| 64 | 12 ± 25 | 12 ± 25 |",
            "| 128 |  | 5 |",
            "| 256 | 2 ± 13 |  |",
        ]
    )
    assert list(scaling.collect(lines[1:2], "eval")) == ["reference"]


def test_a_run_has_a_line_and_a_figure(scaling, tmp_path):
    line = scaling.run(config(num_seeds=2, cpu_devices=1), 128, "sqrt")
    assert json.loads(json.dumps(line)) == line
    assert (line["steps"], line["updates"]) == (4096, 32)
    # CartPole's return is at least 8, its evaluation at most 500.
    assert len(line["train"]) == len(line["eval"]) == 2
    assert min(line["train"]) >= 8
    assert max(line["eval"]) <= 500
    figure = scaling.draw([{**line, "env": "e", "batch": 128, "way": "sqrt"}])
    training, evaluation = figure.axes
    assert training.containers[0].lines[0].get_xydata()[0, 0] == 128
    assert evaluation.get_title() == "e: return of the final, greedy evaluation"
