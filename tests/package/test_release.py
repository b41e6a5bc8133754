"""What a release is made of: its script, with stand-ins for Python and its tools, and its notes."""

import importlib.util
import os
import pathlib
import subprocess

import pytest
import yaml

import podracer
from tests.helpers import ROOT
from tests.package.test_metadata import PROJECT

SPEC = importlib.util.spec_from_file_location("notes", ROOT / ".ci" / "notes.py")
notes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notes)

PYTHONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line
]  # fmt: skip
CHANGELOG = """# Changelog

## Unreleased

### Upgrading

- Nothing.

## 0.10.0 (2027-03-01)

- Ten.

## 0.1.0 (2027-01-31)

- One.
"""
# Appends its command line to a file, and fails if this is the command that should fail.
TOOL = """#!/bin/bash
command="$(basename "$0") $*"
echo "${command% }" >> "$COMMANDS"
[ "${command% }" != "$FAILING" ] || exit 7
[ "$*" != "-m build" ] || { mkdir dist; touch dist/p.whl dist/p.tar.gz; }
"""
# Makes a virtual environment of such tools.
PYTHON = """#!/bin/bash
if [ "$1" = -m ]; then
  mkdir -p "$3/bin"
  for tool in python pip check-sdist podracer; do cp "$TOOL" "$3/bin/$tool"; done
fi
"""


def run(tmp_path: pathlib.Path, *, failing: str = "") -> tuple[int, str, list[str]]:
    """The script's exit code, its output, and the commands that it has run in a copy."""
    (tmp_path / "copy" / ".ci").mkdir(parents=True)
    script = tmp_path / "copy" / ".ci" / "release"
    script.write_bytes((ROOT / ".ci" / "release").read_bytes())
    for path, content in (("tool", TOOL), ("python-a", PYTHON), ("python-b", PYTHON)):
        (tmp_path / path).write_text(content)
        (tmp_path / path).chmod(0o755)
    script.chmod(0o755)
    commands = tmp_path / "commands"
    env = {"COMMANDS": str(commands), "FAILING": failing, "TOOL": str(tmp_path / "tool")}
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(
        [script, "python-a", "python-b"],
        env={"PATH": path, "TMPDIR": str(tmp_path), "TAG": "v1.2.3", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    there = commands.read_text().replace(f"{tmp_path}/copy/", "").splitlines()
    return ended.returncode, ended.stdout, there


BUILT = [
    "python -m build",
    "python -m twine check --strict dist/p.tar.gz dist/p.whl",
    "check-sdist --inject-junk",
    "python .ci/notes.py v1.2.3",
]
CHECKED = [
    "pip install --quiet dist/p.whl",
    "pip check",
    "podracer --version",
    "python -m podracer.anakin --config=cartpole --config.total_steps=20_000",
    "python -m podracer.evaluate --workdir=runs/cartpole --episodes=8",
]


def test_each_python_checks_what_was_built_once(tmp_path):
    code, output, (tools, *commands) = run(tmp_path)
    assert (code, commands) == (0, BUILT + CHECKED + CHECKED), output
    assert tools.startswith("pip install --quiet build")
    assert output.endswith("=== all checks passed\n")


@pytest.mark.parametrize("failing", BUILT + CHECKED[1:])
def test_a_check_that_fails_ends_the_script(failing, tmp_path):
    code, output, commands = run(tmp_path, failing=failing)
    assert (code, commands[-1]) == (7, failing)
    assert "all checks passed" not in output


def test_the_workflow_checks_every_python_and_makes_no_more_than_a_draft():
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    check, draft = (content["jobs"][name]["steps"] for name in ("check", "draft"))
    (installed,) = (x["with"]["python-version"] for x in check if "setup-python" in str(x))
    assert installed.split() == PYTHONS
    (script,) = (x["run"] for x in check if "run" in x)
    assert script == " ".join([".ci/release", *(f"python{each}" for each in PYTHONS)])
    (release,) = (x["run"] for x in draft if "run" in x)
    assert " --draft " in release
    assert content["jobs"]["draft"]["needs"] == "check"


def test_notes_are_the_section_of_a_version():
    assert notes.notes(CHANGELOG, "0.1.0") == "- One.\n"
    assert notes.notes(CHANGELOG, "0.10.0") == "- Ten.\n"
    assert notes.notes(CHANGELOG, None) == "### Upgrading\n\n- Nothing.\n"


@pytest.mark.parametrize("version", ["0.2.0", "0.1", "0.1.0)", "0x1.0"])
def test_a_version_without_a_section_has_no_notes(version):
    with pytest.raises(ValueError, match=r"nothing under a heading '## .* \(YEAR-MONTH-DAY\)'"):
        notes.notes(CHANGELOG, version)


def test_an_empty_section_is_no_notes():
    with pytest.raises(ValueError, match="nothing under a heading '## Unreleased'"):
        notes.notes("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2027-01-31)\n\n- One.\n", None)


def test_a_tag_is_that_of_the_version():
    assert notes.check_tag("v0.1.0", "0.1.0") == "0.1.0"
    for tag in ("0.1.0", "v0.1.1", "v0.1.0rc1"):
        with pytest.raises(ValueError, match=r"is '0\.1\.0', whose tag is 'v0\.1\.0'"):
            notes.check_tag(tag, "0.1.0")


def test_this_changelog_says_how_to_upgrade(capsys):
    notes.main([])
    assert "### Upgrading\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"whose tag is 'v{podracer.__version__}'"):
        notes.main(["v99.0.0"])
