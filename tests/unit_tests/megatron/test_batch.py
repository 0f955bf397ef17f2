"""`shard_batch`: what each rank is given of a microbatch; and the parameters that carry its plans to the layers."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from megatron_cp.batch.shard import shard_batch as local_batch
from megatron_cp.errors import ArgumentError, PlanMismatchError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, LinearSpec
from megatron_cp.planner.layouts import layout_by_name

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.megatron.batch import shard_batch
from megatron_cp.megatron.packed_seq_params import PlannedSeqParams, is_packed, planned, planned_params
from tests.refusals import rejects
from tests.unit_tests.batch.test_shard import MISFITS, RAGGED, ids

SLOTS = [
    AttentionSpec(heads=8, kv_heads=2, head_dim=8, value_head_dim=8),
    LinearSpec("gdn", heads=8, key_heads=2, head_dim=8, value_head_dim=8),
]
CPU = torch.device("cpu")


def sharded(layout, **arguments):
    """Returns every rank's part of the batch."""
    arguments = {"tokens": ids(layout.packing), "layout": layout} | arguments
    return run_ranks(lambda group: shard_batch(group=group, **arguments), layout.cp_size)


def stream(batches, name):
    """A field of all ranks as the packed stream; asserts that pad rows hold 0."""
    layout = batches[0].packed_seq_params.plans.layout
    rows = [getattr(batch, name).squeeze(0) for batch in batches]
    for own, count in zip(rows, layout.token_counts.tolist(), strict=True):
        assert not own[count:].any()
    return layout.unshard(rows)


def next_tokens(tokens, packing):
    """Returns each token's label, and True if it has one, by a loop."""
    labels, learnt = torch.zeros_like(tokens), torch.zeros(packing.total)
    for start, end in packing.spans():
        for place in range(start, end - 1):
            labels[place], learnt[place] = tokens[place + 1], 1
    return labels, learnt


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "random"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
def test_the_ranks_are_given_the_stream(name, cp_size):
    batches = sharded(layout_by_name(name, RAGGED, cp_size), slots=SLOTS)
    labels, learnt = next_tokens(ids(), RAGGED)
    assert torch.equal(stream(batches, "tokens"), ids())
    assert torch.equal(stream(batches, "labels"), labels)
    assert torch.equal(stream(batches, "loss_mask"), learnt)
    assert torch.equal(stream(batches, "position_ids"), torch.tensor(RAGGED.positions()))
    for batch in batches:
        assert batch.num_tokens == RAGGED.total - 6  # documents that are not empty
        for field in (batch.tokens, batch.labels, batch.position_ids, batch.loss_mask):
            assert field.shape == batch.tokens.shape
            assert field.dtype == (torch.float32 if field is batch.loss_mask else torch.int64)


def test_given_labels_and_weights_are_taken():
    labels = torch.arange(RAGGED.total)
    labels[3], labels[100:120] = -100, -1
    batches = sharded(Layout.zigzag(RAGGED, 3), labels=labels)
    assert torch.equal(stream(batches, "labels"), labels.clamp(min=0))
    assert torch.equal(stream(batches, "loss_mask"), (labels >= 0).float())
    assert {batch.num_tokens for batch in batches} == {RAGGED.total - 21}
    mask = torch.randint(0, 3, (RAGGED.total,), generator=torch.Generator().manual_seed(1)) / 2
    batches = sharded(Layout.zigzag(RAGGED, 3), loss_mask=mask)
    labels, learnt = next_tokens(ids(), RAGGED)
    assert torch.equal(stream(batches, "loss_mask"), mask * learnt)
    assert torch.equal(stream(batches, "labels"), labels * (mask != 0))
    assert {batch.num_tokens for batch in batches} == {int((mask * learnt).count_nonzero())}


def test_a_rank_without_tokens_is_given_pad_rows():
    packing = Packing([2, 0])
    batches = sharded(Layout.contiguous(packing, 5), slots=SLOTS)
    assert torch.equal(stream(batches, "tokens"), ids(packing))
    for rank, batch in enumerate(batches):
        assert batch.tokens.shape == (1, 1)
        assert batch.pad_rows == 3
        assert batch.num_tokens == 1
        assert bool(batch.tokens.any()) == (batch.packed_seq_params.plans.layout.token_counts[rank] == 1)
    for batch in sharded(Layout.zigzag(Packing([0, 0]), 2), slots=SLOTS):
        assert batch.tokens.tolist() == batch.labels.tolist() == [[0]]
        assert batch.loss_mask.tolist() == [[0.0]]
        assert (batch.num_tokens, batch.pad_rows) == (0, 2)
    batches = sharded(Layout.zigzag(Packing([7, 1, 2]), 3, align=4))
    assert [batch.tokens.shape[1] for batch in batches] == [4, 4, 4]
    assert {batch.pad_rows for batch in batches} == {2}


def test_the_parameters_are_megatrons_with_the_plans_of_all_kinds():
    for rank, batch in enumerate(sharded(Layout.zigzag(RAGGED, 3), slots=SLOTS)):
        params = batch.packed_seq_params
        assert isinstance(params, PackedSeqParams)
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q.dtype == params.cu_seqlens_kv.dtype == torch.int32
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == RAGGED.cu_seqlens.tolist()
        assert params.max_seqlen_q == params.max_seqlen_kv == 256  # 130, rounded up
        assert [plan.kind for plan in params.plans.plans] == ["attention", "gdn"]
        assert torch.equal(params.positions, batch.position_ids[0])
        assert params.positions.tolist() == params.plans.layout.positions(rank).tolist()


def test_plans_pass_through_as_they_are():
    params = shard_batch(ids(), Layout.zigzag(RAGGED, 1), slots=SLOTS).packed_seq_params
    assert planned(params, ThreadGroup.create(1)[0]) is params


def offsets_of(lengths):
    return torch.tensor(Packing(lengths).cu_seqlens, dtype=torch.int32)


def megatrons(lengths, **others):
    offsets = offsets_of(lengths)
    fields = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 13}
    return PackedSeqParams(**fields | others)


def padded_megatrons(lengths, rows, **others):
    padded = offsets_of(rows)
    return megatrons(lengths, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, **others)


def test_megatrons_own_parameters_are_planned_once_as_its_zigzag():
    group = ThreadGroup.create(2)[1]
    params = megatrons([8, 4, 12])
    found = planned(params, group, "document")
    assert found.plans.layout == Layout.zigzag(Packing([8, 4, 12]), 2)
    assert found.positions.tolist() == [2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7, 8]
    assert found.max_seqlen_q == 13
    assert found.cu_seqlens_q is params.cu_seqlens_q
    assert planned(params, group, "document") is found


def test_megatrons_whole_packs_are_cut_as_one_whatever_their_documents():
    """`get_batch_on_this_cp_rank(..., use_per_sequence_balancing=True)` cuts packs so."""
    group = ThreadGroup.create(2)[1]
    found = planned(megatrons([7, 9, 8]), group, "pack")
    assert found.plans.layout.packing == Packing([7, 9, 8])
    assert [found.plans.layout.tokens(rank).tolist() for rank in (0, 1)] == [
        [*range(6), *range(18, 24)],
        [*range(6, 12), *range(12, 18)],
    ]
    assert found.positions.tolist() == [6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]


def test_another_order_of_the_same_parameters_is_another_plan():
    group, params = ThreadGroup.create(2)[0], megatrons([8, 4])
    layouts = [planned(params, group, order).plans.layout for order in ("document", "pack", "document")]
    assert layouts[0] == layouts[2] != layouts[1]
    assert planned(params, ThreadGroup.create(1)[0]).plans.cp_size == 1


def test_parameters_that_are_written_to_are_planned_anew():
    """A pipeline that keeps its buffers, or one object for all batches, writes to them."""
    group, params = ThreadGroup.create(1)[0], megatrons([8, 4])
    first = planned(params, group)
    params.cu_seqlens_q[1] = 5
    second = planned(params, group)
    params.cu_seqlens_q = params.cu_seqlens_kv = offsets_of([1, 2, 3])
    third = planned(params, group)
    packings = [one.plans.layout.packing for one in (first, second, third)]
    assert packings == [Packing([8, 4]), Packing([5, 7]), Packing([1, 2, 3])]
    assert planned(params, group) is third


def test_megatrons_padded_lengths_are_those_of_the_rows():
    params = padded_megatrons([5, 8], [8, 8])
    found = planned(params, ThreadGroup.create(2)[0], "document")
    assert found.plans.layout.packing == Packing([8, 8])
    assert found.plans.lengths.tolist() == [5, 8]
    params = padded_megatrons([3, 2], [8, 4], max_seqlen_q=3)
    assert planned(params, ThreadGroup.create(1)[0]).positions.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 0, 1, 2, 2]
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets_of([3, 2]))
    assert planned(params, ThreadGroup.create(1)[0]).plans.layout.packing == Packing([3, 2])
    found = planned(megatrons([7, 1, 3]), ThreadGroup.create(1)[0])
    assert found.plans.layout.packing == Packing([7, 1, 3])


def test_rotary_phases_are_rows_of_the_table_gathered_once():
    layout = Layout.zigzag(RAGGED, 2)
    params = planned_params(BatchPlan(layout), 1, CPU)
    table, other = (torch.randn(130, 1, 1, 8) for _ in range(2))
    phases = params.rotary_phases(table)
    assert torch.equal(phases, table[layout.positions(1)])
    assert params.rotary_phases(table.detach()) is phases  # as a recomputed layer is given it
    assert torch.equal(params.rotary_phases(other), other[layout.positions(1)])
    assert torch.equal(params.rotary_phases(table[:, :, :, :4]), phases[:, :, :, :4])


def test_parameters_of_two_microbatches_share_nothing():
    one, two = (planned_params(BatchPlan(Layout.zigzag(Packing([n]), 1)), 0, CPU) for n in (4, 6))
    table = torch.randn(6, 1, 1, 8)
    assert (len(one.rotary_phases(table)), len(two.rotary_phases(table))) == (4, 6)
    assert {field.name for field in dataclasses.fields(PackedSeqParams)} < {
        field.name for field in dataclasses.fields(PlannedSeqParams)
    }


def disagreement(group, layouts, slots, agree=True):
    layout = layouts[group.rank]
    try:
        shard_batch(ids(layout.packing), layout, group, slots=slots[group.rank], agree=agree)
    except PlanMismatchError as error:
        return str(error)
    return "they agree"


LAYOUTS = [Layout.zigzag(Packing(lengths), 3) for lengths in ([7, 5], [7, 5], [5, 7])]


@pytest.mark.parametrize(
    ("layouts", "slots", "says"),
    [
        (LAYOUTS, [SLOTS] * 3, "rank 2 differs from rank 0.*documents"),
        (LAYOUTS[:1] * 3, [SLOTS, SLOTS[:1], SLOTS], "rank 1 differs from rank 0"),
        (LAYOUTS, [()] * 3, "rank 2 differs from rank 0"),
    ],
    ids=["lengths", "layers", "lengths, no layer named"],
)
def test_rejects_another_batch_on_another_rank_on_every_rank(layouts, slots, says):
    for message in run_ranks(disagreement, 3, layouts, slots):
        assert re.search(says, message, re.DOTALL)


def test_ranks_need_not_compare():
    assert run_ranks(disagreement, 3, LAYOUTS, [SLOTS] * 3, False) == ["they agree"] * 3


ONE_RANK = Layout.zigzag(RAGGED, 1)


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("argument", ["tokens", "labels", "loss_mask"])
def test_rejects_what_is_not_the_batchs_tokens_on_the_host(argument, misfit):
    arguments = {"tokens": ids()} | {argument: MISFITS[misfit]}
    with pytest.raises(ArgumentError, match=rf"^{argument}: .*the \[{RAGGED.total}\] tokens of the batch, on the host"):
        shard_batch(layout=ONE_RANK, **arguments)


def test_rejects_other_groups_and_layers():
    with pytest.raises(ArgumentError):
        shard_batch(ids(), Layout.zigzag(RAGGED, 2), ThreadGroup.create(3)[0])
    with pytest.raises(ArgumentError):
        shard_batch(ids(), Layout.zigzag(RAGGED, 2))
    slot = dataclasses.replace(SLOTS[0], scheme="a2a+p2p")
    rejects("scheme: got 'a2a.p2p'; allowed", shard_batch, ids(), Layout.zigzag(RAGGED, 2), ThreadGroup.create(2)[0],
            slots=[slot])  # fmt: skip


def test_the_seed_of_dropout_is_the_batchs():
    own, plain = ([make(ids(), ONE_RANK, seed=step) for step in (1, 2)] for make in (shard_batch, local_batch))
    assert [batch.packed_seq_params.seed for batch in own] == [batch.seed for batch in plain]


@pytest.mark.parametrize("lengths", [[8, 6], [4, 2], [1], [8, 7, 4]])
def test_rejects_lengths_that_megatrons_sharding_cannot_deal(lengths):
    bad = [length for length in lengths if length % 4]
    with pytest.raises(ArgumentError, match=re.escape(f"documents of {bad} tokens")) as caught:
        planned(megatrons(lengths), ThreadGroup.create(2)[0], "document")
    assert caught.value.allowed == "multiples of 4 from Megatron's own sharding"
    assert "shard_batch" in caught.value.remedy


def test_rejects_packs_and_orders_that_megatron_has_not():
    with pytest.raises(ArgumentError, match=re.escape("packs of [14] tokens")) as caught:
        planned(megatrons([8, 6]), ThreadGroup.create(2)[0], "pack")
    assert caught.value.allowed == "multiples of 4 from Megatron's own sharding"
    with pytest.raises(ArgumentError, match=r"^--cp-packed-order: got 'sequence'; allowed: document or pack"):
        planned(megatrons([8, 4]), ThreadGroup.create(2)[0], "sequence")


@pytest.mark.parametrize("lengths", [[8, 4], [12]])
def test_rejects_several_ranks_where_nobody_says_what_was_cut(lengths):
    with pytest.raises(ArgumentError, match=r"^--cp-packed-order: got None; allowed: document or pack") as caught:
        planned(megatrons(lengths), ThreadGroup.create(2)[0])
    for flag in ("--sft", "--dataloader-inter-document-masking", "TransformerConfig", "shard_batch"):
        assert flag in caught.value.remedy


def idx(*counts):
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()[None]


CONTRADICTIONS = {
    "keys": ({"cu_seqlens_kv": offsets_of([8, 4])}, "keys in other documents than queries"),
    "padded keys": ({"cu_seqlens_kv_padded": offsets_of([6, 8])}, "keys in other documents than queries"),
    "a group": ({"local_cp_size": 2}, "local_cp_size 2"),
    "no lengths": ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, "no cu_seqlens_q"),
    "more tokens": ({"total_tokens": 13}, "total_tokens 13 for cu_seqlens up to 12"),
    "fewer tokens": ({"total_tokens": 11}, "total_tokens 11 for cu_seqlens up to 12"),
    "numbers": ({"seq_idx": idx(5, 7)}, "seq_idx of other documents than cu_seqlens"),
    "numbers of more": ({"seq_idx": idx(4, 8, 2)}, "seq_idx of other documents than cu_seqlens"),
    "a short table": ({"max_seqlen_q": 7}, "max_seqlen_q 7 for a document of 8 tokens"),
    "a short table of keys": ({"max_seqlen_kv": torch.tensor(7)}, "max_seqlen_kv 7 for a document of 8 tokens"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_rejects_params_that_a_plan_over_one_packing_would_get_wrong(name):
    changes, says = CONTRADICTIONS[name]
    with pytest.raises(ArgumentError, match=f"^packed_seq_params: got '{says}'; allowed: "):
        planned(megatrons([4, 8], **changes), ThreadGroup.create(1)[0])


@pytest.mark.parametrize("lengths", [[9, 3], [4, 4, 4]])
def test_rejects_documents_longer_than_their_rows(lengths):
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q of Packing.* in cu_seqlens_q_padded of Packing"):
        planned(padded_megatrons(lengths, [8, 4]), ThreadGroup.create(1)[0])


def test_a_batch_is_packed_where_it_says_so():
    params = megatrons([4, 8], total_tokens=12, max_seqlen_kv=torch.tensor(8))
    assert planned(params, ThreadGroup.create(1)[0]).seq_idx.tolist() == idx(4, 8).tolist()
    named = megatrons([4, 8], seq_idx=idx(4, 8))
    assert planned(named, ThreadGroup.create(1)[0]).plans.layout.packing == Packing([4, 8])
    offsets = offsets_of([6, 6])
    assert is_packed(megatrons([4, 8]), 1)
    assert not is_packed(None, 3)
    assert not is_packed(PackedSeqParams(), 3)
    assert not is_packed(PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=offsets), 2)  # a sequence each


@pytest.mark.parametrize("qkv_format", [None, "bshd", "sbhd"])
def test_rejects_documents_in_a_format_that_is_not_packed(qkv_format):
    params = PackedSeqParams(qkv_format=qkv_format, cu_seqlens_q=offsets_of([4, 8]))
    rejects(r"packed_seq_params: got .*qkv_format .* with 2 documents in a batch of 1", is_packed, params, 1)


def test_positions_of_several_axes_are_dealt_like_tokens():
    layout = Layout.zigzag(Packing([5, 4]), 1).padded(align=4)
    positions = np.arange(27).reshape(3, 9)
    batch = shard_batch(torch.arange(9), layout, position_ids=positions)
    expected = np.zeros((3, 1, 12), np.int64)
    expected[:, 0, :9] = positions[:, layout.tokens(0)]
    assert torch.equal(batch.position_ids, torch.from_numpy(expected))
    assert batch.packed_seq_params.has_axes
    assert batch.packed_seq_params.cp_group.size() == 1
    plain = shard_batch(torch.arange(9), layout).packed_seq_params
    assert (plain.has_axes, plain.cp_group) == (False, None)


@pytest.mark.parametrize(
    "given",
    [
        np.arange(9), np.arange(24).reshape(3, 8), np.ones((3, 9)), torch.ones(3, 9, dtype=torch.bool),
        torch.zeros(3, 9, dtype=torch.int64, device="meta"), 5, [[0] * 9] * 3,
    ],
)  # fmt: skip
def test_rejects_positions_of_other_tokens(given):
    rejects(r"^position_ids: got", shard_batch, torch.arange(9), Layout.zigzag(Packing([5, 4]), 1), position_ids=given)
