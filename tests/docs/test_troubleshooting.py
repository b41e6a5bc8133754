"""docs/troubleshooting.md explains every error, in the section that the error itself names."""

import ast
import pathlib
import re

import pytest

from podracer import errors

PAGE = (pathlib.Path(__file__).parents[2] / errors.PAGE).read_text()
# The functions of errors.py make errors for other files.
FILES = sorted({*errors.PACKAGE.rglob("*.py")} - {errors.PACKAGE / "errors.py"})
# What makes an error; ``kind`` is one of two types in distributed/joining.py.
TYPES = {each.__name__ for each in errors.ERRORS} | {"kind"}
MAKERS = {
    "unknown": ["; did you mean ", "; known: "],
    "missing_extra": [" needs packages that are not installed"],
}
# Shorter texts, such as ": ", are not what a message is known by.
LEAST = 8


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
                found[f"{path.name}:{node.lineno}"] = [x for x in pieces if len(x) >= LEAST]
    return found


def sections() -> dict[str, str]:
    """The sections of the page by their anchors, with the sections inside them."""
    found = {}
    headings = list(re.finditer(r"^(#+) (.*)$", PAGE, re.MULTILINE))
    for number, heading in enumerate(headings):
        later = (x.start() for x in headings[number + 1 :] if len(x[1]) <= len(heading[1]))
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        found[anchor] = PAGE[heading.start() : next(later, len(PAGE))]
    return found


SECTIONS = sections()


def known_by(section: str) -> list[str]:
    """The longest piece of literal text of each message in a section; ``...`` stands for the parts
    that vary."""
    spans = (" ".join(x.split()) for x in re.findall(r"`([^`]+)`", SECTIONS[section]))
    pieces = (
        [x.strip("'\"") for x in re.split(r"\.{3,}", span) if " " in x.strip()] for span in spans
    )
    return [max(each, key=len) for each in pieces if each and len(max(each, key=len)) >= LEAST]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(errors.PACKAGE)))
def test_the_section_that_errors_name_explains_them(path):
    section = errors.section_of(path.relative_to(errors.PACKAGE).as_posix())
    explained = known_by(section)
    for line, pieces in messages(path).items():
        # An error without a text of its own passes another one on.
        found = any(x in piece or piece in x for x in explained for piece in pieces)
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
