"""Tests that poison reaches all memory that is not written, in every type, forward and backward."""

import pytest
import torch

from megatron_cp.testing.poison import poison, poisoned

MAKERS = {
    "empty": lambda: torch.empty(3),
    "empty_like": lambda: torch.empty_like(torch.zeros(3)),
    "new_empty": lambda: torch.zeros(1).new_empty(3),
    "empty_strided": lambda: torch.empty_strided((3,), (2,)),
    "new_empty_strided": lambda: torch.zeros(1).new_empty_strided((3,), (2,)),
    "empty_permuted": lambda: torch.empty_permuted((3, 1), (1, 0)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_unwritten_memory_is_nan_inside_and_only_inside(make):
    with poisoned():
        inside = make()
        assert not torch.zeros(3).isnan().any()
    assert inside.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_poisoned_bytes_are_nan_as_any_float(dtype):
    assert poison(torch.empty(64, dtype=torch.uint8)).view(dtype).isnan().all()


def test_integers_get_their_largest_value():
    assert poison(torch.empty(2, dtype=torch.int32)).tolist() == [2**31 - 1] * 2


def test_a_backward_pass_is_poisoned_too():
    seen = []

    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.empty(3))
            return gradient

    with poisoned():
        Allocates.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen[0].isnan().all()
