"""The structure: imports go down only, rooms are few, and files and functions stay readable."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "podracer"
# From the bottom up. A module imports from lower floors and from its own room.
FLOORS = [
    ["errors"],
    ["types"],
    ["xla_cpu", "distributed", "envs"],
    ["nets", "learning"],
    ["agents"],
    ["config"],
    ["acting", "storage"],
    ["monitoring"],
    ["training"],
    ["anakin", "sebulba"],
    ["plan"],
]
# Thin: flags, or one call, which the rooms below answer.
COMMANDS = ["__main__", "evaluate", "look", "plot"]
FLOOR = {room: number for number, rooms in enumerate([*FLOORS, COMMANDS]) for room in rooms}
MOST_ROOMS, MOST_ARROWS, MOST_COMMAND_LINES = 16, 100, 60
FILES = sorted(ROOT.rglob("*.py"))


def room(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: pathlib.Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which this test does not read"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("podracer.")}
    return rooms


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    if path == ROOT / "__init__.py":
        return
    here = room(path)
    for other in imported_rooms(path) - {here}:
        assert FLOOR[other] < FLOOR[here], f"{here} imports {other}"


def test_rooms_and_arrows_between_them_are_few():
    assert sum(map(len, FLOORS)) <= MOST_ROOMS
    folders = (ROOT, ROOT.parent / "benchmarks", ROOT.parent / "configs")
    arrows = {
        (room(path) if folder == ROOT else folder.name, other)
        for folder in folders
        for path in folder.rglob("*.py")
        for other in imported_rooms(path)
    }
    arrows = {(here, other) for here, other in arrows if here != other}
    assert len(arrows) < MOST_ARROWS, sorted(arrows)


def test_commands_are_thin():
    for name in COMMANDS:
        assert len((ROOT / f"{name}.py").read_text().splitlines()) < MOST_COMMAND_LINES, name


def test_agents_know_neither_environments_nor_devices_nor_logging():
    for path in (ROOT / "agents").glob("*.py"):
        assert imported_rooms(path) <= {"agents", "types", "nets", "errors"}


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
