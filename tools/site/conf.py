"""Configuration of Sphinx for `make docs`. The repository's root is the source, so that pages link as they do in it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import megatron_cp  # noqa: E402 - of this checkout, wherever Sphinx is started
from tools.site import docstrings, source_pages  # noqa: E402

# The navigation: captions, and pages by their paths. A page that is in none fails the build, and so does one that is
# named here and not there.
NAVIGATION = {
    "Start": ["docs/README", "docs/training-command", "docs/versions"],
    "Concepts": ["docs/code", "docs/glossary", "docs/correctness"],
    "Tutorials": [
        "docs/training-in-plain-pytorch",
        "docs/moving-a-megatron-job",
        "docs/transformers",
        "docs/diffusers",
        "docs/hosts",
        "docs/megatron-bridge",
        "docs/cuda-graphs",
    ],
    "Choose": [
        "docs/schemes",
        "docs/linear-layers",
        "docs/more-layers",
        "docs/wire",
        "docs/tiles",
        "docs/planning",
        "docs/costs",
    ],
    "When something is wrong": ["docs/troubleshooting", "docs/profiling", "docs/trust"],
    "Reference": [
        "docs/support",
        "docs/megatron-features",
        "docs/api/README",
        "benchmarks/README",
    ],
    "Project": [
        "docs/decisions/README",
        "megatron_cp/softmax/README",
        "megatron_cp/linear/README",
        "docs/transformers-upstream",
        "CONTRIBUTING",
        "tools/README",
    ],
}
# Pages below an index page, in the order of their names.
FOLDERS = {
    "docs/decisions/README": "docs/decisions",
    "docs/api/README": "docs/api",
    "benchmarks/README": "benchmarks/results",
    "tools/README": "tools/*",
}

project = "megatron_cp"
author = "the megatron_cp maintainers"
version = release = megatron_cp.__version__
language = "en"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "tools/**.md", "megatron_cp/**.md"]
exclude_patterns = [".venv*", ".git", "build", "runs", "tests", "**/.*"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # results jump from the first level of headings to the third

default_role = "py:obj"  # a name in a docstring links to its entry, where it has one
add_module_names = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = ["axolotl"]  # the only framework that its adapter imports at once
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of a docstring are its fields, beside members of the same names

html_theme = "furo"
html_title = f"megatron_cp {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "native"
html_theme_options = {"navigation_with_keys": True}


def toctree(pages: list[str], caption: str = "") -> str:
    """Returns a hidden table of contents in MyST."""
    named = [f":caption: {caption}"] if caption else []
    return "\n".join(
        ["", "```{toctree}", ":hidden:", ":titlesonly:", *named, "", *(f"/{page}" for page in pages), "```", ""]
    )


def add_navigation(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends tables of contents to the home page and to index pages, whose files have none."""
    if docname == root_doc:
        source[0] += "".join(toctree(pages, caption) for caption, pages in NAVIGATION.items())
    if docname in FOLDERS:
        inside = sorted(ROOT.glob(f"{FOLDERS[docname]}/*.md"))
        pages = [str(path.relative_to(ROOT).with_suffix("")) for path in inside]
        source[0] += toctree([page for page in pages if page != docname])


def write_home(app: Sphinx, exception: Exception | None) -> None:
    """Copies the home page to where servers look for it."""
    if exception is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connects what is not configuration."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_home)
    for part in (docstrings, source_pages):
        part.setup(app)
