"""Tests of the calls of mamba_ssm and causal_conv1d, with replacements that compute the same in plain torch.

Those of flash-linear-attention are tested by its own kernels, in `test_package_kernels.py`.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.layout import Packing
from megatron_cp.linear.kernels.base import Delta, LinearCall, StateSpace
from megatron_cp.linear.kernels.causal_conv1d import CausalConv1dConv
from megatron_cp.linear.kernels.fla import _evenly_grouped
from megatron_cp.linear.kernels.mamba_ssm import MambaSsmRule
from tests.linear_oracle import conv_errors, convolution, rule_errors, state_space

ACROSS = [3, 60, 1, 9]  # of three ranks one holds nothing but the middle of a document
LAYOUTS = [("contiguous", 2), ("contiguous", 3), ("zigzag", 2), ("zigzag", 3)]


@pytest.fixture
def calls(monkeypatch):
    """Records the documents and tokens of each call of `mamba_chunk_scan_combined`."""
    calls = []

    def chunk_scan(x, dt, A, B, C, chunk_size, *, seq_idx, return_final_states):  # noqa: N803
        assert return_final_states
        assert chunk_size == 256
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == x.shape[:2]
        lengths = torch.bincount(seq_idx[0]).tolist()
        assert seq_idx[0].tolist() == [number for number, length in enumerate(lengths) for _ in range(length)]
        assert all(lengths)
        heads, groups = x.shape[2], B.shape[2]
        assert heads % groups == 0
        calls.append(lengths)
        shared = [head // (heads // groups) for head in range(heads)]
        inputs = StateSpace(x[0], dt[0], A, B[0], C[0])
        out, state = state_space(inputs, shared, 1.0, lengths, with_state=True)
        return out[None], state.transpose(1, 2)[None]

    monkeypatch.setitem(
        sys.modules, "mamba_ssm.ops.triton.ssd_combined", SimpleNamespace(mamba_chunk_scan_combined=chunk_scan)
    )
    return calls


EVEN, UNEVEN = [[0, 1], [0, 0, 1, 1]], [[0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("groups", [*EVEN, *UNEVEN], ids=str)
def test_mamba_ssm_computes_documents(calls, groups):
    torch.manual_seed(0)
    found = rule_errors(MambaSsmRule(), "mamba", [7, 1, 0, 13], groups, dk=4, dv=3)
    assert all(error <= 1e-5 for error in found.values()), found
    assert calls == [[7, 1, 13]]


@pytest.mark.parametrize("groups", [*EVEN, *UNEVEN], ids=str)
def test_fla_is_given_a_key_head_for_each_head_unless_all_are_shared_evenly(groups):
    q, k = (torch.randn(5, 2, 4) for _ in "qk")
    inputs = Delta(q, k, torch.randn(5, len(groups), 3), torch.zeros(5, 1), torch.zeros(5, 1))
    found = _evenly_grouped(inputs, groups)
    for x, given in ((found.q, q), (found.k, k)):
        assert x is given if groups in EVEN else torch.equal(x, given[:, groups])


@pytest.mark.parametrize("lengths", [ACROSS, [17], [4], [5, 1, 1, 11, 6]])
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_mamba_ssm_computes_segments(calls, layout, ranks, lengths):
    torch.manual_seed(0)
    found = rule_errors(MambaSsmRule(), "mamba", lengths, [0, 0, 1], dk=4, dv=3, layout=layout, ranks=ranks)
    assert all(error <= 1e-5 for error in found.values()), found
    assert sum(map(sum, calls)) == sum(lengths)  # no token is computed twice


def test_mamba_ssm_is_called_once_for_each_segment_that_goes_on_and_once_for_the_rest(calls):
    torch.manual_seed(0)
    rule_errors(MambaSsmRule(), "mamba", ACROSS, [0], dk=4, dv=3, layout="contiguous", ranks=3)
    assert sorted(calls) == [[3, 21], [15, 1, 9], [24]]


class Checked(torch.autograd.Function):
    """The checks of the gradient in the package's C++ code, after what its functions make of strides."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        given = gradient
        if given.stride(2) != 1 and given.stride(1) != 1:
            given = given.contiguous()
        if given.stride(1) != 1:
            given = given.transpose(1, 2).contiguous().transpose(1, 2)
        assert_aligned(given)
        return gradient


def assert_aligned(x):
    """The checks of rows in the package's C++ code, and what its loads of 16 bytes assume."""
    assert x.stride(1) == 1
    assert x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert x.storage_offset() % 8 == 0


@pytest.fixture
def taps(monkeypatch):
    """The activations that `causal_conv1d_fn` was called with."""
    taps = []

    def conv(x, weight, bias, *, seq_idx, activation):
        _, channels, tokens = x.shape
        assert x.stride(2) > 1  # else the package takes rows for columns
        assert_aligned(x)
        assert channels % 8 == 0
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (1, tokens)
        assert seq_idx.is_contiguous()
        assert activation in (None, "silu")
        taps.append(activation)
        lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return Checked.apply(convolution(x[0].t(), weight, bias, lengths, activation == "silu").t()[None])

    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=conv))
    return taps


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_causal_conv1d_computes_documents(taps, bias, silu):
    torch.manual_seed(0)
    found = conv_errors(CausalConv1dConv(), [7, 1, 0, 13], 8, 4, bias, silu)
    assert all(error <= 1e-5 for error in found.values()), found
    assert taps == ["silu" if silu else None]


@pytest.mark.parametrize("lengths", [ACROSS, [17], [4], [5, 1, 1, 11, 6]])
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_causal_conv1d_computes_segments(taps, layout, ranks, lengths):
    torch.manual_seed(0)
    found = conv_errors(CausalConv1dConv(), lengths, 16, 4, bias=True, silu=True, layout=layout, ranks=ranks)
    assert all(error <= 1e-5 for error in found.values()), found
    assert taps == [None] * ranks  # the history comes before the activation


@pytest.mark.parametrize("tokens", [1, 5])
def test_causal_conv1d_takes_columns_of_wider_tensors_and_gradients(taps, tokens):
    torch.manual_seed(0)
    wide = torch.randn(tokens, 13, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    call = LinearCall("conv1d", Packing([tokens]), torch.float32, torch.device("cpu"), 8, 4, (8,))
    y = CausalConv1dConv().conv(wide[:, 5:], weight, None, call, silu=True)
    torch.cat([y, wide[:, :3]], 1).square().sum().backward()
    given = wide.grad[:, 5:], weight.grad
    wide.grad = weight.grad = None
    convolution(wide[:, 5:], weight, None, [tokens], True).square().sum().backward()
    torch.testing.assert_close(given, (wide.grad[:, 5:], weight.grad))


@pytest.mark.parametrize("tokens", [1, 5])
def test_causal_conv1d_takes_expanded_gradients(taps, tokens):
    x = torch.randn(tokens, 8, requires_grad=True)
    call = LinearCall("conv1d", Packing([tokens]), torch.float32, torch.device("cpu"), 8, 4, (8,))
    CausalConv1dConv().conv(x, torch.randn(8, 4), None, call, silu=False).sum().backward()
    assert x.grad.shape == x.shape
