"""Reads from a forward's source which calls it makes, and which arguments it passes by name."""

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


def calls_in(function: Callable[..., Any]) -> tuple[ast.Call, ...] | None:
    """Returns the calls in a function's source, without those of its decorators; None for one without a file."""
    nodes = _nodes_of(function)
    return None if nodes is None else tuple(node for node in nodes if isinstance(node, ast.Call))


def refers_to(function: Callable[..., Any], name: str) -> bool:
    """True if a function has an attribute of that name in it, such as the method of its base class that it calls."""
    nodes = _nodes_of(function)
    if nodes is None:
        return name in getattr(getattr(function, "__code__", None), "co_names", ())
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


def passes(function: Callable[..., Any], argument: str) -> bool:
    """True if a function passes an argument of that name in one of its calls.

    The names that bytecode has are asked for where there is no source. They do not suffice: Python 3.14 has those of a
    call with `**kwargs` between other texts.
    """
    calls = calls_in(function)
    if calls is None:
        constants = getattr(getattr(function, "__code__", None), "co_consts", ())
        return any(isinstance(each, tuple) and argument in each for each in constants)
    return any(keyword.arg == argument for call in calls for keyword in call.keywords)
