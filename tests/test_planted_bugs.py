"""A catalogue of planted bugs, which shows that tests can fail.

Each ``planted_bugs/NAME.patch`` is a unified diff that breaks the code in one place. Its first
line, ``test: PATH::NAME``, names the test that must then fail. A patch has to be written again when
the code around it changes.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.helpers import ROOT

PATCHES = sorted((ROOT / "tests" / "planted_bugs").glob("*.patch"))
# Folders that tests read, beside the files in the root.
FOLDERS = (".ci", ".github", "benchmarks", "configs", "docs", "launch", "notebooks", "podracer",
           "tests")  # fmt: skip


def named_test(patch: pathlib.Path) -> str:
    return patch.read_text().partition("\n")[0].removeprefix("test: ")


def apply(patch: pathlib.Path, folder: pathlib.Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, check=True)


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository without its history. Bytecode is copied, too, to save time."""
    folder = tmp_path / "copy"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, folder)
    # Tests ask git which files belong to the project.
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    yield folder
    shutil.rmtree(folder)


def run_tests(
    arguments: Sequence[str], folder: pathlib.Path, temporary: pathlib.Path
) -> subprocess.CompletedProcess:
    """Runs pytest in a folder, in a process of its own with a folder for temporary files."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--override-ini=addopts=", f"--basetemp={temporary}", *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(folder)}
    # As by default, unlike other slow tests: compiling fast matters more here than running fast.
    env.pop("XLA_FLAGS", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_each_patch_applies():
    assert len(PATCHES) >= 100
    for patch in PATCHES:
        apply(patch, ROOT, "--check")


def test_each_patch_names_a_test(tmp_path):
    """Given a test that does not exist beside others of its function, pytest runs the others."""
    named = {patch.name: named_test(patch) for patch in PATCHES}
    files = {name.partition("::")[0] for name in named.values()}
    run = run_tests(["--collect-only", *sorted(files)], ROOT, tmp_path / "tests")
    tests = set(run.stdout.splitlines())
    tests |= {name.partition("[")[0] for name in tests}
    assert not {patch: name for patch, name in named.items() if name not in tests}, run.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_patch_all_named_tests_pass(copy, tmp_path):
    """Otherwise a test could fail for another reason than the patch."""
    run = run_tests(sorted(set(map(named_test, PATCHES))), copy, tmp_path / "tests")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_no_planted_bug_survives(patch, copy, tmp_path):
    apply(patch, copy)
    run = run_tests([named_test(patch)], copy, tmp_path / "tests")
    # Exit code 1 is that of failed tests: a patch that breaks an import does not count.
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"^FAILED ", run.stdout, re.MULTILINE), run.stdout
