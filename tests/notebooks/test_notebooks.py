"""The notebooks: executed with small budgets, and the outputs that are committed."""

import ast
import base64
import io
import os
import pathlib
import re
from typing import Any

import nbclient
import nbformat
import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
# These replace the values in the cell with the tag "parameters".
BUDGETS = {
    "anakin": {
        "CARTPOLE_STEPS": 40_000,
        "BREAKOUT_STEPS": 17_000,
        "STEPS_PER_SEED": 20_000,
        "NUM_SEEDS": 2,
    },
    "remote": {"REMOTE_STEPS": 50_000, "COMPARED_STEPS": 5_000},
    "replay": {"DQN_STEPS": 20_000, "COMPARED_STEPS": 15_000, "RESUMED_STEPS": 10_240},
    "sebulba": {"LANDER_STEPS": 33_000, "COMPARED_STEPS": 17_000},
    "search": {"TRAINING_STEPS": 21_000, "BEGINNER_STEPS": 2_048, "GAMES": 20, "SIMULATIONS": 16},
}
# The images in order. Anakin: learning curve and GIF of CartPole, the same of Breakout, curves over
# seeds. Remote: learning curve, workers. Replay: learning curve, the buffer, the replay ratio.
# Sebulba: learning curve and GIF of LunarLander, where the time goes. Search: learning curve, tree,
# game.
PICTURES = {
    "anakin": ["PNG", "GIF", "PNG", "GIF", "PNG"],
    "remote": ["PNG", "PNG"],
    "replay": ["PNG", "PNG", "PNG"],
    "sebulba": ["PNG", "GIF", "PNG"],
    "search": ["PNG", "PNG", "PNG"],
}
MOST_BYTES = 400_000
# Folders of the machine on which a notebook was executed.
PATHS = re.compile(r"/(home|Users|root|tmp|usr|opt|var|work|content|private)/|\w:\\\\")


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def parameters(notebook: Any) -> Any:
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    return cell


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook: Any) -> list[Any]:
    """All images among the outputs, decoded."""
    found = []
    for output in outputs(notebook):
        for kind in ("image/png", "image/gif"):
            if kind in output.get("data", {}):
                found.append(Image.open(io.BytesIO(base64.b64decode(output.data[kind]))))
    return found


def check_pictures(name: str, notebook: Any) -> None:
    found = pictures(notebook)
    assert [picture.format for picture in found] == PICTURES[name]
    for picture in found:
        assert min(picture.size) >= 160, picture.size
        assert len(picture.convert("RGB").getcolors(2**24)) > 1, "one colour alone"
        assert picture.format != "GIF" or picture.n_frames > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BUDGETS)
def test_runs_from_top_to_bottom(name, tmp_path):
    if name == "search":
        pytest.importorskip("pgx", reason="the suite is not installed: pip install -e '.[pgx]'")
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    cell = parameters(notebook)
    names = [target.id for line in ast.parse(cell.source).body for target in line.targets]
    assert names == list(BUDGETS[name])
    cell.source = "\n".join(f"{key} = {value}" for key, value in BUDGETS[name].items())
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        # By default, outputs that arrive more than 4 seconds after a cell has ended are lost.
        iopub_timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    )
    # Another test in this process may have imported envpool, which sets matplotlib's backend.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    client.execute(env={**env, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
    check_pictures(name, notebook)


def test_every_notebook_is_here():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(BUDGETS)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_badge_opens_the_notebook_in_colab(name):
    """In the notebook and in the README, from the repository that its first cell installs."""
    first, install = read(name).cells[:2]
    (repository,) = re.findall(r'^REPOSITORY = "https://github.com/(.*)"$', install.source, re.M)
    link = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb"
    assert f"/colab-badge.svg)]({link})" in first.source
    assert f"/colab-badge.svg)]({link})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", BUDGETS)
def test_is_committed_with_the_outputs_of_one_run(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    check_pictures(name, notebook)
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        for kind, text in {"stream": output.get("text", ""), **output.get("data", {})}.items():
            assert kind.startswith("image/") or not PATHS.search(text), text
