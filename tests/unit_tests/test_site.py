"""Docstrings' blocks are marked as text for the site."""

import pytest

from tools.site.docstrings import with_literal_blocks


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
