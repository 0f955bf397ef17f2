"""Reads from a function's source which attributes it refers to, and which arguments it passes by name."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


@functools.cache
def _nodes_of(function: Callable[..., Any]) -> tuple[ast.AST, ...] | None:
    """Returns the syntax of a function's source, without that of its decorators; None for one without a file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return tuple(ast.walk(tree))


def refers_to(function: Callable[..., Any], name: str) -> bool:
    """True if a function has an attribute of that name in it, such as the method of its base class that it calls."""
    nodes = _nodes_of(function)
    if nodes is None:
        return name in getattr(getattr(function, "__code__", None), "co_names", ())
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


def passes(function: Callable[..., Any], argument: str) -> bool | None:
    """True if a function passes an argument of that name in one of its calls; None for one without a source."""
    nodes = _nodes_of(function)
    if nodes is None:
        return None
    return any(isinstance(node, ast.Call) and any(each.arg == argument for each in node.keywords) for node in nodes)


def passes_others(function: Callable[..., Any], name: str) -> bool | None:
    """True if each call of an attribute of that name is given `**others`; None for a function without a source."""
    nodes = _nodes_of(function)
    if nodes is None:
        return None
    calls = (node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name)
    return all(any(each.arg is None for each in call.keywords) for call in calls)
