"""Figures and tables of sweeps: settings, the best so far, and rejected arguments."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from podracer import config as config_lib
from podracer import plot
from podracer.config import Config
from podracer.monitoring import alone, sweeps
from podracer.monitoring.figures import EVALUATION
from podracer.training import command_line

SWEEP = {"learning_rate": [1e-4, 1e-2], "ppo": {"clip": [0.1, 0.3]}}
# Of four agents at steps 100 to 300; the last one diverges.
RETURNS = [[1.0, 5.0, 4.0], [2.0, 2.0, 2.0], [0.0, 1.0, 9.0], [3.0, np.nan, np.nan]]


@pytest.fixture
def workdir(tmp_path):
    def write(name="sweep", **changes):
        folder = tmp_path / name
        folder.mkdir()
        config = {"env": "gymnax:CartPole-v1", "agent": "ppo", "seed": 0, "num_seeds": 1}
        config |= {"sweep": SWEEP, **changes}
        content = {"config": config, "sizes": {"total_steps": 300}}
        (folder / "config.json").write_text(json.dumps(content))
        rows = []
        for number in range(3):
            row = {"step": 100 * (number + 1), "wall_time": number + 1.0}
            for i, values in enumerate(RETURNS):
                row[f"member_{i}/train/diverged"] = float(np.isnan(values[number]))
                if not np.isnan(values[number]):
                    row[f"member_{i}/{EVALUATION}"] = values[number]
            rows.append(row)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    return write


def test_agents_are_read_with_their_settings(workdir):
    agents = sweeps.read_sweep(workdir(), EVALUATION)
    assert [list(agent.value) for agent in agents] == [*RETURNS[:3], [3.0]]
    assert [agent.remark for agent in agents] == ["", "", "", " (diverged)"]
    assert agents[2].point.settings == {"learning_rate": 1e-2, "ppo.clip": 0.1}


def test_points_with_several_seeds_are_compared_by_their_mean(workdir, tmp_path, capsys):
    """The second point has the agent with the largest return, and another one that diverges, up to
    whose last row its mean is known."""
    folder = workdir(sweep={"learning_rate": [0.25, 0.5]}, num_seeds=2)
    first, second = sweeps.read_sweep(folder, EVALUATION)
    assert list(first.value) == [1.5, 3.5, 3]
    # Student's t for two values: 12.706 times their distance over two.
    assert first.half_width == pytest.approx(12.706, rel=1e-4)
    assert (list(second.step), list(second.value)) == ([100], [1.5])
    assert plot.main([folder, "--sweep", f"--out={tmp_path / 'figure'}"]) == 0
    printed = capsys.readouterr().out
    assert "3.00 ± 12.71" in printed
    assert "member_2 to member_3 (1 diverged)" in printed
    flags = "--config.learning_rate=0.25 --config.seed=0 --config.num_seeds=2"
    assert f"the best: member_0 to member_1, {flags}" in printed


def test_settings_are_those_after_the_last_selection(workdir):
    folder = workdir(
        sweep={"learning_rate": "uniform(0.1,1)"}, population=4, selection={"every": 1}
    )
    with open(f"{folder}/metrics.jsonl", "a") as file:
        row = {"step": 400, "wall_time": 4.0, "member_1/learning_rate": 0.75}
        file.write(json.dumps(row) + "\n")
    settings = [x.point.settings["learning_rate"] for x in sweeps.read_sweep(folder, EVALUATION)]
    assert settings[1] == 0.75
    assert 0.75 not in (settings[0], settings[2])


def test_the_best_so_far_is_that_of_any_agent(workdir):
    steps, best = sweeps.best_so_far(sweeps.read_sweep(workdir(), EVALUATION))
    assert list(steps) == [100, 200, 300]
    assert list(best) == [3, 5, 9]


def test_the_figure_has_a_line_for_each_agent_and_an_axis_for_each_setting(workdir):
    agents = sweeps.read_sweep(workdir(), EVALUATION)
    left, right = sweeps.draw(agents, EVALUATION, "title").axes
    lines = [line.get_ydata() for line in left.lines if len(line.get_xdata()) == 3]
    axes = [line for line in left.lines if list(line.get_ydata()) == [0, 1]]
    assert (len(lines), len(axes)) == (4, 3)
    # The best one is drawn last, with the larger rate, the smaller clip and the largest return.
    assert list(lines[-1]) == [1, 0, 1]
    texts = [text.get_text() for text in left.texts]
    assert {"learning_rate\n(logarithmic)", "ppo.clip", EVALUATION, "0.0001", "0.3"} <= set(texts)
    assert list(right.lines[-1].get_ydata()) == [3, 5, 9]


def test_one_value_for_all_agents_is_drawn(workdir):
    folder = workdir(sweep={"learning_rate": [1e-3] * 4})
    left, _ = sweeps.draw(sweeps.read_sweep(folder, EVALUATION), EVALUATION, "").axes
    lines = [list(x.get_ydata()) for x in left.lines if len(x.get_xdata()) == 2]
    assert [line[0] for line in lines if line != [0, 1]] == [0.5] * 4


def test_the_command_prints_the_agents_and_the_flags_of_the_best(workdir, tmp_path, capsys):
    assert plot.main([workdir(), "--sweep", f"--out={tmp_path / 'figure'}"]) == 0
    printed = capsys.readouterr().out
    names = [line.split()[1] for line in printed.splitlines() if "member_" in line and "│" in line]
    assert names == ["member_2", "member_0", "member_3", "member_1"]
    assert "member_3 (diverged)" in printed
    flags = "--config.learning_rate=0.01 --config.ppo.clip=0.1 --config.seed=0"
    assert f"the best: member_2, {flags}" in printed
    for suffix in ("png", "svg"):
        assert (tmp_path / f"figure.{suffix}").stat().st_size > 1000


def parse(command: list[str]) -> tuple[Config, str]:
    config, _, options = command_line.parse_config("anakin", command_line.OPTIONS, command[2:])
    return config_lib.parse(config), options["workdir"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--config.sweep.learning_rate=[1e-4,1e-2]", "--config.sweep.ppo.clip=[0.1,0.3]"],
        ["--config.sweep.ppo.clip=uniform(0.1,0.3)", "--config.population", "4", "--restart"],
        ["--config.sweep.ppo.gae_lambda=[0.9,0.95]", "--config.num_seeds=2", "--config.seed=5"],
    ],
)
def test_the_command_of_a_point_trains_it_alone(flags):
    command = ["python", "-m", "podracer.anakin", "--config", "cartpole", "--workdir", "runs/x"]
    command += ["--config.total_steps=4096", *flags, "--quiet"]
    config, _ = parse(command)
    content, point = {"config": dataclasses.asdict(config), "command": command}, config.points[1]
    found, workdir = parse(shlex.split(alone.command_alone(content, point, "runs/x")))
    assert workdir == f"runs/x-{point.members[0].name}"
    assert found.total_steps == 4096
    assert [x.seed for x in found.members] == [x.seed for x in point.members]
    assert dataclasses.replace(found, num_seeds=1) == config.alone(point.members[0])


def test_a_command_that_lacks_a_part_of_the_sweep_is_not_that_of_a_point():
    command = ["python", "-m", "podracer.anakin", "--config=cartpole"]
    config, _ = parse([*command, "--config.sweep.ppo.gae_lambda=[0.9,0.95]"])
    for recorded in ({}, {"command": []}, {"command": command}):
        content = {"config": dataclasses.asdict(config), **recorded}
        assert alone.command_alone(content, config.points[0], "runs/x") == ""


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"sweep": {}}, [], "is not a sweep: its config.sweep is empty"),
        ({}, ["--metric=eval/returns"], "unknown metric 'eval/returns'"),
        ({}, ["--smooth=3"], "--x, --smooth, --label and --name have no effect with --sweep"),
        ({}, ["other"], "--sweep draws one sweep, got 2 workdirs"),
    ],
)
def test_impossible_figures_are_rejected(changes, arguments, message, workdir, capsys):
    assert plot.main([workdir(**changes), *arguments, "--sweep"]) == 2
    assert message in capsys.readouterr().err
