"""Docstrings for the site: their indented blocks are text as it stands, as in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def with_literal_blocks(lines: list[str]) -> Iterator[str]:
    """Marks each indented block after a blank line as literal; a section such as `Args:` has none before its block."""
    inside = False
    for before, line in zip(["", *lines], lines, strict=False):
        if inside and line and not line.startswith(" "):
            inside = False
        if not inside and not before and line.startswith("    ") and not line.lstrip().startswith(">>>"):
            inside = True
            yield from (".. code-block:: text", "")
        yield line


def prepare(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Changes a docstring's lines before they are parsed."""
    lines[:] = with_literal_blocks(lines)


def setup(app: Sphinx) -> None:
    """Comes before napoleon, which makes sections of headings."""
    app.connect("autodoc-process-docstring", prepare, priority=100)
