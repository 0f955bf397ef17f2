"""Reads texts and tables from what a benchmark prints, so that a page shows the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any


def blocks_of(text: str, bad_cells: Callable[[list[str], list[str]], list[int]]) -> list[dict[str, Any]]:
    """Returns the tables of a text in Markdown, each with the paragraphs before it.

    Args:
        bad_cells: returns the places of a row's cells that are bad news, from the columns' names and the row.

    Returns:
        `tables` of `page_of`; the paragraphs behind the last table come as one without columns.
    """
    tables: list[dict[str, Any]] = []
    words: list[str] = []
    for is_table, group in groupby(text.splitlines(), lambda line: line.startswith("|")):
        lines = list(group)
        if not is_table:
            words = [line.lstrip("# ") for line in lines if line.strip()]
            continue
        columns, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines)
        bad = [[number, place] for number, row in enumerate(rows) for place in bad_cells(columns, row)]
        title = words.pop().rstrip(":") if words and len(words[-1]) < 100 else ""
        tables.append({"title": title, "text": "\n".join(words), "columns": columns, "rows": rows, "bad": bad})
        words = []
    return [*tables, {"text": "\n".join(words), "columns": [], "rows": []}] if words else tables
