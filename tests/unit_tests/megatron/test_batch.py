"""`shard_batch`: what each rank is given of a microbatch; and the parameters that carry its plans to the layers."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_cp.batch.shard import shard_batch as local_batch
from megatron_cp.errors import PlanMismatchError
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
from tests.unit_tests.batch.test_shard import RAGGED, ids

SLOTS = [
    AttentionSpec(heads=8, kv_heads=2, head_dim=8, value_head_dim=8),
    LinearSpec("gdn", heads=8, key_heads=2, head_dim=8, value_head_dim=8),
]
CPU = torch.device("cpu")


def sharded(layout, of=shard_batch, **arguments):
    """Returns every rank's part of the batch."""
    arguments = {"tokens": ids(layout.packing), "layout": layout} | arguments
    return run_ranks(lambda group: of(group=group, **arguments), layout.cp_size)


@pytest.mark.parametrize("given", ["nothing", "labels", "loss_mask"])
@pytest.mark.parametrize(("name", "cp_size"), [("zigzag", 1), ("contiguous", 2), ("random", 3), ("balanced", 5)])
@pytest.mark.few
def test_a_rank_is_given_the_batch_of_any_model_in_megatrons_shapes(name, cp_size, given):
    layout, random = layout_by_name(name, RAGGED, cp_size), torch.Generator().manual_seed(1)
    drawn = torch.randint(-1, 3, (RAGGED.total,), generator=random)
    arguments = {"slots": SLOTS, "seed": 3} | ({} if given == "nothing" else {given: drawn})
    of_any_model = sharded(layout, local_batch, ignore_index=0, **arguments)
    for batch, plain in zip(sharded(layout, **arguments), of_any_model, strict=True):
        fields = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_weights", "position_ids": "position_ids"}
        for own, theirs in fields.items():
            assert torch.equal(getattr(batch, own), getattr(plain, theirs)[None])
        assert (batch.num_tokens, batch.pad_rows) == (plain.num_tokens, plain.pad_rows)
        assert batch.packed_seq_params.seed == plain.seed


def test_a_rank_without_tokens_is_given_pad_rows():
    batches = sharded(Layout.contiguous(Packing([2, 0]), 5), slots=SLOTS)
    assert [batch.tokens.shape for batch in batches] == [(1, 1)] * 5
    assert sorted(batch.tokens.any().item() for batch in batches) == [False, False, False, True, True]
    assert {(batch.pad_rows, batch.num_tokens) for batch in batches} == {(3, 1)}
    for batch in sharded(Layout.zigzag(Packing([0, 0]), 2), slots=SLOTS):
        assert batch.tokens.tolist() == batch.labels.tolist() == [[0]]
        assert batch.loss_mask.tolist() == [[0.0]]
        assert (batch.num_tokens, batch.pad_rows) == (0, 2)


def test_the_parameters_are_megatrons_with_the_plans_of_all_kinds():
    for rank, batch in enumerate(sharded(Layout.zigzag(RAGGED, 3), slots=SLOTS)):
        params = batch.packed_seq_params
        assert isinstance(params, PackedSeqParams)
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q.dtype == params.cu_seqlens_kv.dtype == torch.int32
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == RAGGED.cu_seqlens.tolist()
        assert params.max_seqlen_q == params.max_seqlen_kv == 256  # 130, rounded up
        assert [plan.kind for plan in params.plans.plans] == ["attention", "gdn"]
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


def disagreement(group, agree):
    layout = Layout.zigzag(Packing([7, 5] if group.rank < 2 else [5, 7]), 3)
    try:
        shard_batch(ids(layout.packing), layout, group, agree=agree)
    except PlanMismatchError as error:
        return str(error)
    return "they agree"


def test_rejects_another_batch_on_another_rank_on_every_rank_where_they_compare():
    for message in run_ranks(disagreement, 3, True):
        assert "rank 2 differs from rank 0" in message
    assert run_ranks(disagreement, 3, False) == ["they agree"] * 3


def idx(*counts):
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()[None]


OTHER_KEYS, OTHER_IDS = "keys in other documents than queries", "seq_idx of other documents than cu_seqlens"
UNCUT = (
    r"^--cp-packed-order: got None; allowed: document or pack.*--sft.*--dataloader-inter-document-masking.*"
    "TransformerConfig.*shard_batch"
)
# Parameters of documents of 4 and 8 tokens that a plan over one packing would get wrong.
CONTRADICTIONS = [
    ({"cu_seqlens_kv": offsets_of([8, 4])}, OTHER_KEYS), ({"cu_seqlens_kv_padded": offsets_of([6, 8])}, OTHER_KEYS),
    ({"local_cp_size": 2}, "local_cp_size 2"), ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, "no cu_seqlens_q"),
    ({"total_tokens": 13}, "total_tokens 13 for cu_seqlens up to 12"),
    ({"total_tokens": 11}, "total_tokens 11 for cu_seqlens up to 12"),
    ({"seq_idx": idx(5, 7)}, OTHER_IDS), ({"seq_idx": idx(4, 8, 2)}, OTHER_IDS),
    ({"max_seqlen_q": 7}, "max_seqlen_q 7 for a document of 8 tokens"),
    ({"max_seqlen_kv": torch.tensor(7)}, "max_seqlen_kv 7 for a document of 8 tokens"),
]  # fmt: skip
REJECTED = [
    *((megatrons([4, 8], **changes), 1, None, f"^packed_seq_params: got '{says}'; allowed: ")
      for changes, says in CONTRADICTIONS),
    # What Megatron's own sharding cannot deal.
    *((megatrons(lengths), 2, "document", rf"documents of {bad} tokens.*multiples of 4 from Megatron's.*shard_batch")
      for lengths, bad in (([8, 6], r"\[6\]"), ([4, 2], r"\[2\]"), ([1], r"\[1\]"), ([8, 7, 4], r"\[7\]"))),
    (megatrons([8, 6]), 2, "pack", r"packs of \[14\] tokens.*multiples of 4 from Megatron's own sharding"),
    (megatrons([8, 4]), 2, "sequence", r"^--cp-packed-order: got 'sequence'; allowed: document or pack"),
    (megatrons([8, 4]), 2, None, UNCUT), (megatrons([12]), 2, None, UNCUT),
    *((padded_megatrons(lengths, [8, 4]), 1, None, "cu_seqlens_q of Packing.* in cu_seqlens_q_padded of Packing")
      for lengths in ([9, 3], [4, 4, 4])),
]  # fmt: skip


@pytest.mark.parametrize(("params", "cp_size", "order", "says"), REJECTED)
def test_rejects_parameters(params, cp_size, order, says):
    rejects(says, planned, params, ThreadGroup.create(cp_size)[0], order)


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
