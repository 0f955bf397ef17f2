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
from megatron_cp.testing.parity import Case
from tests.functional_tests.test_cuda import RANKS, assert_close, layer_on_device
from tests.functional_tests.test_cuda_flex import CUDA, MASKS, TOLERANCES, assert_equals_float64
from tools.nullgpu import flash_attn_4 as dense

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
    assert_equals_float64(flash_attn_4.FlashAttention4(), name, call, shapes)


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
    assert_close(case, ranks, alone, TOLERANCES[torch.bfloat16])


def test_rejects_other_devices_and_wide_heads_of_blackwell(monkeypatch):
    kernel, call = flash_attn_4.FlashAttention4(), AttentionCall(0.2, 256, 256, torch.bfloat16, CUDA)
    for capability, says in (((8, 0), "capability 9 and 10"), ((10, 0), "at most 128 features here")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert says in kernel.refusal(call)
        assert (kernel.refusal(replace(call, head_dim=190, value_head_dim=100)) is None) == (capability == (10, 0))
