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


def test_each_patch_applies_and_names_a_test():
    assert len(PATCHES) >= 100
    for patch in PATCHES:
        apply(patch, ROOT, "--check")
        file, _, name = named_test(patch).partition("::")
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), patch.name


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


def run_tests(names: Sequence[str], folder: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs tests of a copy in a process of its own."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--override-ini=addopts=", f"--basetemp={folder.parent / 'temporary'}", *names,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(folder)}
    # As by default, unlike other slow tests: compiling fast matters more here than running fast.
    env.pop("XLA_FLAGS", None)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_patch_all_named_tests_pass(copy):
    """Otherwise a test could fail for another reason than the patch."""
    run = run_tests(sorted(set(map(named_test, PATCHES))), copy)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_no_planted_bug_survives(patch, copy):
    apply(patch, copy)
    run = run_tests([named_test(patch)], copy)
    # Exit code 1 is that of failed tests: a patch that breaks an import does not count.
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"^FAILED ", run.stdout, re.MULTILINE), run.stdout
