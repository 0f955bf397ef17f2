"""Key heads are expanded for packages that share each by equally many consecutive heads, where they must be."""

import pytest
import torch

from megatron_cp.linear.kernels.base import Delta, StateSpace
from megatron_cp.linear.kernels.fla import _evenly_grouped
from megatron_cp.linear.kernels.mamba_ssm import _prepared

EVEN = [[0], [0, 1], [0, 0, 1, 1], [0, 0, 0]]
UNEVEN = [[0, 0, 1], [0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 0]]
WITHOUT_KEYS = torch.zeros(5, 1)


def keys_of(groups):
    return (torch.randn(5, max(groups) + 1, 4) for _ in range(2))


@pytest.mark.parametrize("groups", EVEN, ids=str)
def test_keys_that_are_shared_evenly_are_passed_on_as_they_are(groups):
    first, second = keys_of(groups)
    values = torch.randn(5, len(groups), 3)
    delta = _evenly_grouped(Delta(first, second, values, WITHOUT_KEYS, WITHOUT_KEYS), groups)
    assert delta.q is first
    assert delta.k is second
    space = _prepared(StateSpace(values, WITHOUT_KEYS, WITHOUT_KEYS, first, second), groups, 1.0)
    assert space.B is first
    assert space.C is second


@pytest.mark.parametrize("groups", UNEVEN, ids=str)
def test_keys_that_are_not_shared_evenly_are_expanded_for_each_head(groups):
    first, second = keys_of(groups)
    values = torch.randn(5, len(groups), 3)
    delta = _evenly_grouped(Delta(first, second, values, WITHOUT_KEYS, WITHOUT_KEYS), groups)
    space = _prepared(StateSpace(values, WITHOUT_KEYS, WITHOUT_KEYS, first, second), groups, 1.0)
    for found, given in ((delta.q, first), (delta.k, second), (space.B, first), (space.C, second)):
        assert torch.equal(found, given[:, groups])
    assert delta.v is space.x is values


@pytest.mark.parametrize("groups", [[0, 0], [0, 0, 1]], ids=str)
def test_mamba_ssm_scales_the_queries(groups):
    first, second = keys_of(groups)
    values = torch.randn(5, len(groups), 3)
    space = _prepared(StateSpace(values, WITHOUT_KEYS, WITHOUT_KEYS, first, second), groups, 0.5)
    expanded = torch.tensor(groups) if len(groups) == 3 else torch.tensor([0])
    assert torch.equal(space.C, second[:, expanded] * 0.5)
    assert torch.equal(space.B, first[:, expanded])
