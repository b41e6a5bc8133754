"""The rooms: imports go down only, and files and functions stay of a size to read."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "podracer"
# From the bottom up. A module imports from lower floors and from its own room.
FLOORS = [
    ["errors"],
    ["signals", "watchdog"],
    ["processes"],
    ["metrics", "types"],
    ["bucket"],
    ["workdir"],
    ["prng", "returns"],
    ["nets"],
    ["agents", "mesh", "envs", "learner"],
    ["rollout"],
    ["config"],
    ["episodes", "parts"],
    ["render", "view"],
    ["checkpoint", "curves", "profile", "screen", "trackers"],
    ["drift", "plot"],
    ["session"],
    ["loop"],
    ["cli", "look", "anakin", "sebulba"],
    ["evaluate", "plan"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
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
        lower = FLOOR[other] < FLOOR[here]
        # The command line is given an architecture; an architecture's __main__ gives itself.
        main = path.name == "__main__.py" and other == "cli"
        assert lower or main, f"{here} imports {other}"


def test_agents_know_neither_environments_nor_devices_nor_logging():
    for path in (ROOT / "agents").glob("*.py"):
        assert imported_rooms(path) <= {"agents", "types", "returns", "nets", "errors"}


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
                assert isinstance(node.value, ast.Name), path
                assert node.value.id == "mesh_lib", path


def functions(path: pathlib.Path):
    def walk(node, depth):
        for child in ast.iter_child_nodes(node):
            inner = depth + isinstance(child, ast.FunctionDef)
            if inner > depth:
                yield child, inner
            yield from walk(child, inner)

    return walk(ast.parse(path.read_text()), 0)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path):
    assert len(path.read_text().splitlines()) < 400
    for function, depth in functions(path):
        assert depth <= 3, f"{function.name} is nested {depth} deep"
        lines = function.end_lineno - function.lineno + 1
        assert lines <= 70, f"{function.name} has {lines} lines"
