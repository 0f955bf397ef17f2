"""Covering arrays: few cases in which any two values of different axes meet, in place of a full product."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


def covering(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Cases, one value of each axis, so that every pair of values that can meet does in one of them.

    What only three values together would show is for the fuzz.

    Args:
        allowed: whether a case can be run.
    """
    cases = [case for case in itertools.product(*map(range, map(len, axes))) if allowed(*_values(axes, case))]
    return [_values(axes, case) for case in few_of(cases)]


def few_of(cases: Sequence[tuple[Any, ...]], together: int = 2, spread: bool = False) -> list[tuple[Any, ...]]:
    """Selects few of the cases, so that any `together` values at different places that meet in a case do in those.

    Greedy: takes the case with most combinations that have not met, the first where several have as many.

    Args:
        spread: of several with as many, takes the one whose values are rarest in the cases taken before.
    """
    combinations = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    left = set().union(*combinations.values())
    chosen: list[tuple[Any, ...]] = []
    taken: Counter[tuple[int, Any]] = Counter()
    while left:
        combinations = {case: new for case, own in combinations.items() if (new := own & left)}
        best = max(
            combinations,
            key=lambda case: (len(combinations[case]), -sum(taken[each] for each in enumerate(case)) if spread else 0),
        )
        left -= combinations[best]
        chosen.append(best)
        taken.update(enumerate(best))
    return chosen


def _values(axes: Sequence[Sequence[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[place] for axis, place in zip(axes, case, strict=True))
