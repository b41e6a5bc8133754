"""What describes the project: pyproject.toml, CITATION.cff, the files for GitHub."""

import ast
import importlib.metadata
import pathlib
import re
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import podracer

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = [
    *(path for folder in ("podracer", "docs", "launch") for path in (ROOT / folder).rglob("*")),
    *ROOT.glob("*.md"),
    *(ROOT / "notebooks").glob("*.ipynb"),
    ROOT / ".ci" / "run",
    ROOT / "pyproject.toml",
]


def test_extras_for_accelerators_are_bounded_as_jax_is():
    (jax,) = (x for x in PROJECT["dependencies"] if x.startswith("jax>"))
    bounds = jax.removeprefix("jax")
    for name in ("cuda12", "cuda13", "tpu"):
        assert EXTRAS[name] == [f"jax[{name}]{bounds}; sys_platform == 'linux'"]


def test_every_package_that_is_imported_is_declared():
    """One that only comes along with another may be gone with that one's next version."""
    declared = [*PROJECT["dependencies"], *(x for extra in EXTRAS.values() for x in extra)]
    names = {canonicalize_name(Requirement(each).name) for each in declared}
    # Which distributions a module is from; several share a namespace such as google.
    owners = importlib.metadata.packages_distributions()
    for path in [*(ROOT / "podracer").rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [each.name for each in node.names]
            else:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in {each.partition(".")[0] for each in modules}:
                if module not in sys.stdlib_module_names and module not in ("podracer", ""):
                    assert {canonicalize_name(x) for x in owners[module]} & names, (path, module)


def test_extras_that_are_named_exist():
    """In messages, documents and other extras, from the index ("podracer-rl[gcs]") or a clone."""
    used = {
        (path.name, name)
        for path in TEXTS
        if path.suffix in ("", ".py", ".md", ".sh", ".toml", ".ipynb") and path.is_file()
        for names in re.findall(r"(?:podracer-rl|['\"]\.)\[([a-z0-9,]+)\]", path.read_text())
        for name in names.split(",")
    }
    assert {name for _, name in used} >= {"gcs", "wandb", "test", "tpu"}
    assert {(file, name) for file, name in used if name not in EXTRAS} == set()


def test_no_message_installs_the_other_project_of_this_name():
    for path in TEXTS:
        if path.suffix in (".py", ".md", ".sh", ".ipynb"):
            assert not re.search(r"install (-\S+ )*['\"]?podracer\b(?!-rl)", path.read_text()), path


def test_accelerators_are_installed_by_the_bounded_extras():
    """``pip install jax[cuda13]`` could install a JAX that podracer does not work with."""
    for path in TEXTS:
        if path.suffix in (".py", ".md", ".sh", ".ipynb"):
            assert not re.search(r"jax\[(cuda|tpu)", path.read_text()), path


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == podracer.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


@pytest.mark.parametrize("name", ["ci", "newest"])
def test_workflows_run_all_checks(name):
    content = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    # YAML reads the key "on" as true.
    assert ("schedule" if name == "newest" else "pull_request") in content[True]
    (job,) = content["jobs"].values()
    assert {"3.11", "3.13"} <= set(job["strategy"]["matrix"]["python"])
    *actions, last = job["steps"]
    assert last == {"run": ".ci/run python"}
    for action in actions:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", action["uses"])


def test_the_longest_tests_run_every_week():
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    assert "schedule" in content[True]
    *_, last = content["jobs"]["check"]["steps"]
    assert last["run"] == "pytest -m weekly -n 2"


def test_issue_forms_ask_for_something():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug_report", "feature_request"]
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= content.keys()
        ids = [field["id"] for field in content["body"]]
        assert len(set(ids)) == len(ids)
        assert any(field.get("validations", {}).get("required") for field in content["body"])
