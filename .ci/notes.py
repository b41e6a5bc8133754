"""The release notes of a version, from CHANGELOG.md: ``python .ci/notes.py [TAG]`` prints them.

Without a tag, they are those of the unreleased changes. With one, its version must be that
of the package, and have a section of its own.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
# A heading such as "## 0.2.0 (2027-01-31)".
RELEASED = r"^## {} \(\d{{4}}-\d\d-\d\d\)$"


def notes(changelog: str, version: str | None) -> str:
    """The section of a version; None stands for what has not been released yet.

    Raises:
      ValueError: there is no such section, or it is empty.
    """
    name = "## Unreleased" if version is None else f"## {version} (YEAR-MONTH-DAY)"
    heading = "^## Unreleased$" if version is None else RELEASED.format(re.escape(version))
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    text = found[1].strip() if found else ""
    if not text:
        raise ValueError(f"CHANGELOG.md has nothing under a heading {name!r}")
    return text + "\n"


def check_tag(tag: str, version: str) -> str:
    """The version of a tag. Raises ``ValueError`` if it is not the package's version."""
    if tag != f"v{version}":
        raise ValueError(
            f"the tag is {tag!r}, but podracer.__version__ is {version!r}, whose tag is "
            f"'v{version}': set the version in podracer/__init__.py and CITATION.cff, or delete "
            "the tag"
        )
    return version


def main(tags: list[str]) -> None:
    init = (ROOT / "podracer" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.*)"$', init, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = check_tag(tags[0], version) if tags else None
    print(notes(changelog, released), end="")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
