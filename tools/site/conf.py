"""Configuration of Sphinx for `make docs`. The repository's root is the source, so that pages link as they do in it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.domains.python import PyObject

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import megatron_cp  # noqa: E402 - of this checkout, wherever Sphinx is started
from tools.site import docstrings  # noqa: E402

# The navigation: captions, and pages by their short titles. A page that is in none fails the build, and so does one
# that is named here and not there.
NAVIGATION = {
    "Start": {
        "All pages, by question": "docs/README",
        "Install": "docs/install",
        "Which one do I take": "docs/which",
        "The training command": "docs/training-command",
        "Tested versions": "docs/versions",
    },
    "Concepts": {
        "How a batch is split": "docs/concepts",
        "What is proved": "docs/correctness",
        "The code, as data flows": "docs/code",
        "Layouts and masks": "megatron_cp/layout/README",
        "The planner": "megatron_cp/planner/README",
        "The bound of tiles": "megatron_cp/planner/tiles/README",
        "Plans": "megatron_cp/plan/README",
        "Exchange of heads": "megatron_cp/exchange/README",
        "Executor": "megatron_cp/executor/README",
        "Softmax attention": "megatron_cp/softmax/README",
        "Linear attention": "megatron_cp/linear/README",
        "Glossary": "docs/glossary",
    },
    "Tutorials": {
        "Plain PyTorch": "docs/training-in-plain-pytorch",
        "Layers as torch modules": "docs/nn",
        "Megatron": "docs/moving-a-megatron-job",
        "Packs of equal work": "docs/packs",
        "Hugging Face": "docs/transformers",
        "Trainer and TRL": "docs/trainers",
        "Images and video": "docs/images",
        "Memory of long rows": "docs/memory",
        "diffusers": "docs/diffusers",
        "verl, axolotl and other hosts": "docs/hosts",
        "Megatron-Bridge": "docs/megatron-bridge",
        "CUDA graphs": "docs/cuda-graphs",
    },
    "Choose": {
        "Schemes and masks": "docs/schemes",
        "Linear layers": "docs/linear-layers",
        "More layers": "docs/more-layers",
        "Sparse attention": "docs/sparse-attention",
        "Compressed attention": "docs/compressed-attention",
        "The wire": "docs/wire",
        "Planned tiles": "docs/tiles",
        "A mask of your own": "docs/your-own-mask",
        "A kernel of your own": "docs/your-own-kernel",
        "Shared beginnings": "docs/trees",
        "Generation with a cache": "docs/cache",
        "What will it cost": "docs/planning",
        "A file for your machine": "docs/machine-files",
        "What it costs, measured": "docs/costs",
    },
    "When something is wrong": {
        "Troubleshooting": "docs/troubleshooting",
        "Performance": "docs/performance",
        "Profiling": "docs/profiling",
        "What is trusted": "docs/trust",
    },
    "Reference": {
        "What is supported": "docs/support",
        "Classes of transformers": "docs/transformers-classes",
        "Megatron's flags": "docs/megatron-features",
        "Modules": "docs/api/README",
        "Results": "benchmarks/README",
        "Sources of the table of peers": "docs/sources",
    },
    "Project": {
        "Changelog": "CHANGELOG",
        "Roadmap": "docs/roadmap",
        "Decisions, by subject": "docs/decisions/README",
        "A patch for accelerate": "docs/transformers-upstream",
        "Contributing": "CONTRIBUTING",
        "Security": "SECURITY",
        "Code of conduct": "CODE_OF_CONDUCT",
        "Tools": "tools/README",
    },
}
# The pages below an index page, in the order of their names.
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
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["axolotl", "pydantic"]  # what an adapter imports at once, and no extra installs
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
pygments_style = "github-light"
pygments_dark_style = "github-dark"
html_theme_options = {"navigation_with_keys": True}


def toctree(pages: list[str], caption: str = "") -> str:
    """Returns a hidden table of contents in MyST; a page is a path, or a title and a path in angle brackets."""
    options = [":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def add_navigation(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends tables of contents to the home page and to index pages, whose files have none."""
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += toctree([f"{title} </{page}>" for title, page in pages.items()], caption)
    if docname in FOLDERS:
        inside = sorted(ROOT.glob(f"{FOLDERS[docname]}/*.md"))
        names = [str(path.relative_to(ROOT).with_suffix("")) for path in inside]
        source[0] += toctree([f"/{name}" for name in names if name != docname])


def name_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Leaves a link to a folder as its text, since the site has no page of it; a link to a file downloads that."""
    here = (ROOT / app.env.docname).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("reftype") == "myst" and (here / node["reftarget"]).is_dir():
            node.replace_self(node.children)


def write_home(app: Sphinx, exception: Exception | None) -> None:
    """Copies the home page to where servers look for it."""
    if exception is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connects what is not configuration."""
    for kind in PyObject.doc_field_types:
        if kind.name == "variable":
            kind.label = "Attributes"  # as docstrings call them
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_home)
    app.connect("doctree-read", name_folders)
    docstrings.setup(app)
