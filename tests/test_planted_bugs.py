"""A catalogue of planted bugs, which shows that tests can fail.

Each ``planted_bugs/NAME.patch`` is a unified diff that breaks the code in one place. Its first
line, ``test: PATH::NAME``, names the test that must then fail. A patch has to be written again when
the code around it changes.
"""

import multiprocessing
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

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


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository without its history, for all patches, one after another. Bytecode is
    copied, too, to save time."""
    folder = tmp_path_factory.mktemp("planted") / "copy"
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


class Run(NamedTuple):
    """How pytest ended, and what it printed."""

    code: int
    output: str


# Runs pytest on the code in a folder, in a process that has imported libraries but nothing of ours.
RUN = """
import os, sys
os.chdir(folder)
os.environ["PYTHONPATH"] = folder
sys.path.insert(0, folder)
with open(output, "wb") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
import pytest
sys.exit(int(pytest.main(arguments)))
"""
# Importing them takes longer than most tests: a server does it once, and forks. Not gymnax, which
# would start JAX's backend.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pytest", "jax", "flax.nnx", "mctx", "optax", "orbax.checkpoint", "rlax"]
)


def run_tests(arguments: Sequence[str], folder: pathlib.Path, temporary: pathlib.Path) -> Run:
    """Runs pytest in a folder, in a process of its own with a folder for temporary files."""
    output = temporary.with_suffix(".txt")
    options = [
        "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--override-ini=addopts=",
        f"--basetemp={temporary}",
    ]  # fmt: skip
    values = {"arguments": [*options, *arguments], "folder": str(folder), "output": str(output)}
    process = FORKS.Process(target=exec, args=(RUN, values))
    process.start()
    process.join()
    assert process.exitcode is not None
    return Run(process.exitcode, output.read_text())


def test_each_patch_applies():
    assert len(PATCHES) >= 100
    for patch in PATCHES:
        apply(patch, ROOT, "--check")


@pytest.mark.slow
def test_each_patch_names_a_test(tmp_path):
    """Given a test that does not exist beside others of its function, pytest runs the others."""
    named = {patch.name: named_test(patch) for patch in PATCHES}
    files = {name.partition("::")[0] for name in named.values()}
    run = run_tests(["--collect-only", *sorted(files)], ROOT, tmp_path / "tests")
    tests = set(run.output.splitlines())
    tests |= {name.partition("[")[0] for name in tests}
    assert not {patch: name for patch, name in named.items() if name not in tests}, run.output


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_without_a_patch_a_named_test_of_each_folder_passes(copy, tmp_path):
    """Otherwise a test could fail for another reason than the patch, such as a file that the copy
    lacks. That all of them pass in the repository itself is seen where they run."""
    names = sorted(map(named_test, PATCHES))
    folders = {x.partition("::")[0].rpartition("/")[0]: x for x in names}
    run = run_tests(list(folders.values()), copy, tmp_path / "tests")
    assert run.code == 0, run.output


@pytest.mark.weekly
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_no_planted_bug_survives(patch, copy, tmp_path):
    apply(patch, copy)
    try:
        run = run_tests([named_test(patch)], copy, tmp_path / "tests")
    finally:
        apply(patch, copy, "--reverse")
    # Exit code 1 is that of failed tests: a patch that breaks an import does not count.
    assert run.code == 1, run.output
    assert re.search(r"^FAILED ", run.output, re.MULTILINE), run.output
