"""Helpers of tests of refusals."""

import re

import pytest

from megatron_cp.errors import ArgumentError


def refusal_of(argument, given):
    """An `ArgumentError` that names an argument and what it was given."""
    return pytest.raises(ArgumentError, match=f"^{re.escape(f'{argument}: got {given}; allowed: ')}")


def rejects(says, call, /, *args, **named):
    """Fails unless a call raises an `ArgumentError` in whose message the pattern `says` is found."""
    with pytest.raises(ArgumentError, match=says):
        call(*args, **named)
