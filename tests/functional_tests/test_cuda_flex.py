"""FlexAttention on a GPU against the reference in float64 on the CPU, as a whole softmax, as a part, and over ranks.

On the emulated device (`tools/nullgpu`) the operator runs uncompiled: what is around it is the same there.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Mask, Packing
from megatron_cp.layout import bands as band
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.kernels import AttentionCall, flex
from megatron_cp.softmax.kernels.base import AttentionKernel
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.testing.parity import Case
from tests.functional_tests.test_cuda import RANKS, assert_close, layer_on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKING = Packing([7, 1, 300, 64, 2, 200])  # the third has whole blocks of 128, and none begins with a document
TOTAL = PACKING.total
MASKS = {
    "causal": Mask.causal(PACKING), "full": Mask.full(PACKING), "window": Mask.window(PACKING, 40, 3),
    "first+window": Mask.window(PACKING, 30, 0, first=4), "prefix": Mask.prefix(PACKING, 20),
    "blind queries": Mask.from_slices(PACKING, [(8, 100, 8, 60, "causal"), (320, 400, 310, 400, "full")]),
}  # fmt: skip
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
NAMES = ("out", "lse", "dq", "dk", "dv")
LAYER = Case("attention", 3, (7, 1, 130, 64, 2), head_dim=32, value_head_dim=48, dtype=torch.float32, kernel="flex")


@contextlib.contextmanager
def operator() -> Iterator[None]:
    """Lets the kernel call what it calls on a GPU; on the emulated device, torch's eager operator."""
    with pytest.MonkeyPatch.context() as patch:
        if "NULLGPU" in os.environ:
            patch.setattr(flex, "_operator", lambda *_: torch_flex.flex_attention)
            patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


def run(
    kernel: AttentionKernel,
    bands: np.ndarray,
    call: AttentionCall,
    shapes: list[tuple[int, int]],
    of_whole: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Output, lse and gradients; backward is given the output and lse of a whole softmax, if it is of a part."""
    random, tiles = torch.Generator().manual_seed(0), Tiles(bands, np.arange(TOTAL), np.arange(TOTAL))
    # Rounded as the kernel has them, whatever type it computes with.
    drawn = [torch.randn(TOTAL, *shape, generator=random).bfloat16() for shape in shapes]
    q, k, v, dout = (x.to(call.device, call.dtype) for x in drawn)
    out, wide = torch.full_like(dout, torch.nan), torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((shapes[0][0], TOTAL), torch.nan, device=call.device, dtype=wide)
    kernel.forward(out, lse, q, k, v, tiles, call, 0)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    given = [x.to(call.device, y.dtype) for x, y in zip(of_whole or (out, lse), (out, lse), strict=True)]
    kernel.backward(*gradients, dout, q, k, v, *given, tiles, call, 0)
    assert all(x.device.type == call.device.type for x in (out, lse, *gradients))
    return [x.to(CPU, torch.float64) for x in (out, lse, *gradients)]


def narrow(bands: np.ndarray) -> np.ndarray:
    """Returns bands with a middle range of the keys, some documents and parts of two, as a ring's stage has them."""
    return band.cut(bands, np.array([50]), np.array([420]), queries=False)[0]


def assert_equals_float64(
    kernel: AttentionKernel, name: str, call: AttentionCall, shapes: list[tuple[int, int]]
) -> None:
    """Holds a kernel's results of a mask, as a whole softmax and as a part of one, to the reference's in float64."""
    assert kernel.refusal(call) is None
    exact, reference = replace(call, dtype=torch.float64, device=CPU), ReferenceAttention()
    given = None
    for bands in (MASKS[name].bands, narrow(MASKS[name].bands)):
        expected = run(reference, bands, exact, shapes, given)
        for what, a, b in zip(NAMES, run(kernel, bands, call, shapes, given), expected, strict=True):
            seen = b.isfinite()  # lse is -inf where a query sees nothing
            assert torch.equal(a[~seen], b[~seen]), what
            error = (a - b)[seen].abs().max() / b[seen].abs().max()
            assert error <= TOLERANCES[call.dtype], (what, float(error))
        given = expected[:2]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "softcap"), [(4, 2, 0.0), (6, 2, 2.0), (3, 3, 0.0)])
@pytest.mark.parametrize("name", MASKS)
def test_kernel_equals_float64_whole_and_as_a_part(name, heads, groups, softcap, dtype):
    shapes = [(heads, 64), (groups, 64), (groups, 48), (heads, 48)]
    with operator():
        assert_equals_float64(
            flex.FlexAttention(), name, AttentionCall(0.2, 64, 48, dtype, CUDA, softcap=softcap), shapes
        )


def layer_with_operator(group, case):
    with operator():
        return layer_on_device(group, case, False)


@pytest.mark.parametrize("mask", ["causal", "first:4+window:16,0"])
@pytest.mark.parametrize("scheme", ["a2a", "p2p", "all_gather"])
def test_layer_equals_float64(scheme, mask):
    """Parts of a softmax are merged, forward and backward, by p2p."""
    alone = replace(LAYER, mask=mask, scheme="a2a", softcap=3.0, learned_sink=True)
    case = replace(alone, scheme=scheme)
    ranks = run_ranks(layer_with_operator, 3, case, kind=RANKS, timeout=280.0)
    assert_close(case, ranks, alone, TOLERANCES[torch.float32])
