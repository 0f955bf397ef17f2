"""The site's navigation has every page once, and docstrings' blocks are marked as text."""

import ast
from pathlib import Path

import pytest

from tools.site.docstrings import with_literal_blocks

ROOT = Path(__file__).parents[2]


def constants():
    """Returns the literals of the site's configuration, which imports what the tests do not have."""
    tree = ast.parse((ROOT / "tools/site/conf.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("NAVIGATION", "FOLDERS")
    }


def test_navigation_has_every_page_once():
    found = constants()
    named = [page for pages in found["NAVIGATION"].values() for page in pages.values()]
    below = [path for folder in found["FOLDERS"].values() for path in ROOT.glob(f"{folder}/*.md")]
    below = [str(path.relative_to(ROOT).with_suffix("")) for path in below]
    pages = [*ROOT.glob("*.md"), *(path for room in ROOT.iterdir() if room.is_dir() and room.name[0] != "." and
             room.name not in ("build", "runs", "tests", "dist") for path in room.rglob("*.md"))]  # fmt: skip
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in pages} - {"README"}
    assert sorted({*named, *below}) == sorted(pages)
    assert len(named) == len(set(named))
    assert set(found["FOLDERS"]) <= set(named)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Makes it.\n\n    a  u = 1\n    b\n\nMore.",
            "Makes it.\n\n.. code-block:: text\n\n    a  u = 1\n    b\n\nMore.",
        ),
        ("Makes it.\n\nArgs:\n    a: one.\n\n        inner", None),
        ("Makes it.\n\n    >>> 1\n    1", None),
        ("Makes it.\n\n    a\n\n    b", "Makes it.\n\n.. code-block:: text\n\n    a\n\n    b"),
    ],
    ids=["block", "section", "example", "two paragraphs"],
)
def test_indented_blocks_are_text(text, expected):
    found = list(with_literal_blocks(text.splitlines()))
    assert found == (expected or text).splitlines()
