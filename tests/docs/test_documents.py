"""What documents and config files promise: links, paths, commands, exit codes and examples."""

import pathlib
import re
import runpy

import pytest

import podracer
from podracer import config as config_lib
from podracer import envs
from podracer.anakin import trainer
from podracer.config.sizes import make_sizes
from podracer.errors import ExitCode
from podracer.training import command_line

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks/README.md",
]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
FOLDERS = "benchmarks|configs|docs|launch|notebooks|podracer|tests"
# An update of many environments is a batch as well: a run with fewer updates does not learn.
MIN_UPDATES = 30


def name(path):
    return str(path.relative_to(ROOT))


def commands(path):
    """The training commands in a document or docstring, with their continuation lines joined."""
    text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
    return re.findall(r"python -m podracer\.(anakin|sebulba) ([^\n`]*)", text)


def training_commands():
    for path in [*DOCUMENTS, *CONFIGS]:
        for number, (architecture, arguments) in enumerate(commands(path)):
            # Capitals stand for something that the reader inserts.
            arguments = re.sub(r"\s--config\.[\w.]+=[A-Z]+\b", "", f" {arguments}")
            if "=configs/" in arguments and "=configs/NAME" not in arguments:
                yield pytest.param(architecture, arguments, id=f"{name(path)}-{number}")


def anchors(path):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_exist(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", [*DOCUMENTS, *CONFIGS], ids=name)
def test_paths_of_the_repository_exist(path):
    for file in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\.\w+", path.read_text()):
        if not any(part.isupper() for part in pathlib.Path(file).with_suffix("").parts):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", [ROOT / "docs/design.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_modules_named_by_documents_on_the_code_exist(path):
    text = re.sub(r"^    .*$", "", path.read_text(), flags=re.MULTILINE)
    for file in re.findall(r"`(\w+/\w+\.py|\w+\.py)`", text):
        assert any((folder / file).exists() for folder in (ROOT, ROOT / "podracer")), file


@pytest.mark.parametrize(("architecture", "arguments"), list(training_commands()))
def test_training_commands_are_valid_and_learn(architecture, arguments):
    arguments = [x for x in arguments.replace("'", "").split() if x.startswith("--config")]
    # The README's own example, which test_the_corridor_example runs.
    arguments = [x for x in arguments if "corridor:" not in x]
    argv = [architecture, *(x.replace("=configs/", f"={ROOT}/configs/") for x in arguments)]
    parsed, _, _ = command_line.parse_config(architecture, {}, argv)
    config = config_lib.parse(parsed)
    on_host = config.env.partition(":")[0] in envs.HOST_SUITES
    assert on_host == (architecture == "sebulba")
    threads = config.sebulba.threads if on_host else 0
    assert make_sizes(config, 1, threads).num_updates >= MIN_UPDATES


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_configs_state_their_command_result_and_hardware(path):
    docstring = runpy.run_path(str(path))["__doc__"]
    assert f"--config=configs/{path.name}" in docstring
    assert "Result: " in docstring
    assert "Hardware: " in docstring


def test_readme_lists_all_exit_codes():
    codes = re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(code) for code in codes] == sorted(ExitCode)


def test_the_corridor_example(tmp_path, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "Corridor" in x)
    (tmp_path / "corridor.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (arguments,) = (x for _, x in commands(ROOT / "README.md") if "corridor:" in x)
    argv = ["anakin", *arguments.replace("=configs/", f"={ROOT}/configs/").split()]
    assert command_line.main(trainer.train, argv) == ExitCode.OK
    assert "evaluation -4.00" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["settings.md", "commands.md"])
def test_a_page_of_the_reference_is_made_from_the_code(name):
    made = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    assert made["page"](name) == (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("public", podracer.__all__)
def test_all_that_is_public_is_promised_and_on_the_page_of_the_api(public):
    api, releases = ((ROOT / "docs" / page).read_text() for page in ("api.md", "releases.md"))
    assert re.search(rf"auto\w+:: podracer\.{public}\b", api)
    (promise,) = re.findall(r"^\| \*\*Python\*\*: .*$", releases, re.MULTILINE)
    assert re.search(rf"`(podracer\.)?{public}`", promise)
