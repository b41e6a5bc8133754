"""docs/troubleshooting.md explains every error, in the section that the error itself names."""

import ast
import pathlib
import re

import pytest

from podracer import errors

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHERS = [x for x in sorted((ROOT / "launch").glob("*.sh")) if "reject()" in x.read_text()]
# The functions of errors.py make errors for other files.
FILES = sorted({*errors.PACKAGE.rglob("*.py")} - {errors.PACKAGE / "errors.py"})
# What makes an error; ``kind`` is one of two types in distributed/joining.py.
TYPES = {each.__name__ for each in errors.ERRORS} | {"kind"}
MAKERS = {
    "unknown": ["; did you mean ", "; known: "],
    "missing_extra": [" needs packages that are not installed"],
}
# The least literal text by which a message is known, unless it has less itself.
LEAST = 12


def literals(node: ast.AST) -> list[str]:
    """The literal pieces of a message, between those that vary."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            varies = "\0"
            parts = [x.value if isinstance(x, ast.Constant) else varies for x in values]
            return "".join(map(str, parts)).split(varies)
        case ast.BinOp(left=left, right=right):
            return literals(left) + literals(right)
        case ast.IfExp(body=body, orelse=orelse):
            return literals(body) + literals(orelse)
    return []


def messages(path: pathlib.Path) -> dict[str, list[str]]:
    """The literal pieces of the messages that a file makes, by their line."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            name = node.func.id
            pieces = literals(node.args[0])
            if name == "unknown":
                pieces = [f"unknown {pieces[0] if pieces else ''}"]
            if name in TYPES | set(MAKERS):
                pieces += MAKERS.get(name, [])
                found[f"{path.name}:{node.lineno}"] = [x for x in pieces if re.search(r"\w", x)]
    return found


def sections(page: str) -> dict[str, str]:
    """The sections of a page by their anchors, with the sections inside them."""
    found = {}
    headings = list(re.finditer(r"^(#+) (.*)$", page, re.MULTILINE))
    for number, heading in enumerate(headings):
        later = (x.start() for x in headings[number + 1 :] if len(x[1]) <= len(heading[1]))
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        found[anchor] = page[heading.start() : next(later, len(page))]
    return found


SECTIONS = sections((ROOT / errors.PAGE).read_text())


def entries(section: str, page: dict[str, str] = SECTIONS) -> list[list[str]]:
    """The literal pieces of each message in a section; ``...`` stands for the parts that vary."""
    spans = (" ".join(x.split()) for x in re.findall(r"`([^`]+)`", page[section]))
    pieces = ([x.strip("'\"") for x in re.split(r"\.{3,}", span)] for span in spans if " " in span)
    return [[x for x in each if len(x) > 1] for each in pieces]


def explains(entry: list[str], pieces: list[str]) -> bool:
    """Whether an entry has a long part of a message, or all that it has is in the message; the
    parts of a short message must be those of the entry."""
    if len("".join(pieces)) < LEAST:
        return len(entry) == len(pieces) and all(
            text.strip().startswith(x.strip()) for text, x in zip(entry, pieces, strict=True)
        )
    for text in entry:
        if any(len(min(text, x, key=len)) >= LEAST and (text in x or x in text) for x in pieces):
            return True
    whole = re.compile(".*".join(map(re.escape, entry)), re.DOTALL)
    return len("".join(entry)) >= LEAST and bool(whole.search("\0".join(pieces)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(errors.PACKAGE)))
def test_the_section_that_errors_name_explains_them(path):
    section = errors.section_of(path.relative_to(errors.PACKAGE).as_posix())
    explained = entries(section)
    for line, pieces in messages(path).items():
        # An error without a text of its own passes another one on.
        found = any(explains(entry, pieces) for entry in explained)
        assert found or not pieces, (
            f"{line}: #{section} of {errors.PAGE} lacks this message: {'...'.join(pieces)}"
        )


def test_every_section_that_errors_name_exists():
    text = "".join(path.read_text() for path in FILES)
    named = {*errors.SECTIONS.values(), errors.CRASH, *re.findall(r"see\(['\"]([\w-]+)", text)}
    assert named <= set(SECTIONS)
    assert "exit-codes" in SECTIONS


def test_errors_name_the_section_of_the_file_that_makes_them():
    for path in FILES:
        assert errors.section_of(path.relative_to(errors.PACKAGE).as_posix())
    with pytest.raises(errors.ConfigError) as raised:
        errors.check_kwargs("x", len, {"y": 1})
    assert raised.value.__notes__ == ["See docs/troubleshooting.md#exit-codes"]


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda script: script.name)
def test_the_page_of_a_launcher_explains_its_errors(script):
    text = " ".join(script.read_text().replace("\\\n", "").split())
    (page,) = set(re.findall(r"See docs/([\w-]+\.md)#messages", text))
    explained = entries("messages", sections((ROOT / "docs" / page).read_text()))
    found = [x for x in re.findall(r'(?:error|reject) "([^"]+)"', text) if "$*" not in x]
    assert found
    for message in found:
        pieces = [x for x in re.split(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+", message) if len(x) > 1]
        assert any(explains(entry, pieces) for entry in explained), message
