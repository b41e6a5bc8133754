"""The structure: imports go down only, packages are few, and files and functions stay readable."""

import ast
import pathlib

import pytest

from podracer.agents import AGENTS

ROOT = pathlib.Path(__file__).parent.parent / "podracer"
# From the bottom up. A module imports from lower layers and from its own package.
LAYERS = [
    ["errors"],
    ["types"],
    ["xla_cpu"],
    ["distributed", "envs"],
    ["nets", "learning", "remote"],
    ["agents"],
    ["config"],
    ["acting", "storage"],
    ["monitoring"],
    ["training"],
    ["anakin", "sebulba"],
    ["plan"],
]
# Thin: only flags, or one call into the packages below.
COMMANDS = ["__main__", "doctor", "evaluate", "look", "match", "plot", "worker"]
LAYER = {name: number for number, names in enumerate([*LAYERS, COMMANDS]) for name in names}
MOST_PACKAGES, MOST_DEPENDENCIES, MOST_COMMAND_LINES = 17, 114, 60
FILES = sorted(ROOT.rglob("*.py"))


def package(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_packages(path: pathlib.Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which this test does not read"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        packages |= {name.split(".")[1] for name in names if name.startswith("podracer.")}
    return packages


def test_every_package_has_a_layer():
    assert {package(path) for path in FILES} - {"__init__"} == set(LAYER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    if path == ROOT / "__init__.py":
        return
    here = package(path)
    for other in imported_packages(path) - {here}:
        assert LAYER[other] < LAYER[here], f"{here} imports {other}"


def test_packages_and_dependencies_between_them_are_few():
    assert sum(map(len, LAYERS)) <= MOST_PACKAGES
    folders = (ROOT, ROOT.parent / "benchmarks", ROOT.parent / "configs")
    dependencies = {
        (package(path) if folder == ROOT else folder.name, other)
        for folder in folders
        for path in folder.rglob("*.py")
        for other in imported_packages(path)
    }
    dependencies = {(here, other) for here, other in dependencies if here != other}
    assert len(dependencies) < MOST_DEPENDENCIES, sorted(dependencies)


def test_commands_are_thin():
    for name in COMMANDS:
        package = ROOT / name / "__init__.py"
        path = package if package.exists() else ROOT / f"{name}.py"
        assert len(path.read_text().splitlines()) < MOST_COMMAND_LINES, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_agent_is_told_from_others_by_its_name(path):
    """An agent says itself what it allows and needs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            names = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
            assert not names & AGENTS.keys(), f"line {node.lineno}: {ast.unparse(node)}"


def test_agents_know_neither_environments_nor_devices_nor_logging():
    for path in (ROOT / "agents").glob("*.py"):
        assert imported_packages(path) <= {"agents", "types", "nets", "learning", "errors"}


COLLECTIVES = {
    "all_gather", "all_to_all", "axis_index", "axis_size", "pmax", "pmean", "pmin", "ppermute",
    "psum", "psum_scatter", "shard_map",
}  # fmt: skip


def test_only_the_mesh_names_its_axis():
    for path in FILES:
        if path.name == "mesh.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not {alias.name for alias in node.names} & COLLECTIVES, path
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                # Processes gather through JAX's coordinator, without devices.
                owner = ast.unparse(node.value).removeprefix("self.")
                assert owner in ("mesh_lib", "processes", "_processes", "self"), path


def functions(path: pathlib.Path):
    def walk(node, depth):
        for child in ast.iter_child_nodes(node):
            inner = depth
            if isinstance(child, ast.FunctionDef):
                inner = depth + 1
                yield child, inner
            yield from walk(child, inner)

    return walk(ast.parse(path.read_text()), 0)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path):
    assert len(path.read_text().splitlines()) < 400
    for function, depth in functions(path):
        assert depth <= 3, f"{function.name} is nested {depth} deep"
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= 70, f"{function.name} has {lines} lines"
