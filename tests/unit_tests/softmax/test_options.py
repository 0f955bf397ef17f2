"""Numbers of a softmax: what is refused."""

import re

import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.softmax.options import checked_options


def test_options_are_numbers():
    assert checked_options(16) == (0.25, 0.0, 0.0, 0)
    assert checked_options(16, softmax_scale=2, softcap=1, dropout=0, seed=2**64 - 1) == (2.0, 1.0, 0.0, 2**64 - 1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("softmax_scale", float("nan"), "a finite number, or None"), ("softmax_scale", "2", "a finite number, or None"),
        ("softcap", -1.0, "a finite number of at least 0"), ("softcap", float("inf"), "a finite number of at least 0"),
        ("dropout", 1.0, "a share from 0 up to"), ("dropout", None, "a share from 0 up to"),
        ("seed", -1, "an integer from 0"), ("seed", 1.5, "an integer from 0"),
    ],
)  # fmt: skip
def test_rejects_options_that_no_softmax_has(name, value, allowed):
    with pytest.raises(ArgumentError, match=re.escape(allowed)) as caught:
        checked_options(16, **{name: value})
    assert caught.value.argument == name
