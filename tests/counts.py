"""Counts of what a function does: unlike its time, they are the same on a machine that does other things too."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable


def calls_of(work: Callable[[], object]) -> int:
    """Returns how many functions of Python and of C it calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def peak_of(work: Callable[[], object]) -> int:
    """Returns the most bytes that its Python objects and numpy arrays have at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
