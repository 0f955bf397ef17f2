"""Over NCCL as the emulated device has it: layers equal float64, and no transfer's memory is touched before its time.

Its ranks are threads; see `tools.nullgpu.nccl`. NCCL itself wants a device a rank.
"""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_cp as cp
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.tolerances import CODEC_TOLERANCES
from tests.functional_tests.test_cuda import (
    ATTENTION,
    GDN,
    KERNELS,
    SMALL,
    assert_close,
    layer_on_device,
    seconds_of_ranks,
)

pytestmark = pytest.mark.skipif("NULLGPU" not in os.environ, reason="needs the emulated device")

ATTENTION, GDN = replace(ATTENTION, **SMALL), replace(GDN, **SMALL)


def agree_with_float64(case, alone, tolerance):
    from tools.nullgpu.nccl import run_ranks_over_nccl

    ranks = run_ranks_over_nccl(layer_on_device, case.cp, case, False, timeout=seconds_of_ranks())
    assert_close(case, ranks, alone, tolerance)


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


@pytest.mark.parametrize("scheme", ["headwise", "redistribute"])
def test_heads_in_chunks_and_hidden_states_that_move(scheme):
    alone = replace(GDN, scheme="headwise", heads=4, groups=4, hidden_size=32)
    how = {"head_chunks": 2} if scheme == "headwise" else {}
    agree_with_float64(replace(alone, cp=3, layout="zigzag", scheme=scheme, **how), alone, 1e-5)


@pytest.mark.parametrize("name", ["attention_without_megatron", "gated_delta_net_without_megatron"])
def test_examples(name):
    """Whole steps: sharding to the device, layers, the loss, and gradients summed over ranks. They check themselves."""
    from tools.nullgpu.nccl import run_ranks_over_nccl

    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.STEPS = [[[17, 1, 30], [3]], [[5, 2]]]  # fewer tokens, of the example that has steps
    run_ranks_over_nccl(example.main, 3, "cuda", timeout=seconds_of_ranks())


def test_gather():
    from tools.nullgpu.nccl import run_ranks_over_nccl

    layout = cp.Layout.zigzag(cp.Packing([7, 1, 30, 2]), 3)
    for stream, gradient in run_ranks_over_nccl(gathered, 3, layout):
        assert torch.equal(stream, torch.arange(40.0))
        assert torch.equal(gradient, torch.full_like(gradient, 3.0))  # the sum of what each rank makes of its copy


def gathered(group, layout):
    own = layout.shard(torch.arange(40.0, device="cuda"), group.rank).requires_grad_()
    stream = cp.gather(own, layout, group)
    stream.sum().backward()
    return stream.detach().cpu(), own.grad.cpu()
