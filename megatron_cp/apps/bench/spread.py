"""Medians and quartiles, and their printed form."""

from __future__ import annotations

from collections.abc import Mapping
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
