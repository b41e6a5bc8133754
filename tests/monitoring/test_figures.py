"""Learning curves: groups and labels, intervals, figures and tables, and rejected arguments."""

import json
import math
import pathlib
import re
import subprocess
import sys
import threading
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from rich.console import Console

from podracer import plot
from podracer.errors import ConfigError, ExitCode
from podracer.monitoring import figures
from podracer.monitoring.curves import (
    MAX_POINTS,
    group_runs,
    mean_and_interval,
    mean_curve,
    read_run,
    read_seeds,
)
from tests.helpers import is_one_error

RETURN = figures.RETURN
PNG = b"\x89PNG\r\n\x1a\n"
SVG = "{http://www.w3.org/2000/svg}"


def write_run(workdir: pathlib.Path, rows=None, *, seed=0, total_steps=400, **config) -> str:
    """Writes a run; by default returns 0, 10, 20, 30 at steps 100 to 400, one second apart."""
    workdir.mkdir()
    config = {
        "env": "gymnax:CartPole-v1",
        "env_params": {},
        "agent": "ppo",
        "seed": seed,
        "learning_rate": 0.01,
        "ppo": {"clip": 0.2},
        "evaluation": {"episodes": 128},
        **config,
    }
    content = {"config": config, "sizes": {"total_steps": total_steps}}
    (workdir / "config.json").write_text(json.dumps(content))
    if rows is None:
        rows = returns(0.0, 10.0, 20.0, 30.0)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(workdir)


def returns(*values, second=1.0):
    """Rows 100 steps and ``second`` seconds apart; ... stands for a row without an episode."""
    rows = []
    for number, value in enumerate(values, 1):
        row = {"step": 100 * number, "wall_time": second * number, "train/episodes": 0}
        row["time/steps_per_second"] = 100 / second
        rows.append(row if value is ... else {**row, RETURN: value})
    return rows


def groups_of(*workdirs, metric=RETURN):
    return group_runs([read_run(workdir, metric) for workdir in workdirs])


def svg_lines(path, panel=1) -> int:
    """The number of curves in a panel: lines in one of our colours, unlike axes and grid."""
    root = ElementTree.parse(path).getroot()
    (axes,) = (g for g in root.iter(f"{SVG}g") if g.get("id") == f"axes_{panel}")
    lines = [g for g in axes.iter(f"{SVG}g") if (g.get("id") or "").startswith("line2d")]
    styles = [path.get("style") or "" for g in lines for path in g.findall(f"{SVG}path")]
    return sum(any(color in style for color in figures.COLORS[:-1]) for style in styles)


def svg_bands(path) -> int:
    return pathlib.Path(path).read_text().count('id="FillBetweenPolyCollection')


def test_runs_that_differ_only_in_their_seed_are_one_group(tmp_path):
    runs = [
        write_run(tmp_path / f"{agent}-{rate}-{seed}", agent=agent, learning_rate=rate, seed=seed)
        for agent, rate in (("vtrace", 0.01), ("ppo", 0.001))
        for seed in (3, 1)
    ]
    one = groups_of(*runs[:2])
    assert [(group.label, [run.seed for run in group.runs]) for group in one] == [
        ("agent=vtrace", [3, 1])
    ]
    # In any order; labels leave out the settings that all runs share.
    two = groups_of(runs[0], runs[2], runs[1], runs[3])
    assert [(group.label, len(group.runs)) for group in two] == [
        ("agent=vtrace, learning_rate=0.01", 2),
        ("agent=ppo, learning_rate=0.001", 2),
    ]


def test_the_agents_of_a_run_with_several_seeds_are_drawn_as_seeds(tmp_path, capsys):
    rows = returns(5.0, 15.0)
    for i, row in enumerate(rows):
        row |= {f"seed_3/{RETURN}": 10.0 * i, f"seed_4/{RETURN}": 10.0 + 10 * i}
    several = write_run(tmp_path / "several", rows, seed=3, num_seeds=2)
    one = write_run(tmp_path / "one", returns(0.0, 0.0), seed=7, num_seeds=1)
    found = read_seeds(several, RETURN)
    assert [run.seed for run in found] == [3, 4]
    assert [run.value.tolist() for run in found] == [[0, 10], [10, 20]]
    # Metrics that are not an agent's are the run's, and a run of one seed joins the others.
    assert len(read_seeds(several, "time/steps_per_second")) == 1
    figures.plot_runs([several, one], str(tmp_path / "curves"), RETURN, "both", 1, [], [])
    assert re.search(r"ppo +│ +3 ", capsys.readouterr().out)


def test_labels_leave_out_the_sections_of_other_agents(tmp_path):
    runs = [
        write_run(tmp_path / "a", agent="vtrace", ppo={"clip": 0.2}),
        write_run(tmp_path / "b", agent="ppo", ppo={"clip": 0.1}),
    ]
    labels = [group.label for group in groups_of(*runs)]
    assert labels == ["agent=vtrace", "agent=ppo, ppo.clip=0.1"]
    runs.append(write_run(tmp_path / "c", agent="vtrace", ppo={"clip": 0.3}))
    labels = [group.label for group in groups_of(*runs)]
    assert labels[::2] == ["agent=vtrace, ppo.clip=0.2", "agent=vtrace, ppo.clip=0.3"]


def test_labels_may_name_some_settings_only(tmp_path):
    runs = [
        read_run(write_run(tmp_path / agent, agent=agent, learning_rate=rate), RETURN)
        for agent, rate in (("vtrace", 0.01), ("ppo", 0.001))
    ]
    assert [group.label for group in group_runs(runs, ["agent"])] == ["agent=vtrace", "agent=ppo"]
    both = [group.label for group in group_runs(runs, ["learning_rate", "ppo.clip"])]
    assert both == ["learning_rate=0.01, ppo.clip=0.2", "learning_rate=0.001, ppo.clip=0.2"]


def test_labels_name_nested_settings_and_settings_that_some_runs_lack(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", ppo={"clip": 0.1}),
        write_run(tmp_path / "c", env_params={"gravity": 5.0}),
    ]
    assert [group.label for group in groups_of(*runs)] == [
        "ppo.clip=0.2, env_params.gravity=default",
        "ppo.clip=0.1, env_params.gravity=default",
        "ppo.clip=0.2, env_params.gravity=5.0",
    ]


def test_the_interval_is_student_t():
    """t for 3 degrees of freedom, 97.5 %, is 3.182; the deviation of 1, 2, 3, 6 is sqrt(14 / 3)."""
    mean, half = mean_and_interval(np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [6.0, 5.0]]))
    np.testing.assert_allclose(mean, [3, 5])
    np.testing.assert_allclose(half, [3.18245 * math.sqrt(14 / 3) / 2, 0], rtol=1e-5)
    # For 1 degree of freedom it is 12.706, and half the difference is deviation over sqrt(2).
    np.testing.assert_allclose(mean_and_interval(np.array([[0.0], [2.0]]))[1], 12.7062, rtol=1e-5)
    assert mean_and_interval(np.array([[0.0, 2.0]]))[1] is None


def test_a_curve_covers_the_steps_that_all_seeds_have_reached(tmp_path):
    rows = returns(..., 4.0, ..., 8.0, 9.0, second=3.0)
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rows, seed=1)]
    (group,) = groups_of(*runs)
    curve = mean_curve(group)
    np.testing.assert_allclose(curve.x["step"], [200, 300, 400])
    np.testing.assert_allclose(curve.x["wall_time"], [(2 + 6) / 2, (3 + 9) / 2, (4 + 12) / 2])
    # The second run's 6 at step 300 is between its 4 and 8.
    np.testing.assert_allclose(curve.mean, [(10 + 4) / 2, (20 + 6) / 2, (30 + 8) / 2])
    np.testing.assert_allclose(curve.half_width, 12.7062 * np.array([3, 7, 11]), rtol=1e-5)


def test_a_curve_of_many_rows_has_few_points(tmp_path):
    run = write_run(tmp_path / "a", returns(*map(float, range(5000))))
    curve = mean_curve(groups_of(run)[0])
    assert len(curve.mean) == MAX_POINTS
    np.testing.assert_allclose(curve.mean, curve.x["step"] / 100 - 1)


def test_smoothing_is_a_moving_average(tmp_path):
    (group,) = groups_of(write_run(tmp_path / "a", returns(0.0, 3.0, 0.0, 9.0)))
    np.testing.assert_allclose(mean_curve(group, smooth=3).mean, [1.5, 1, 4, 4.5])
    np.testing.assert_allclose(mean_curve(group, smooth=1).mean, [0, 3, 0, 9])
    np.testing.assert_allclose(mean_curve(group, smooth=4).mean[2], 3)
    assert mean_curve(group, smooth=1000).mean.shape == (4,)


def test_the_command_writes_figures_and_prints_a_table(tmp_path, capsys):
    runs = [
        write_run(
            tmp_path / f"{agent}{seed}", returns(1.0, high, high - seed), seed=seed, agent=agent
        )
        for agent, high in (("ppo", 20.0), ("vtrace", 2000.0))
        for seed in (0, 2)
    ]
    runs.append(write_run(tmp_path / "one", agent="other", total_steps=300))
    out = tmp_path / "new folder" / "curves"
    assert plot.main([*runs, f"--out={out}"]) == ExitCode.OK
    assert out.with_suffix(".png").read_bytes().startswith(PNG)
    assert [svg_lines(f"{out}.svg", panel) for panel in (1, 2)] == [3, 3]
    # Two groups have an interval in two panels; that of a single seed has none.
    assert svg_bands(f"{out}.svg") == 4
    table = capsys.readouterr().out
    assert "95 % Student-t interval" in table
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    ppo, vtrace, other = (row for row in cells if row and row[0].startswith("agent="))
    # The mean of 20 and 18, and 12.706 half their difference.
    assert ppo == ["agent=ppo", "2", "300", "19.00 ± 12.71", "20.00", "3.0", "100"]
    assert vtrace[3:5] == ["1,999 ± 13", "2,000"]
    assert other[:5] == ["agent=other", "1", "400", "30.00", "30.00"]


def test_one_panel_and_reproducible_files(tmp_path, capsys):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)]
    svg = tmp_path / "curves.svg"
    texts = []
    for axis in ("step", "time", "time"):
        # A suffix in --out is not doubled.
        assert plot.main([*runs, f"--x={axis}", f"--out={svg}"]) == ExitCode.OK
        assert svg_lines(svg) == svg_bands(svg) == 1
        texts.append(svg.read_text())
        assert "axes_2" not in texts[-1]
    assert texts[0] != texts[1] == texts[2]


def test_a_metric_of_few_rows(tmp_path, capsys):
    rows = returns(1.0, 2.0)
    rows[-1].update({figures.EVALUATION: 7.0})
    runs = [write_run(tmp_path / str(seed), rows, seed=seed) for seed in (0, 1)]
    arguments = [*runs, "--metric=eval/episode_return", f"--out={tmp_path / 'curves'}"]
    assert plot.main(arguments) == ExitCode.OK
    assert "7.000 ± 0.000" in capsys.readouterr().out


def test_labels_too_long_to_read_can_be_chosen(tmp_path, capsys):
    settings = [{f"section_{i}": {"setting": 10**j} for i in range(4)} for j in (1, 2)]
    runs = [write_run(tmp_path / str(j), **x) for j, x in enumerate(settings)]
    arguments = [*runs, f"--out={tmp_path / 'curves'}"]
    assert plot.main(arguments) == ExitCode.OK
    assert "choose some of them, as in --label=section_0.setting" in capsys.readouterr().out
    assert plot.main([*arguments, "--label=section_0.setting"]) == ExitCode.OK
    assert "choose some" not in capsys.readouterr().out
    assert plot.main([*arguments, "--name=ten", "--name=a hundred"]) == ExitCode.OK
    assert re.search(r"│ ten .*│ a hundred ", capsys.readouterr().out, re.DOTALL)
    svg = (tmp_path / "curves.svg").read_text()
    assert "<!-- a hundred (1 seed) -->" in svg


def test_unfinished_runs_and_nan_are_drawn_with_a_warning(tmp_path, capsys):
    rows = returns(0.0, None, 20.0, 25.0)
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rows, seed=1, total_steps=900)]
    # The last line of a process that was killed while it wrote.
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 500, "wall_t')
    assert plot.main([*runs, f"--out={tmp_path / 'curves'}"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert f"{runs[1]} is unfinished, at 400 of 900 steps" in out
    assert f"{runs[1]}: left out 1 row(s) in which {RETURN} is NaN or infinite" in out
    assert f"{runs[0]} is" not in out
    # The missing 10 at step 200 is interpolated.
    np.testing.assert_allclose(mean_curve(groups_of(*runs)[0]).mean, [0, 10, 20, 27.5])


BAD = {
    "nothing": (lambda at: [str(at / "nothing")], "there is no such folder"),
    "no run": (lambda at: [str(at)], "is not a run: it has no config.json"),
    "folder of runs": (lambda at: [write_run(at / "a") and str(at)], "it contains runs, specify"),
    "file": (lambda at: [write_run(at / "a") + "/config.json"], "is a file, not a run"),
    "no rows": (lambda at: [write_run(at / "a", [])], "has no rows"),
    "no metrics": (lambda at: [without_metrics(at / "a")], "has no metrics.jsonl"),
    "metric": (
        lambda at: [write_run(at / "a"), "--metric=train/episode_retrn"],
        "unknown metric 'train/episode_retrn'; did you mean train/episode_return",
    ),
    "metric is not there": (
        lambda at: [write_run(at / "a", returns(..., ...))],
        "a: unknown metric 'train/episode_return'",
    ),
    "always null": (
        lambda at: [write_run(at / "a", returns(None, ...))],
        "is NaN or infinite in all of its 1 rows",
    ),
    "twice": (
        lambda at: [write_run(at / "a"), write_run(at / "b")],
        "b have the same config and the same seed, 0, so they count as one sample",
    ),
    "nothing in common": (
        lambda at: [
            write_run(at / "a", returns(1.0, ..., ...)),
            write_run(at / "b", returns(..., ..., 1.0), seed=1),
        ],
        "have no steps in common: one begins at 300, another one ends at 100",
    ),
    "damaged": (lambda at: [write_run(at / "a", [["step"]])], "line 1 lacks 'step'"),
    "backwards": (
        lambda at: [write_run(at / "a", returns(1.0, 2.0)[::-1])],
        "'step' does not increase from row to row",
    ),
    "label": (
        lambda at: [write_run(at / "a"), "--label=agents"],
        "--label: unknown setting 'agents'; did you mean agent",
    ),
    "names": (
        lambda at: [write_run(at / "a"), write_run(at / "b", agent="dqn"), "--name=PPO"],
        "--name: 1 names for 2 curves, which are: agent=ppo; agent=dqn",
    ),
    "same label": (
        lambda at: [write_run(at / "a"), write_run(at / "b", agent="dqn"), "--label=env"],
        "--label: 2 curves would be labelled 'env=gymnax:CartPole-v1'; name a setting that differs",
    ),
    "smoothing": (lambda at: [write_run(at / "a"), "--smooth=0"], "must be at least 1, got 0"),
    "unwritable": (
        lambda at: [write_run(at / "a"), f"--out={at / 'a' / 'config.json' / 'curves'}"],
        "is not writable: ",
    ),
}


def without_metrics(workdir) -> str:
    write_run(workdir)
    (workdir / "metrics.jsonl").unlink()
    return str(workdir)


@pytest.mark.parametrize("name", BAD)
def test_impossible_figures_are_rejected_with_a_one_line_error(name, tmp_path, capsys, monkeypatch):
    arguments, message = BAD[name]
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plot.main(arguments(tmp_path / "runs")) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert is_one_error(error)
    assert not list(tmp_path.glob("curves*"))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_damaged_file_is_named_in_the_error(name, tmp_path):
    run = write_run(tmp_path / "a")
    (tmp_path / "a" / name).write_text("{'single': 'quotes'}\n")
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        read_run(run, RETURN)


def test_draw_run_writes_a_picture(tmp_path):
    rows = returns(1.0, ..., 2.0, 3.0)
    rows[-1].update({figures.EVALUATION: 7.0, f"{figures.EVALUATION}_std": 0.5})
    for name, some in (("whole", rows), ("one row", rows[:1])):
        run = write_run(tmp_path / name, some)
        path = figures.draw_run(run)
        assert path == tmp_path / name / "learning_curve.png"
        assert path.read_bytes().startswith(PNG)


def test_draw_run_shows_training_and_evaluations(tmp_path, monkeypatch):
    rows = returns(1.0, ..., 2.0, None)
    for row in (rows[1], rows[3]):
        row.update({figures.EVALUATION: row["step"] / 10, f"{figures.EVALUATION}_std": 0.5})
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    figures.draw_run(write_run(tmp_path / "a", rows, seed=7))
    (axes,) = drawn[0].axes
    training, (evaluation, _, (deviation,)) = axes.lines[0], axes.containers[0]
    np.testing.assert_array_equal(training.get_xydata(), [[100, 1], [300, 2], [400, np.nan]])
    np.testing.assert_array_equal(evaluation.get_xydata(), [[200, 20], [400, 40]])
    np.testing.assert_array_equal(deviation.get_segments()[1], [[400, 39.5], [400, 40.5]])
    assert axes.get_title() == "ppo on gymnax:CartPole-v1, seed 7"


def test_draw_run_shows_the_interval_over_agents(tmp_path, monkeypatch):
    rows = returns(1.0, 2.0)
    for row in rows:
        row[f"{figures.RETURN}_interval"] = 0.25
    rows[1] |= {figures.EVALUATION: 7.0, f"{figures.EVALUATION}_std": 0.5}
    rows[1][f"{figures.EVALUATION}_interval"] = 3.0
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    figures.draw_run(write_run(tmp_path / "a", rows, num_seeds=3))
    (axes,) = drawn[0].axes
    (band,) = [x for x in axes.collections if isinstance(x, PolyCollection)]
    corners = {tuple(x) for x in band.get_paths()[0].vertices}
    assert {(100, 0.75), (100, 1.25), (200, 1.75), (200, 2.25)} <= corners
    _, _, (error,) = axes.containers[0]
    np.testing.assert_array_equal(error.get_segments()[0], [[200, 4], [200, 10]])


def test_draw_run_without_an_episode_draws_nothing(tmp_path):
    rows = returns(..., ...)
    rows[-1].update({figures.EVALUATION: 7.0, f"{figures.EVALUATION}_std": 0.5})
    assert figures.draw_run(write_run(tmp_path / "a", rows)) is None
    assert not (tmp_path / "a" / "learning_curve.png").exists()


def test_drawing_in_threads_is_safe(tmp_path):
    runs = [write_run(tmp_path / str(i), seed=0) for i in range(5)]
    threads = [threading.Thread(target=figures.draw_run, args=(run,)) for run in runs[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = figures.draw_run(runs[0]).read_bytes()
    for run in runs[1:]:
        assert (pathlib.Path(run) / "learning_curve.png").read_bytes() == expected


def test_importing_is_quick_and_drawing_leaves_pyplot_alone(tmp_path):
    """matplotlib is imported by drawing; pyplot and JAX are never imported."""
    code = f"""
import sys
from podracer import plot
from podracer.monitoring import figures
assert not {{"jax", "matplotlib", "scipy"}} & set(sys.modules)
figures.draw_run({write_run(tmp_path / "a")!r})
plot.main([{str(tmp_path / "a")!r}, "--out={tmp_path / "curves"}"])
assert "matplotlib.figure" in sys.modules
assert not {{"jax", "matplotlib.pyplot"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_labels_are_not_interpreted_as_markup(tmp_path):
    runs = [write_run(tmp_path / name, env_kwargs={"map": f"[{name}]"}) for name in ("red", "b")]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(figures.tabulate(groups_of(*runs), RETURN))
    assert "env_kwargs.map=[red]" in capture.get()


def test_a_long_legend_leaves_room_for_the_curves(tmp_path):
    """matplotlib warns if there is no room left, and tests turn warnings into errors."""
    runs = [
        write_run(tmp_path / str(i), **{f"a_setting_with_quite_a_name_{j}": i for j in range(6)})
        for i in range(12)
    ]
    groups = groups_of(*runs)
    for axis in ("step", "both"):
        figures.draw(groups, RETURN, figures.X[axis]).draw_without_rendering()
