"""Rows by which `GraphTables` fills up a document change nothing of its tokens, or the layer is refused."""

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.kinds import KINDS
from megatron_cp.planner.linear import LinearShape
from megatron_cp.testing.layers import LAYERS
from tests.mask_oracle import pairs_of
from tests.refusals import rejects

_MASKS = (
    "causal", "full", "window:2,0", "window:-1,0", "window:2,2", "window:-1,1", "window:0,3", "window:0,-1",
    "prefix:0", "prefix:1", "prefix:2", "prefix:6", "chunk:1", "chunk:3", "first:2+window:1,0", "first:9+window:1,0",
    "first:1+window:1,1", "star:2", "strided:4",
)  # fmt: skip


def places(lengths, packing):
    """Returns the places of the documents' tokens after these are filled up."""
    return np.concatenate([start + np.arange(n) for start, n in zip(packing.cu_seqlens, lengths, strict=False)])


@pytest.mark.parametrize("mask", _MASKS)
def test_tokens_see_what_they_see_without_filling_or_the_mask_is_refused(mask):
    """Refused exactly where a token would see a row that fills up its document."""
    slots, slot = cp.GraphTables(24, 3, 2, align_documents=4), cp.AttentionSpec(2, 2, 4, 4, mask=mask, scheme="a2a")
    for lengths in ([4, 8], [4], [3, 5], [4, 8, 1], [7, 2], [1, 1, 1], [5, 4]):
        layout, given = slots.layout(lengths), cp.Packing(lengths)
        tokens, over = places(lengths, layout.packing), cp.Mask.named(layout.packing, mask)
        seen = pairs_of(over.bands, 24, 24)[tokens]
        filler = np.setdiff1d(np.arange(24 - layout.packing.lengths[-1]), tokens)
        if seen[:, filler].any() or (filler.size and mask.startswith(("star", "strided"))):
            rejects("sees the pads of its document", slot.plan, layout)
        else:
            assert slot.plan(layout).mask == over
            expected = pairs_of(cp.Mask.named(given, mask).bands, given.total, given.total)
            assert np.array_equal(seen[:, tokens], expected)


@pytest.mark.parametrize("scheme", ["a2a", "p2p", "exact"])
@pytest.mark.parametrize("mask", ["full", "window:2,2"])
def test_rejects_masks_that_see_what_fills_up_a_document(mask, scheme):
    slots, slot = cp.GraphTables(16, 4, 2, align_documents=4), cp.AttentionSpec(2, 2, 4, 4, mask=mask, scheme=scheme)
    message = f"mask: got '{mask}'; .*Document 1 has 5 tokens and is padded to 8.*align_documents=1"
    layout = slots.layout([4, 5])
    with pytest.raises(cp.ArgumentError, match=message):
        cp.shard_batch(np.arange(9), layout, ThreadGroup.create(2)[0], slots=[slot], into=slots, agree=False)
    with pytest.raises(cp.ArgumentError, match=message):  # a kind that is planned when its layer asks
        cp.BatchPlan(layout).plan(slot)
    without = slot.plan(layout, [4, 5, 0, 0, 4])  # whoever says the documents' own lengths has the filling masked
    assert without.mask.area == cp.Mask.named(cp.Packing([4, 5, 4]), mask).area


def test_rejects_cross_attention_where_documents_are_filled_up():
    """The last query sees the last key there, and which is last changes with what fills up."""
    layout, other = (
        cp.GraphTables(16, 2, 2, align_documents=4).layout([3, 5]),
        cp.Layout.zigzag(cp.Packing([3, 5, 4]), 2),
    )
    for queries, keys in ((layout, other), (other, layout)):
        with pytest.raises(cp.ArgumentError, match="of a pack to itself if documents are padded"):
            cp.plan_attention(
                queries.packing, queries, kv_packing=keys.packing, kv_layout=keys, heads=2, head_dim=4, scheme="exact"
            )


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("kind", LAYERS)
def test_what_fills_up_a_document_changes_no_bit_of_a_linear_layer(kind, mode):
    """Outputs, and gradients of tokens and of parameters, do not depend on the rows that fill up."""
    for size in (1, 3):
        runs = [run_ranks(_linear, size, kind, mode, fill, kind="threads") for fill in (0.0, 30.0)]
        for ranks in zip(*runs, strict=True):
            for one, other in zip(*ranks, strict=True):
                assert torch.equal(one, other), float((one - other).abs().max())


def _linear(group, kind, mode, fill):
    """A layer's outputs and gradients of tokens, and gradients of parameters, with `fill` in all other rows."""
    lengths, (heads, key_heads, dim) = [7, 1, 2, 6], (6, 6 if kind == "kda" else 2, 8)
    layout = cp.GraphTables(48, 4, group.size, align_documents=6).layout(lengths)
    is_token = torch.zeros(48, dtype=torch.bool)
    is_token[torch.from_numpy(places(lengths, layout.packing))] = True
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    inputs, parameters = LAYERS[kind].draw(LinearShape(KINDS[kind], heads, key_heads, dim, dim, 4), 48, normal)
    rows = [layout.shard(torch.where(is_token[:, None], x, fill), group.rank) for x in inputs.values()]
    rows, held = [x.requires_grad_() for x in rows], layout.shard(is_token, group.rank)
    own = {name: x.requires_grad_() for name, x in parameters.items()}
    plan = cp.LinearSpec(kind, heads, key_heads, dim, dim, mode=mode).plan(layout)
    out = LAYERS[kind].run(*rows, plan, group, **own)[held]
    out.square().sum().backward()
    return [out.detach(), *(x.grad[held] for x in rows), *(x.grad for x in own.values())]
