"""``.ci/run`` with stand-ins for Python and its tools: the checks' order, and that each counts."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FIRST = [
    "python -m pip install --quiet --upgrade pip",
    "pip install --quiet -e .[dev]",
    "ruff check .",
    "ruff format --check .",
    "pyright",
    "pip install --quiet -e .[docs]",
    "sphinx-build --quiet -W --keep-going -c docs . build/site",
    "pytest",
    "pytest -m slow -n 2 -x --durations=30 -k not actions_are_learned",
    "pytest -m slow or not slow -n 2 -k actions_are_learned tests/agents",
    "pip install --quiet -e .[tpu]",
    "pytest -m slow or not slow -n 0 tests/plan",
]
NEXT = [FIRST[0], "pip install --quiet -e .[test]", "pytest"]
# Appends its command line to a file, and fails if this is the command that should fail.
TOOL = """#!/bin/bash
command="$(basename "$0") $*"
echo "${command% }" >> "$COMMANDS"
[ "${command% }" != "$FAILING" ] || exit 7
"""
# Makes a virtual environment of such tools.
PYTHON = """#!/bin/bash
if [ "$1" = -m ]; then
  mkdir -p "$3/bin"
  for tool in python pip pytest ruff pyright sphinx-build; do cp "$TOOL" "$3/bin/$tool"; done
  echo "PATH=$3/bin:\\$PATH; deactivate() { :; }" > "$3/bin/activate"
fi
"""


def run(tmp_path: pathlib.Path, *, failing: str = "") -> tuple[int, str, list[str]]:
    """The script's exit code, its output, and the commands that it has run."""
    for name, content in (("tool", TOOL), ("python-a", PYTHON), ("python-b", PYTHON)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    commands = tmp_path / "commands"
    env = {"COMMANDS": str(commands), "FAILING": failing, "TOOL": str(tmp_path / "tool")}
    ended = subprocess.run(
        [ROOT / ".ci" / "run", tmp_path / "python-a", tmp_path / "python-b"],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout, commands.read_text().splitlines()


def test_lint_and_types_come_first(tmp_path):
    code, output, commands = run(tmp_path)
    assert (code, commands) == (0, FIRST + NEXT)
    assert output.endswith("=== all checks passed\n")


@pytest.mark.parametrize("failing", [*FIRST, NEXT[1]])
def test_a_check_that_fails_ends_the_script(failing, tmp_path):
    code, output, commands = run(tmp_path, failing=failing)
    assert (code, commands[-1]) == (7, failing)
    assert "all checks passed" not in output
