"""Over NCCL as the emulated device has it: layers equal float64, and no transfer's memory is touched before its time.

Its ranks are threads; see `tools.nullgpu.nccl`. NCCL itself wants a device a rank.
"""

import os
from dataclasses import replace

import pytest

from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.parity import judge, whole
from megatron_cp.testing.tolerances import CODEC_TOLERANCES
from tests.functional_tests.test_cuda import ATTENTION, GDN, KERNELS, in_float64, layer_on_device

pytestmark = pytest.mark.skipif("NULLGPU" not in os.environ, reason="needs the emulated device")


def agree_with_float64(case, alone, tolerance):
    from tools.nullgpu.nccl import run_ranks_over_nccl

    ranks = run_ranks_over_nccl(layer_on_device, case.cp, case, False)
    parity = judge(case, whole(case, ranks), in_float64(alone))
    assert all(error <= tolerance for error in parity.errors.values()), parity


@pytest.mark.parametrize("mask", ["causal", "first:4+window:16,0"])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_schemes(scheme, mask):
    alone = replace(ATTENTION, mask=mask, scheme="a2a", learned_sink=True)
    agree_with_float64(replace(alone, cp=4, layout="balanced", scheme=scheme), alone, KERNELS["varlen"][1])


@pytest.mark.parametrize("scheme", ["headwise", "chunkwise"])
@pytest.mark.parametrize("layer", ["gdn", "kda", "mamba", "conv1d"])
def test_linear_layers(layer, scheme):
    alone = replace(GDN, layer=layer, scheme=scheme)
    agree_with_float64(replace(alone, cp=3, layout="random"), alone, 1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {"transport": "pairwise"},
        {"transport": "hierarchical", "hosts": (0, 0, 1)},  # one host has a single rank, which idles in a hop
        {"transport": "hierarchical", "scheme": "p2p", "hosts": (0, 0, 1)},
        {"head_chunks": 2},
        {"codec": "fp8"},
        {"codec": "int8", "scheme": "a2a+p2p", "cp": 4, "ulysses_degree": 2},
    ],
    ids=str,
)
def test_transports_chunks_and_codecs(how):
    case = replace(ATTENTION, cp=3, heads=12, groups=6, layout="zigzag")
    tolerance = CODEC_TOLERANCES[how["codec"]] if "codec" in how else KERNELS["varlen"][1]
    agree_with_float64(replace(case, **how), replace(case, scheme="a2a"), tolerance)
