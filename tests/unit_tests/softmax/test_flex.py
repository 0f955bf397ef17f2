"""FlexAttention against the reference, where it runs without a GPU: eagerly, past its own refusal of backward there."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from megatron_cp.layout import Mask, Packing
from megatron_cp.layout.tiles import Tiles
from megatron_cp.softmax.kernels import flex
from megatron_cp.softmax.kernels.flex import BLOCK, FlexAttention, block_tables, ranges_of_queries
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from tests.mask_oracle import pairs_of
from tests.unit_tests.softmax.test_kernels import backward, call_for, draw, forward, tiles_of_mask

PACKING = Packing([7, 1, 250, 64, 2])
TOTAL = PACKING.total
MASKS = {
    "causal": Mask.causal(PACKING), "full": Mask.full(PACKING), "window": Mask.window(PACKING, 40, 3),
    "first+window": Mask.window(PACKING, 30, 0, first=5), "prefix": Mask.prefix(PACKING, 20),
    "blind queries": Mask.from_slices(PACKING, [(8, 100, 8, 60, "causal"), (260, 300, 258, 320, "full")]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager_backward(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        yield


def run(kernel, tiles, call, whole=None):
    """Output, lse and gradients; as a part of `whole`, whose output and lse backward is then given."""
    q, k, v, dout = draw(tiles, call, dtype=torch.float32)
    out, lse = forward(kernel, q, k, v, tiles, call)
    return out, lse, *backward(kernel, dout, q, k, v, *(whole or (out, lse)), tiles, call)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.few
def test_flex_equals_the_reference_whole_and_as_a_part(name, softcap):
    call, tiles = call_for(16, 24, torch.float32, scale=0.2, softcap=softcap), tiles_of_mask(MASKS[name])
    whole = run(ReferenceAttention(), tiles, call)[:2]
    for part in (tiles, Tiles(tiles.bands[::2], tiles.q_tokens, tiles.k_tokens)):
        actual, expected = (run(kernel, part, call, whole) for kernel in (FlexAttention(), ReferenceAttention()))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_blocks_and_ranges_are_those_of_the_mask(name):
    visible = pairs_of(MASKS[name].bands, TOTAL, TOTAL).astype(bool)
    starts, ends = ranges_of_queries(MASKS[name].bands, TOTAL)
    keys = np.arange(TOTAL)
    found = ((keys >= starts[..., None]) & (keys < ends[..., None])).sum(0)
    np.testing.assert_array_equal(found, visible)
    some, whole = block_tables(MASKS[name].bands, TOTAL, TOTAL)
    for row, column in np.ndindex(some.shape):
        block = visible[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        assert some[row, column] == block.any()
        assert not whole[row, column] or (block.all() and block.shape[0] == BLOCK)
    assert whole.any() == (name == "full")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "no backward on cpu"), ({"device": "cuda", "dtype": torch.float64}, "has no torch.float64"),
        ({"device": "cuda", "head_dim": 8}, "at least 16"), ({"device": "cuda", "dropout": 0.1}, "dropout"),
    ],
)  # fmt: skip
def test_rejects_what_flex_cannot_run(changes, says):
    call = call_for(**{"head_dim": 64, "dtype": torch.float32, **changes})
    assert says in FlexAttention().refusal(call)
    assert FlexAttention().refusal(call_for(64, 48, torch.bfloat16, "cuda", softcap=5.0)) is None


@pytest.mark.thorough
def test_no_kind_of_call_is_one_too_many_to_compile(monkeypatch):
    """Dynamo compiles a piece of code 8 times; the next would run eagerly, with all scores in memory."""
    graphs, compiled, operator = [], torch.compile, flex._operator

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend=backend, **how))
    monkeypatch.setattr(flex, "_operator", lambda _, *kind: operator("cuda", *kind))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    packing = Packing([7, 1, 150, 2])
    masks = (Mask.causal(packing), Mask.window(packing, 30, 0, first=4))
    tiles = [tiles_of_mask(mask) for mask in masks]
    kinds = [(of, cap, heads, dim) for of in tiles for cap in (0.0, 2.0) for heads in (1, 2, 4) for dim in (16, 32)]
    with torch.no_grad():
        for of, softcap, heads, dim in kinds:
            call = call_for(dim, dtype=torch.float32, softcap=softcap)
            q, k, v = (torch.randn(packing.total, count, dim) for count in (heads, 1, 1))
            flex.FlexAttention().attend(q, k, v, of, call)
    operator.cache_clear()
    assert len(graphs) == len(kinds)
