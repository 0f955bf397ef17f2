"""`shard_batch`: which rows, labels, weights, positions and plans each rank is given of a pack."""

import dataclasses

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.batch import shard as shard_module
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.layouts import layout_by_name
from tests.refusals import rejects

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

RAGGED = cp.Packing([7, 1, 130, 0, 64, 2, 33])
SLOTS = [cp.AttentionSpec(8, 2, 8, 8), cp.LinearSpec("gdn", heads=8, key_heads=2, head_dim=8, value_head_dim=8)]


def ids(packing=RAGGED):
    return torch.randint(1, 1000, (packing.total,), generator=torch.Generator().manual_seed(0))


def sharded(layout, **arguments):
    """Returns every rank's part of the batch."""
    arguments = {"tokens": ids(layout.packing), "layout": layout} | arguments
    return run_ranks(lambda group: cp.shard_batch(group=group, **arguments), layout.cp_size)


def stream(batches, name, pad=0):
    """A field of all ranks as the packed stream; asserts what pad rows hold."""
    layout, rows = batches[0].layout, [getattr(batch, name) for batch in batches]
    for own, count in zip(rows, layout.token_counts.tolist(), strict=True):
        assert (own[count:] == pad).all()
    return layout.unshard(rows)


def next_tokens(tokens, packing):
    """Returns each token's label, and True if it has one, by a loop."""
    labels, learnt = torch.full_like(tokens, -100), torch.zeros(packing.total)
    for start, end in packing.spans():
        for place in range(start, end - 1):
            labels[place], learnt[place] = tokens[place + 1], 1
    return labels, learnt


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("name", ["zigzag", "contiguous", "balanced", "random"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
@pytest.mark.few(together=2)
def test_the_ranks_are_given_the_stream(name, cp_size, align):
    layout = layout_by_name(name, RAGGED, cp_size, align=align)
    batches = sharded(layout, slots=SLOTS)
    labels, learnt = next_tokens(ids(), RAGGED)
    assert torch.equal(stream(batches, "tokens"), ids())
    assert torch.equal(stream(batches, "labels", pad=-100), labels)
    assert torch.equal(stream(batches, "loss_weights"), learnt)
    assert torch.equal(stream(batches, "position_ids"), torch.tensor(RAGGED.positions()))
    for rank, batch in enumerate(batches):
        assert batch.num_tokens == RAGGED.total - 6  # documents that are not empty
        assert (batch.layout, batch.pad_rows) == (layout, layout.pad_rows.sum())
        for field in (batch.tokens, batch.labels, batch.position_ids, batch.loss_weights):
            assert field.shape == (layout.row_counts[rank],)
            assert field.dtype == (torch.float32 if field is batch.loss_weights else torch.int64)


def test_a_batch_has_the_plans_of_the_layers_and_what_they_derive(monkeypatch):
    layout, other = cp.Layout.zigzag(RAGGED, 3), cp.AttentionSpec(4, 4, 8, 8)
    for batch in sharded(layout, slots=SLOTS):
        assert [plan.kind for plan in batch.plans.plans] == ["attention", "gdn"]
        for slot in (*SLOTS, other):
            assert batch.plan(slot) == slot.plan(layout)
        assert batch.plan(other) is batch.plan(other)
    made = []
    monkeypatch.setattr(shard_module, "prepare", lambda plan, rank, device: made.append((plan.kind, rank, device.type)))
    monkeypatch.setattr(shard_module, "prepare_attention", lambda plan, rank, device: made.append(plan.kind))
    cp.shard_batch(ids(), cp.Layout.zigzag(RAGGED, 1), slots=SLOTS)
    assert made == [("attention", 0, "cpu"), "attention", ("gdn", 0, "cpu")]


def test_a_rank_or_a_batch_may_have_no_tokens():
    packing = cp.Packing([2, 0])
    batches = sharded(cp.Layout.contiguous(packing, 5), slots=SLOTS)
    assert sorted(len(batch.tokens) for batch in batches) == [0, 0, 0, 1, 1]
    assert torch.equal(stream(batches, "tokens"), ids(packing))
    assert [(batch.num_tokens, batch.pad_rows) for batch in batches] == [(1, 0)] * 5
    for batch in sharded(cp.Layout.zigzag(cp.Packing([0, 0]), 2), slots=SLOTS):
        assert batch.tokens.shape == batch.labels.shape == batch.loss_weights.shape == (0,)
        assert (batch.num_tokens, batch.pad_rows) == (0, 0)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, ">u2"])
def test_tokens_may_be_as_they_lie_on_disk(dtype):
    tokens = np.repeat(ids().numpy(), 2).astype(dtype)[::2]
    tokens.flags.writeable = False  # as a memory-mapped file is
    batch = cp.shard_batch(tokens, cp.Layout.zigzag(RAGGED, 1))
    assert torch.equal(batch.tokens, ids())
    assert torch.equal(batch.labels, next_tokens(ids(), RAGGED)[0])


def test_given_labels_are_taken_as_they_are_and_negative_ones_count_nothing():
    labels = torch.arange(RAGGED.total)
    labels[3], labels[100:120] = -100, -1
    for given in (labels, labels.numpy().astype(np.int32)):
        batches = sharded(cp.Layout.zigzag(RAGGED, 3, align=4), labels=given, ignore_index=-5)
        assert torch.equal(stream(batches, "labels", pad=-5), labels.where(labels >= 0, torch.tensor(-5)))
        assert torch.equal(stream(batches, "loss_weights"), (labels >= 0).float())
        assert {batch.num_tokens for batch in batches} == {RAGGED.total - 21}
    mask = np.where(np.arange(RAGGED.total) < 150, 0.5, 0)
    batches = sharded(cp.Layout.contiguous(RAGGED, 2), labels=labels, loss_mask=mask)
    assert torch.equal(stream(batches, "loss_weights"), ((labels >= 0) * torch.tensor(mask)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64, "numpy"])
def test_a_loss_mask_weighs_what_has_a_label(dtype):
    mask = torch.randint(-1, 3, (RAGGED.total,), generator=torch.Generator().manual_seed(1)) / 2
    given = mask.numpy() if dtype == "numpy" else mask.to(dtype)
    mask = torch.as_tensor(given).float()
    before = mask.clone()
    batches = sharded(cp.Layout.zigzag(RAGGED, 3), loss_mask=given)
    labels, learnt = next_tokens(ids(), RAGGED)
    weights = mask * learnt
    assert torch.equal(stream(batches, "loss_weights"), weights)
    assert torch.equal(stream(batches, "labels"), labels.where(weights != 0, torch.tensor(-100)))
    assert {batch.num_tokens for batch in batches} == {int(weights.count_nonzero())}
    assert torch.equal(torch.as_tensor(given).float(), before)  # the caller's is left alone


def test_seeds_differ_by_batch_and_step_and_not_by_rank():
    def seed_of(tokens, step, rank=0):
        group, layout = ThreadGroup.create(2)[rank], cp.Layout.zigzag(RAGGED, 2)
        return cp.shard_batch(tokens, layout, group, seed=step, agree=False).seed

    first = seed_of(ids(), 1)
    assert first == seed_of(ids(), 1) == seed_of(ids(), 1, rank=1)
    assert len({first, seed_of(ids(), 2), seed_of(ids() + 1, 1)}) == 3


@pytest.mark.parametrize("mask", [None, np.arange(RAGGED.total) % 3 == 0])
def test_rejects_labels_that_are_the_tokens(mask):
    tokens, layout = ids(), cp.Layout.contiguous(RAGGED, 1)
    ignored = torch.where(torch.arange(RAGGED.total) % 2 == 0, tokens, -100)
    for labels in (tokens, tokens.numpy(), ignored):
        given = {"tokens": tokens, "layout": layout, "labels": labels, "loss_mask": mask}
        rejects("labels: got 'the tokens, wherever they count'; .*labels_may_be_tokens=True", cp.shard_batch, **given)
        batch = cp.shard_batch(**given, labels_may_be_tokens=True)
        assert torch.equal(batch.labels[batch.loss_weights != 0], tokens[batch.loss_weights != 0])


def test_labels_may_equal_tokens_where_the_next_tokens_do_or_by_chance():
    layout = cp.Layout.contiguous(cp.Packing([5, 4]), 1)
    few = torch.tensor([1, 2, 3, -100, -100, 6, -100, -100, 9])  # the last token has no next one here
    for tokens, labels in (
        (torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)),
        (torch.tensor([7, 7, 7, 7, 7, 2, 2, 2, 2]), torch.tensor([7, 7, 7, 7, 7, 2, 2, 2, 2])),
        (torch.arange(1, 10), few.where(torch.arange(9) != 0, -100)),
        (torch.arange(1, 10), torch.full((9,), -100)),
        (torch.arange(1, 10), torch.arange(2, 11)),
    ):
        assert cp.shard_batch(tokens, layout, labels=labels).labels.tolist() == labels.tolist()


TWO_RANKS = cp.Layout.zigzag(RAGGED, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cp.shard_batch(torch.zeros(138, dtype=torch.int64), cp.Layout.zigzag(cp.Packing([0, 7, 8, 138]), 1)),
         r"tokens: got '138 rows'.*Packing\.from_cu_seqlens\(\[0, 7, 8, 138\]\)"),
        (lambda: cp.shard_batch(ids(), TWO_RANKS), "group: got None"),
        (lambda: cp.attention(*[torch.zeros(1, 1, 1)] * 3, cp.shard_batch(ids(), cp.Layout.contiguous(RAGGED, 1))),
         r"plan: got 'a LocalBatch'; allowed: a plan made by plan_attention\. That of a batch is batch\.plan\(slot\)"),
        (lambda: cp.BatchPlan(TWO_RANKS, [cp.nn.Attention(8, heads=2)]), r"(?s)slots\[0\]: .*layer\.slot"),
        (lambda: dataclasses.replace(SLOTS[0], kv_heads=3), "kv_heads: got 3; allowed: a divisor of heads, 8"),
    ],
)  # fmt: skip
def test_rejects_what_is_no_batch(call, says):
    rejects(says, call)


@pytest.mark.parametrize("given", [{}, {"loss_mask": np.linspace(0, 1, 7)}, {"labels": np.arange(1, 8)}], ids=str)
def test_weights_are_float32_whatever_the_default_type(given):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        batch = cp.shard_batch(np.arange(7), cp.Layout.contiguous(cp.Packing([4, 3]), 1), **given)
    finally:
        torch.set_default_dtype(before)
    assert batch.loss_weights.dtype == torch.float32
