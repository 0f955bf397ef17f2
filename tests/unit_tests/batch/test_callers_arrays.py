"""Nothing keeps the caller's arrays: a loader that refills its buffers changes no batch, layout, mask or plan."""

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.data import BlendedStream, PackedStream, TokenCorpus

LENGTHS, TOTAL = (3, 1, 4), 8
ATTENTION = cp.AttentionSpec(2, 2, 4, 4, mask="full", scheme="a2a")


def overwritten(arrays):
    """Fills arrays, tensors and lists with other numbers, in place."""
    for array in arrays:
        if isinstance(array, list):
            array[:] = [1] * len(array)
        else:
            array.fill_(1) if isinstance(array, torch.Tensor) else array.fill(1)


def shown(batch):
    """Returns all numbers of a batch, including those that are made when they are read."""
    rows = [batch, *([batch.ahead(places) for places in (0, 1, 2)] if batch.stream is not None else [])]
    names = ("tokens", "labels", "loss_weights", "position_ids")
    found = [getattr(each, name).tolist() for each in rows for name in names]
    return [*found, batch.seed, batch.num_tokens, batch.plans.describe(), batch.plan(ATTENTION).describe()]


@pytest.mark.parametrize("into", [None, cp.GraphTables(TOTAL + 4, 4, 1)], ids=["batch", "slots"])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32, np.int64, np.int32], ids=str)
def test_a_batch_keeps_nothing_of_the_callers(integers, weights, into):
    as_numpy = isinstance(integers, type)
    streams = (
        torch.arange(10, 18),
        torch.tensor([11, 12, -1, 14, 15, 16, 17, 18]),
        torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]),
    )
    tokens, labels, mask = (
        x.numpy().astype(integers) if as_numpy else x.to(kind, copy=True)
        for x, kind in zip(streams, (integers, integers, weights), strict=True)
    )
    for given in ((tokens,), (tokens, labels, mask)):
        lengths = np.array(LENGTHS)
        layout = cp.Layout.contiguous(cp.Packing(lengths), 1) if into is None else into.layout(lengths)
        kept = [x.copy() if as_numpy else x.clone() for x in given]
        options = dict(zip(("labels", "loss_mask"), given[1:], strict=False))
        batch = cp.shard_batch(given[0], layout, into=into, slots=[ATTENTION], **options)
        expected = shown(batch)
        assert all((array == before).all() for array, before in zip(given, kept, strict=True))
        overwritten([*given, lengths])
        assert shown(batch) == expected
        for array, before in zip(given, kept, strict=True):
            array[:] = before


@pytest.mark.parametrize("kind", [np.array, list], ids=["numpy", "list"])
def test_packings_masks_layouts_and_plans_keep_nothing_of_the_callers(kind):
    """They are made of numbers that are overwritten before anything is derived from them."""

    def made(*, overwrite):
        lengths, offsets, prefixes, shares = kind([3, 1, 4]), kind([0, 3, 4, 8]), kind([2, 0, 3]), kind([3, 1])
        parts, own, fragments = [kind([1, 2]), kind([1]), kind([2, 2])], kind([2, 1, 3]), [kind([4, 8]), kind([0, 4])]
        blocks, packing = np.eye(4, dtype=bool), cp.Packing(lengths)
        masks = [
            cp.Mask.prefix(packing, prefixes), cp.Mask.shared_question(packing, parts),
            cp.Mask.full(packing).unpadded(own), cp.Mask.from_blocks(packing, blocks, 2),
        ]  # fmt: skip
        layout, other = cp.Layout.from_fragments(packing, [[f] for f in fragments]), cp.Packing.from_cu_seqlens(offsets)
        plans = cp.BatchPlan(layout, lengths=own)
        stream = PackedStream(TokenCorpus("", TOTAL, np.arange(TOTAL), np.array([0, 3, 4, 8])), 4)
        blend = BlendedStream([stream, stream], shares)
        if overwrite:
            overwritten([lengths, offsets, prefixes, shares, own, blocks, *parts, *fragments])
        found = [packing.cu_seqlens.tolist(), other.cu_seqlens.tolist(), layout.describe(), layout.order.tolist()]
        found += [[mask.bands.tolist(), mask.area, mask.seen.tolist()] for mask in masks]
        return [*found, plans.plan(ATTENTION).describe(), [blend.place(index) for index in range(8)]]

    assert made(overwrite=True) == made(overwrite=False)


def test_a_batch_of_transformers_keeps_nothing_of_the_callers():
    pytest.importorskip("transformers")
    from megatron_cp.transformers import enable_context_parallel
    from tests.transformers_cases import build

    context_parallel = enable_context_parallel(build("Llama", num_hidden_layers=1, dtype=torch.float32), None)

    def rows(*, overwrite):
        batch = {
            "input_ids": torch.arange(3, 11)[None], "labels": torch.arange(3, 11)[None], "other": torch.rand(1, 8),
            "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]), "lengths": torch.tensor(LENGTHS),
        }  # fmt: skip
        batch["other"].fill_(0.5)
        sharded = context_parallel.shard(batch)
        if overwrite:
            overwritten(batch.values())
        found = [sharded[name].tolist() for name in ("input_ids", "labels", "shift_labels", "position_ids", "other")]
        return [*found, sharded.num_items, sharded.layout.describe(), sharded.plans.describe()]

    assert rows(overwrite=True) == rows(overwrite=False)


def test_a_batch_of_megatron_keeps_nothing_of_the_callers():
    pytest.importorskip("megatron.core")
    from megatron_cp.megatron.batch import shard_batch

    def rows(*, overwrite):
        streams = {
            "tokens": torch.arange(3, 11), "labels": torch.arange(4, 12), "loss_mask": torch.full((8,), 0.5),
            "position_ids": torch.arange(16).view(2, 8),
        }  # fmt: skip
        tokens, *_ = streams.values()
        options = {name: x for name, x in streams.items() if name != "tokens"}
        batch = shard_batch(tokens, cp.Layout.contiguous(cp.Packing(LENGTHS), 1), **options)
        if overwrite:
            overwritten(streams.values())
        ahead = batch.packed_seq_params.ahead(1)
        found = [getattr(batch, name).tolist() for name in streams]
        return [*found, ahead.tokens.tolist(), ahead.labels.tolist(), ahead.loss_weights.tolist(), batch.num_tokens]

    assert rows(overwrite=True) == rows(overwrite=False)
