"""Docstrings for the site: their indented blocks are text as it stands, as in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def with_literal_blocks(lines: list[str]) -> Iterator[str]:
    """Marks each indented block after a line of text and a blank one; a section such as `Args:` has no blank line."""
    text = before = ""  # the last line that is not blank, and the last line
    for line in lines:
        if line.startswith("    ") and not before and text and text[0] != " " and not line.lstrip().startswith(">>>"):
            yield from (".. code-block:: text", "")
        yield line
        text, before = line or text, line


def prepare(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Changes a docstring's lines before they are parsed."""
    lines[:] = with_literal_blocks(lines)


def setup(app: Sphinx) -> None:
    """Comes before napoleon, which makes sections of headings."""
    app.connect("autodoc-process-docstring", prepare, priority=100)
