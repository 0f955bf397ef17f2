"""Helpers of tests of refusals."""

import re

import pytest

from megatron_cp.errors import ArgumentError


def refusal_of(argument, given):
    """An `ArgumentError` that names an argument and what it was given."""
    return pytest.raises(ArgumentError, match=f"^{re.escape(f'{argument}: got {given}; allowed: ')}")
