"""Medians and quartiles, and how they and tables are printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def spread(values: Any) -> dict[str, float]:
    """Returns the median and the quartiles on either side."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def formatted(value: Mapping[str, float], *, percent: bool = False) -> str:
    """Returns a spread as text."""
    low, median, high = (value[name] * (100 if percent else 1) for name in ("low", "median", "high"))
    digits, unit = (1, " %") if percent else (2, "")
    return f"{median:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def table(left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, whose last columns, `right`, are aligned to the right."""
    rule = f"|{'---|' * len(left)}{'--:|' * len(right)}"
    head, *lines = (f"| {' | '.join(row)} |" for row in ((*left, *right), *rows))
    return [head, rule, *lines]
