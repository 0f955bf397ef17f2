"""flash-attn 4 on a GPU against the reference in float64 on the CPU, as a whole softmax, as a part, and over ranks.

On the emulated device (`tools/nullgpu`) dense attention with flash-attn's own checks is in the package's place.
"""

import os
import sys
from dataclasses import replace

import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.softmax.kernels import AttentionCall, flash_attn_4
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.testing.parity import Case, judge, whole
from tests.functional_tests.test_cuda import RANKS, in_float64, layer_on_device
from tests.functional_tests.test_cuda_flex import CPU, CUDA, MASKS, NAMES, narrow, run
from tools.nullgpu import flash_attn_4 as dense

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCE = 2e-2
LAYER = Case("attention", 3, (7, 1, 130, 64, 2), head_dim=64, dtype=torch.bfloat16, kernel="flash_attn_4")
IS_EMULATED = "NULLGPU" in os.environ


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if IS_EMULATED:
        emulate(monkeypatch)
    refusal = flash_attn_4.FlashAttention4().refusal(AttentionCall(0.2, 64, 64, torch.bfloat16, CUDA))
    if refusal is not None:
        pytest.skip(refusal)


def emulate(monkeypatch):
    monkeypatch.setattr(flash_attn_4, "installed_version", lambda package: (4, 0))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", dense)


@pytest.mark.parametrize(
    ("key_size", "value_size", "softcap"), [(64, 64, 0.0), (60, 44, 2.0), (192, 128, 0.0), (250, 250, 2.0)]
)
@pytest.mark.parametrize("name", MASKS)
def test_kernel_equals_float64_whole_and_as_a_part(name, key_size, value_size, softcap, monkeypatch):
    if IS_EMULATED and value_size == 128:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    shapes = [(4, key_size), (2, key_size), (2, value_size), (4, value_size)]
    call = AttentionCall(0.2, key_size, value_size, torch.bfloat16, CUDA, softcap=softcap)
    exact = replace(call, dtype=torch.float64, device=CPU)
    kernel = flash_attn_4.FlashAttention4()
    assert kernel.refusal(call) is None
    expected = run(ReferenceAttention(), MASKS[name].bands, exact, shapes)
    part, given = narrow(MASKS[name].bands), expected[:2]
    pairs = [
        (run(kernel, MASKS[name].bands, call, shapes), expected),
        (run(kernel, part, call, shapes, given), run(ReferenceAttention(), part, exact, shapes, given)),
    ]
    for actual, true in pairs:
        for what, a, b in zip(NAMES, actual, true, strict=True):
            seen = b.isfinite()  # lse is -inf where a query sees nothing
            assert torch.equal(a[~seen], b[~seen]), what
            error = (a - b)[seen].abs().max() / b[seen].abs().max()
            assert error <= TOLERANCE, (what, float(error))


def layer_with_package(group, case):
    with pytest.MonkeyPatch.context() as patch:
        if IS_EMULATED:
            emulate(patch)
        return layer_on_device(group, case, False)


@pytest.mark.parametrize("mask", ["causal", "first:4+window:16,0"])
@pytest.mark.parametrize("scheme", ["a2a", "p2p"])
def test_layer_equals_float64(scheme, mask):
    alone = replace(LAYER, mask=mask, scheme="a2a", learned_sink=True, softcap=3.0)
    case = replace(alone, scheme=scheme)
    ranks = run_ranks(layer_with_package, 3, case, kind=RANKS, timeout=280.0)
    parity = judge(case, whole(case, ranks), in_float64(alone))
    assert all(error <= TOLERANCE for error in parity.errors.values()), parity


def test_rejects_other_devices_and_wide_heads_of_blackwell(monkeypatch):
    kernel, call = flash_attn_4.FlashAttention4(), AttentionCall(0.2, 256, 256, torch.bfloat16, CUDA)
    for capability, says in (((8, 0), "capability 9 and 10"), ((10, 0), "at most 128 features here")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert says in kernel.refusal(call)
        assert (kernel.refusal(replace(call, head_dim=190, value_head_dim=100)) is None) == (capability == (10, 0))
