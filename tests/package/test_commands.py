"""The command ``podracer``, and the names that the package shows."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys

import pytest

import podracer
from podracer import __main__ as command
from podracer.errors import ExitCode


def main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["podracer", *arguments])
    return command.main()


@pytest.mark.parametrize("name", command.COMMANDS)
def test_commands_are_the_modules_of_their_names(name, monkeypatch):
    called = []

    def run_module(module, run_name, alter_sys):
        called.append((module, run_name, alter_sys, sys.argv[1:]))
        raise SystemExit(ExitCode.DIVERGED)

    monkeypatch.setattr(runpy, "run_module", run_module)
    with pytest.raises(SystemExit) as ended:
        main(monkeypatch, name, "--help", "x")
    assert ended.value.code == ExitCode.DIVERGED
    assert called == [(f"podracer.{name}", "__main__", True, ["--help", "x"])]


def test_modules_of_the_current_directory_are_found_as_by_python_m(monkeypatch, tmp_path):
    """An installed script starts without it on the path, and so without a user's environments."""
    (tmp_path / "own_environment.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = []
    find = importlib.util.find_spec
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: found.append(find("own_environment")))
    main(monkeypatch, "anakin")
    assert found[0] is not None
    assert sys.path[0] == str(tmp_path)


def test_the_help_lists_all_commands(monkeypatch, capsys):
    assert main(monkeypatch, "--help") == ExitCode.OK
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    assert listed == list(command.COMMANDS)
    assert main(monkeypatch) == ExitCode.CONFIG
    assert "usage: podracer COMMAND" in capsys.readouterr().err


def test_the_version_is_printed(monkeypatch, capsys):
    assert main(monkeypatch, "--version") == ExitCode.OK
    assert capsys.readouterr().out == f"podracer {podracer.__version__}\n"


def test_output_that_nobody_reads_is_no_crash():
    """As with ``podracer --help | true``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        command = [sys.executable, "-m", "podracer", "--help"]
        run = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (run.returncode, run.stderr) == (ExitCode.CRASHED, b"")


def test_an_unknown_command_is_rejected_with_the_nearest_one(monkeypatch, capsys):
    assert main(monkeypatch, "anakn") == ExitCode.CONFIG
    assert capsys.readouterr().err == (
        "error: unknown command 'anakn'; did you mean anakin?\n"
        "See docs/troubleshooting.md#starting-a-run\n"
    )


def test_plan_sets_its_environment_before_jax_starts(tmp_path):
    """And until then nothing imports JAX, which takes seconds."""
    code = """
import json, os, sys
from podracer import __main__ as command
early = "jax" in sys.modules
try:
    code = command.main()
except SystemExit as ended:
    code = ended.code
import jax
print(json.dumps([early, code, os.environ.get("TPU_SKIP_MDS_QUERY"), jax.config.jax_platforms]))
"""
    arguments = ["plan", "--config=cartpole"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert "--topology is missing" in ended.stderr
    assert json.loads(ended.stdout) == [False, ExitCode.CONFIG, "1", "cpu"]


def test_the_package_shows_its_names():
    assert {"train", "anakin", "sebulba", "config", "evaluate", "__version__"} <= {*dir(podracer)}
    assert callable(podracer.train)
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        _ = podracer.trane
