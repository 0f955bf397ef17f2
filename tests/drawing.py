"""Properties that `make test` looks at in a few drawn cases, and `make test-all` in more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings


def drawn(
    few: int, many: int, *strategies: Any, **named: Any
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Decorates a test of drawn cases: the same `few` or `many` in each run."""

    def decorate(test: Callable[..., None]) -> Callable[[int], None]:
        def looks_at(examples: int) -> None:
            how = settings(max_examples=examples)
            how(given(*strategies, **named)(test))()

        # Not with `functools.wraps`: pytest would ask for the arguments of the test.
        looks_at.__name__, looks_at.__module__, looks_at.__doc__ = test.__name__, test.__module__, test.__doc__
        cases = [few, pytest.param(many, marks=pytest.mark.thorough)]
        return pytest.mark.parametrize("examples", cases)(looks_at)

    return decorate
