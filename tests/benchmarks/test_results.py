"""docs/results.md is made from results.jsonl alone, and a line of it from a run."""

import pathlib
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from podracer.training import command_line

SMALL = (
    "total_steps=4_096", "num_envs=8", "unroll_length=64", "network.hidden=(8,)", "num_epochs=1",
    "num_minibatches=1",
)  # fmt: skip


@pytest.fixture
def results(load):
    return load("results")


@pytest.fixture
def lines(load):
    return load("results_lines")


@pytest.fixture
def page(load):
    return load("results_page")


@pytest.fixture
def tasks(load):
    """All tasks by name."""
    module = load("results_tasks")
    return {task.name: task for tasks in module.SETS.values() for task in tasks}


def test_the_page_and_the_readme_are_made_from_the_lines(lines, page):
    read = [lines.read_lines(path) for path in (lines.LINES, lines.PEERS)]
    assert read[0]
    assert page.PAGE.read_text() == page.page(*read)
    assert page.readme_table(*read) in page.README.read_text()


def test_every_run_has_a_folder_of_its_own_whose_name_is_short_enough(tasks):
    names = [task.folder(seed) for task in tasks.values() for seed in range(task.seeds)]
    assert len(set(names)) == len(names)
    assert max(len(name.encode()) for name in names) <= 255


@pytest.mark.slow
def test_the_figures_are_made_from_the_lines(lines, page, tasks, tmp_path, monkeypatch):
    read = lines.read_lines(lines.LINES)
    done = {line.task for line in read}
    committed = page.FIGURES
    names = [page.figure(title).name for title in page.titles(tasks[name] for name in done)]
    assert sorted(path.stem for path in committed.iterdir()) == sorted(names)
    for name in ("PAGE", "README", "FIGURES"):
        path = getattr(page, name)
        monkeypatch.setattr(page, name, tmp_path / path.name)
        if name != "FIGURES":
            (tmp_path / path.name).write_text(path.read_text())
    page.write(read, lines.read_lines(lines.PEERS))
    for name in names:
        old, new = (folder / f"{name}.svg" for folder in (committed, page.FIGURES))
        # Other versions of matplotlib draw the same curves in other words.
        if f"Matplotlib v{matplotlib.__version__}," in old.read_text():
            assert new.read_text() == old.read_text()


def test_lines_are_of_todays_tasks_and_settings(lines, tasks):
    """What was trained with other settings than the config has now has to be trained again."""
    read = lines.read_lines(lines.LINES)
    assert len({(line.task, line.seed) for line in read}) == len(read)
    for line in read:
        task = tasks[line.task]
        assert line.seed < task.seeds
        module, *arguments = task.command(line.seed)[1:]
        assert f"python -m {module} {' '.join(arguments)}" == line.command.replace("'", "")
        root = pathlib.Path(lines.ROOT)
        arguments[0] = arguments[0].replace("=configs/", f"={root}/configs/")
        parsed, _, _ = command_line.parse_config(task.architecture, {}, ["", *arguments])
        now = lines.settings(parsed.to_dict())
        changed = {k: v for k, v in line.config.items() if k in now and now[k] != v}
        assert not changed, line.task


def test_three_seeds_are_for_long_runs_only(lines, tasks):
    for line in lines.read_lines(lines.LINES):
        assert tasks[line.task].seeds >= (3 if line.seconds > 1800 else 5)


@pytest.mark.slow
def test_runs_are_trained_once_and_failures_have_no_line(
    results, lines, load, tmp_path, monkeypatch
):
    monkeypatch.setattr(lines, "LINES", tmp_path / "results.jsonl")
    task = load("results_tasks").Task
    good = task("CartPole", "cartpole", changes=SMALL, seeds=2)
    bad = task("CartPole", "cartpole", changes=("num_envs=0",), seeds=1)
    assert results.train_all([bad, good], tmp_path / "runs", jobs=1) == 2
    read = lines.read_lines(lines.LINES)
    assert [(line.task, line.seed) for line in read] == [(good.name, 0), (good.name, 1)]
    assert read[1].steps == 4_096
    assert read[1].config["network.hidden"] == [8]
    assert "--config.seed=1" in read[1].command
    assert not any(key.startswith("dqn.") for key in read[1].config)
    assert 1 < read[1].episode_return < 200
    # Both have a line, so nothing is trained.
    monkeypatch.setattr(results.subprocess, "run", None)
    assert results.train_all([good], tmp_path / "runs", jobs=1) == 0


@pytest.mark.parametrize("code", [42, 130])
def test_none_is_begun_after_one_was_stopped(code, results, load, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(results, "train", lambda task, seed, *_: begun.append(seed) or code)
    task = load("results_tasks").Task("CartPole", "cartpole", changes=SMALL)
    assert results.train_all([task], tmp_path, jobs=1) == 130
    assert begun == [0]


def test_curves_are_means_over_equal_spans_of_steps(lines):
    steps = np.arange(10, 2_010, 10)
    x = {"step": steps, "wall_time": steps / 10.0}
    curve = lines.thin(x, steps * 2.0)
    assert curve["step"] == [25 + 40 * i for i in range(lines.POINTS)]
    assert curve["return"] == [50 + 80 * i for i in range(lines.POINTS)]
    assert curve["wall_time"][0] == 2.5


def test_a_line_of_another_program_is_read_from_its_tensorboard_file(load, tmp_path, monkeypatch):
    peers = load("peers")
    # Returns of 10, 20, ... after steps 0, 100, ..., under a name of its own.
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from tensorboardX import SummaryWriter\n"
        "with SummaryWriter(sys.argv[1]) as writer:\n"
        "    for i in range(6):\n"
        "        writer.add_scalar('score', 10 * i + int(sys.argv[2]), 100 * i)\n"
        "        writer.add_scalar('loss', 0, 100 * i)\n"
    )
    commit = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m=a")
    for arguments in (("init", "-q"), commit):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    arguments = ("{path}/program.py", "{folder}", "{seed}")
    peer = peers.Peer("fake-env", arguments, "score", ("numpy",))
    monkeypatch.setitem(peers.PEERS, "fake", peer)
    line = peers.train("fake", tmp_path, sys.executable, seed=3)
    assert line.curve["step"] == [100, 200, 300, 400, 500]
    assert line.curve["return"] == [13, 23, 33, 43, 53]
    assert (line.steps, line.episode_return, line.episodes) == (500, 53, 1)
    assert 0 < line.curve["wall_time"][0] <= line.seconds + 1
    assert line.versions["numpy"] == np.__version__
    assert len(line.versions["commit"]) == 40
    with pytest.raises(SystemExit, match=r"0 files in .* have the tag other"):
        peers.read_returns(tmp_path, "other")
