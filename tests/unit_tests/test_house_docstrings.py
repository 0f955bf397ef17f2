"""Docstrings are whole sentences: none begins with a word that only continues what stands above it."""

import ast
from pathlib import Path

import pytest

from tests.unit_tests.test_house import statements

ROOT = Path(__file__).parents[2]
FOLDERS = {"megatron_cp": 300, "tools": 30, "tests": 200, "examples": 3, "benchmarks": 1}  # and the least files
OPENINGS = {
    "What", "One", "Of", "Whether", "How", "For", "Where", "Those", "That", "As", "Which", "Who", "Likewise", "Each",
    "Some",
}  # fmt: skip
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source):
    """Yields the line and the first line of each docstring in a source that begins with a listed word."""
    for node in statements(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, WITH_DOCSTRING) else None
        if text and text.split()[0].rstrip(",.:;").partition("'")[0] in OPENINGS:
            yield node.body[0].lineno, text.splitlines()[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_whole_sentences(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) >= FOLDERS[folder]
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files for line, text in fragments(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What a plan is."""', [(1, "What a plan is.")]),
        ('def f():\n    """Whether it is.\n\n    Or not.\n    """', [(2, "Whether it is.")]),
        ('async def f():\n    """As, likewise."""', [(2, "As, likewise.")]),
        ('class C:\n    """A class."""\n\n    def f(self):\n        """One\'s own."""', [(5, "One's own.")]),
        ('def f():\n    """Offers one.\n\n    What stands below may begin so.\n    """', []),
        ('def f():\n    """\n    Each.\n    """', [(2, "Each.")]),
        ("def f():\n    pass", []),
        ('def f():\n    """"""', []),
    ],
)  # fmt: skip
def test_a_fragment_is_seen(source, expected):
    assert list(fragments(source)) == expected
