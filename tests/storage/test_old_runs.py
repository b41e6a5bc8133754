"""Runs of the last minor version: they are evaluated and resumed, or an error says what to read."""

import dataclasses
import json
import pathlib
import re
import shutil
import tarfile

import pytest
from flax.traverse_util import flatten_dict

import podracer
from podracer import anakin, errors
from podracer import config as config_lib
from podracer.storage.versions import versions
from podracer.storage.workdir import read_config, read_rows
from podracer.training.saved_run import evaluate
from tests.storage.make_old_runs import FOLDER, RUNS

LATER = "see Upgrading in podracer's CHANGELOG.md"


def unpack(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The workdir of an old run."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        # Not as an argument, which Python 3.11.2, that of Debian 12, does not have.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / "run"


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def written_by(version: str, workdir: pathlib.Path) -> None:
    """Says in a workdir that another version wrote it."""
    here = versions()["podracer"]
    replace(workdir / "config.json", f'"podracer": "{here}"', f'"podracer": "{version}"')
    for path in workdir.glob("checkpoints/*/progress/metadata"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "podracer": version}))


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_is_evaluated_and_resumed(name, tmp_path, capsys):
    workdir = unpack(name, tmp_path)
    rows, config = read_rows(workdir), read_config(workdir)["config"]
    steps = rows[-1]["step"]
    played = evaluate(workdir)
    assert played["env_steps"] == steps
    # The episodes of its own last evaluation, on which another processor may round differently.
    score = rows[-1]["eval/episode_return"]
    assert score > 50, "random actions get about 22"
    assert played["return_mean"] == pytest.approx(score, rel=0.2)
    longer = config_lib.parse({**config, "total_steps": 2 * steps})
    result = anakin.train(longer, workdir)
    assert f"step {steps:,}\n" in capsys.readouterr().out
    assert result.summary["env_steps"] == 2 * steps
    assert [row["step"] for row in result.metrics[: len(rows)]] == [row["step"] for row in rows]
    if name == "dqn":
        # Its replay was full and still is.
        assert result.metrics[len(rows)]["replay/fill"] == 1


@pytest.mark.parametrize("name", RUNS)
def test_old_runs_are_small_and_of_the_last_minor_version(name, tmp_path):
    assert (FOLDER / f"{name}.tar.gz").stat().st_size < 100_000
    wrote = read_config(unpack(name, tmp_path))["versions"]["podracer"]
    (major, minor), (now, at) = (
        map(int, version.split(".")[:2]) for version in (wrote, podracer.__version__)
    )
    # At a new major version, that of any minor version of the last one.
    assert (major, minor) in {(now, at), (now, at - 1)} or (at == 0 and major == now - 1)


@pytest.mark.parametrize("name", RUNS)
def test_what_has_changed_since_old_runs_is_under_upgrading(name, tmp_path):
    """Each setting whose default is another one now, or that no longer exists."""
    written = read_config(unpack(name, tmp_path))
    old = flatten_dict(written["config"], sep=".")
    # As JSON, in which tuples are lists.
    now = json.loads(json.dumps(dataclasses.asdict(config_lib.parse(RUNS[name]))))
    now = flatten_dict(now, sep=".")
    changed = {key for key, value in old.items() if key not in now or now[key] != value}
    changelog = (FOLDER.parents[2] / "CHANGELOG.md").read_text()
    newer = changelog.partition(f"\n## {written['versions']['podracer']} (")[0]
    sections = re.findall(r"^### Upgrading\n(.*?)(?=^##|\Z)", newer, re.MULTILINE | re.DOTALL)
    listed = {key for key in changed if any(f"`{key}`" in section for section in sections)}
    assert changed == listed, "list these under Upgrading in CHANGELOG.md"


def test_errors_about_a_run_of_another_version_say_where_its_changes_are_listed(tmp_path):
    workdir = unpack("ppo", tmp_path)
    written_by("0.0.9", workdir)
    config = read_config(workdir)["config"]
    both = f"podracer 0.0.9 wrote it and this is podracer {versions()['podracer']}: {LATER}"
    with pytest.raises(errors.ConfigError, match="has seed=0, not 1") as settings:
        anakin.train(config_lib.parse({**config, "seed": 1}), workdir, quiet=True)
    for item in workdir.glob("checkpoints/*/rest"):
        shutil.rmtree(item)
    longer = config_lib.parse({**config, "total_steps": 2 * config["total_steps"]})
    with pytest.raises(errors.SaveError, match="can be used") as checkpoint:
        anakin.train(longer, workdir, quiet=True)
    # A start that fails leaves the file as it was.
    text = (workdir / "config.json").read_text()
    other = json.loads(text)
    other["config"]["network"]["hidden"] = [8]
    (workdir / "config.json").write_text(json.dumps(other))
    with pytest.raises(errors.ConfigError, match="are of another network") as network:
        evaluate(workdir)
    (workdir / "config.json").write_text(text.replace('"seed"', '"sede"'))
    with pytest.raises(errors.ConfigError, match="unknown config key 'sede'") as key:
        evaluate(workdir)
    for error in (settings, checkpoint, network, key):
        assert both in str(error.value)


def test_errors_about_a_run_of_this_version_do_not(tmp_path):
    workdir = unpack("ppo", tmp_path)
    written_by(versions()["podracer"], workdir)
    config = config_lib.parse({**read_config(workdir)["config"], "seed": 1})
    with pytest.raises(errors.ConfigError, match="has seed=0, not 1") as error:
        anakin.train(config, workdir, quiet=True)
    assert LATER not in str(error.value)
