"""Docstrings: their examples are true, other blocks are text on the site, and they begin like sentences."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import megatron_cp
from tools.site.docstrings import with_literal_blocks

ROOT = Path(megatron_cp.__file__).parents[1]
EXAMPLES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): count
    for path in sorted((ROOT / "megatron_cp").rglob("*.py"))
    if (count := len(re.findall(r"^ *>>> ", path.read_text(), re.MULTILINE)))
}

PUBLIC = {name: getattr(megatron_cp, name) for name in megatron_cp.__all__ if hasattr(megatron_cp, name)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a page
    found = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, **PUBLIC})
    assert found == doctest.TestResults(failed=0, attempted=EXAMPLES[name])


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


def test_docstrings_begin_with_a_verb_or_the_name_of_a_thing():
    begun = re.compile(r"(How|Likewise|Of|One|Those|What|When|Where|Whether|Which)\b")
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for folder in ("megatron_cp", "tests", "tools", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and begun.match(text := ast.get_docstring(node) or "")
    ]
    assert found == []
