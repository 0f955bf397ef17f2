"""Covering arrays: few cases in which any two values of different axes meet, in place of a full product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def covering(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Cases, one value of each axis, so that every pair of values that can meet does in one of them.

    Greedy: of all cases the one with most pairs that have not met, the first where several have as many. What only
    three values together would show is for the fuzz.

    Args:
        allowed: whether a case can be run.
    """
    cases = [case for case in itertools.product(*map(range, map(len, axes))) if allowed(*_values(axes, case))]
    left = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & _pairs(case)))
        left -= _pairs(best)
        chosen.append(_values(axes, best))
    return chosen


def _values(axes: Sequence[Sequence[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[place] for axis, place in zip(axes, case, strict=True))


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
