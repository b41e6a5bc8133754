"""A wheel, built and installed into an empty environment: what a user installs."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import podracer
from podracer.storage.workdir import read_config

ROOT = pathlib.Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as setuptools writes into the folder that it builds from."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("podracer", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run([sys.executable, "-c", BUILD, built], cwd=source, check=True)
    (path,) = built.glob("podracer_rl-*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with the wheel and the packages that it asks for."""
    path = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    subprocess.run([path / "bin" / "pip", "install", "--quiet", wheel], check=True)
    return path


def run(environment: pathlib.Path, folder: pathlib.Path, *command: str) -> str:
    """The output of a command of the environment, as a user's shell would run it."""
    ours = ("PYTHONPATH", "JAX_COMPILATION_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    program, *arguments = command
    ended = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return ended.stdout


def test_the_wheel_holds_every_file(wheel):
    expected = {
        *(path.relative_to(ROOT) for path in (ROOT / "podracer").rglob("*.py")),
        *(pathlib.Path("podracer", "configs", x.name) for x in (ROOT / "configs").glob("*.py")),
        pathlib.Path("podracer", "py.typed"),
    }
    names = {pathlib.Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.parts[0].endswith(".dist-info")} == expected


@pytest.mark.weekly
def test_the_wheel_solves_cartpole(environment, tmp_path):
    """With the shipped config, the default workdir and the default cache of compiled programs."""
    printed = run(environment, tmp_path, "podracer", "--version")
    assert printed == f"podracer {podracer.__version__}\n"
    where = run(environment, tmp_path, "python", "-c", "import podracer; print(podracer.__file__)")
    assert pathlib.Path(where).is_relative_to(environment)
    run(environment, tmp_path, "podracer", "anakin", "--config=cartpole")
    workdir = tmp_path / "runs" / "cartpole"
    assert json.loads((workdir / "summary.json").read_text())["eval_return_mean"] >= 475
    assert (workdir / "checkpoints").is_dir()
    content = read_config(workdir)
    assert content["versions"]["podracer"] == podracer.__version__
    # 1e-3 is the config's own; the default is another.
    assert content["config"]["learning_rate"] == 1e-3
    assert list((tmp_path / "cache" / "podracer").iterdir())
