"""The documentation site: sphinx-build -W --keep-going -c docs . build/site

The source is the whole repository, so that a relative link between documents leads to the same
place on GitHub and on the site.
"""

import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# Sphinx runs this file alone: it is found only on the path above.
import podracer  # noqa: E402

NAVIGATION = {
    "Start": [
        "docs/quickstart",
        *(f"notebooks/{name}" for name in ("anakin", "sebulba", "remote", "replay", "search")),
        *(f"docs/coming_from_{name}" for name in ("purejaxrl", "cleanrl", "stoix", "brax")),
    ],
    "Ways to act": ["docs/anakin", "docs/sebulba", "docs/remote"],
    "Environments": ["docs/environments"],
    "Algorithms": [
        *("docs/ppo", "docs/vtrace", "docs/q_lambda", "docs/dqn", "docs/r2d2"),
        *("docs/d4pg", "docs/muzero", "docs/alphazero"),
    ],
    "Guides": [
        "docs/guides/environment-jax",
        "docs/guides/environment-host",
        "docs/guides/network",
        "docs/guides/agent",
        "docs/guides/tuning",
        "docs/guides/paper",
        "docs/sweeps",
        "docs/learned_updates",
        "docs/averaging",
        "docs/scaling",
        "docs/runs",
        "docs/guides/preemption",
        "docs/guides/live-view",
        "docs/guides/profiling",
        "docs/troubleshooting",
    ],
    "Batch jobs and clouds": [
        "docs/guides/batch-jobs",
        "docs/guides/plan",
        "docs/launch-slurm",
        "docs/launch-gke",
        "docs/launch-tpu-vm",
        "docs/launch-workers",
        "docs/accelerators",
    ],
    "Reference": ["docs/settings", "docs/commands", "docs/api"],
    "Measured": ["docs/results", "benchmarks/README", "docs/comparison"],
    "Project": ["docs/design", "docs/releases", "CONTRIBUTING", "CHANGELOG"],
}

project = "podracer"
author = copyright = "The podracer authors"
version = release = podracer.__version__
root_doc = "README"
# Every document has its place in the navigation: Sphinx warns of one that has none, and a warning
# ends the build.
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md", "notebooks/*.ipynb"]
exclude_patterns = ["build", "runs", "**/runs", "**/.*", "**/node_modules"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# GitHub's own extensions of Markdown: formulas, and anchors of headings.
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
nb_execution_mode = "off"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "separated"
# Fields of records are described once, by their class.
napoleon_use_ivar = True
napoleon_custom_sections = [("Attributes", "params_style")]

# Anchors of GitHub's pages are made by scripts. OWNER is replaced when the project is published.
# The other sites answer browsers only.
linkcheck_anchors = False
linkcheck_ignore = [r"https://([\w.-]+/)+OWNER/", r"https://(doi\.org|openreview\.net)/"]

html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_title = f"podracer {release}"
html_show_sphinx = False
html_copy_source = False


def add_what_is_made(app: Sphinx, document: str, source: list[str]) -> None:
    """Adds the navigation to the first page."""
    if document == root_doc:
        for caption, pages in NAVIGATION.items():
            lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
            source[0] += "\n".join(lines)


def has_a_description(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> Any:
    """Skips the fields of named tuples, whose description says that they are fields."""
    return True if type(obj).__name__ == "_tuplegetter" else None


class LinksToFiles(SphinxPostTransform):
    """Turns a link to a file of the repository into one to the page that shows it."""

    default_priority = 5
    files: ClassVar[set[str]] = set()

    def run(self, **kwargs: Any) -> None:
        here = self.app.builder.get_target_uri(self.env.docname)
        for node in list(self.document.findall(download_reference)):
            file = (ROOT / self.env.docname).parent.joinpath(node["reftarget"]).resolve()
            name = str(file.relative_to(ROOT))
            self.files.add(name)
            target = self.app.builder.get_target_uri(f"files/{name}")
            link = nodes.reference("", "", *node.children, refuri=relative_uri(here, target))
            node.replace_self(link)


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that a document links to."""
    for name in sorted(LinksToFiles.files):
        text = (ROOT / name).read_text()
        language = {".py": "python", ".sh": "bash", ".yaml": "yaml"}.get(pathlib.Path(name).suffix)
        body = app.builder.highlighter.highlight_block(text, language or "text")
        yield f"files/{name}", {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def begin_with_the_readme(app: Sphinx, error: Exception | None) -> None:
    """The first page is also found under the site's bare address."""
    if error is None and app.builder.name == "html":
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_what_is_made)
    app.connect("autodoc-skip-member", has_a_description)
    app.add_post_transform(LinksToFiles)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("build-finished", begin_with_the_readme)
