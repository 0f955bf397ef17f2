"""Reads texts and tables from what a benchmark prints, so that a page shows the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any


def blocks_of(text: str, is_bad: Callable[[str, str], bool]) -> list[dict[str, Any]]:
    """Returns the tables of a text in Markdown, each with the paragraphs before it.

    Args:
        text: paragraphs and tables, whose lines begin with "|".
        is_bad: says of a column's name and a cell's text if it is bad news.

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
        bad = [
            [row, column]
            for row, cells in enumerate(rows)
            for column, cell in enumerate(cells)
            if is_bad(columns[column], cell)
        ]
        title = words.pop().rstrip(":") if words and len(words[-1]) < 100 else ""
        tables.append({"title": title, "text": "\n".join(words), "columns": columns, "rows": rows, "bad": bad})
        words = []
    return [*tables, {"text": "\n".join(words), "columns": [], "rows": []}] if words else tables
