"""`BatchPlan` and its slots: which layers share a plan, when plans are made, and what two ranks compare."""

import dataclasses

import numpy as np
import pytest

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.plan.transport import Transport
from megatron_cp.planner.attention import plan_attention
from megatron_cp.planner.batch import AttentionSpec, BatchPlan, LinearSpec
from megatron_cp.planner.layouts import CHOICES, choose_layout, layout_by_name
from megatron_cp.planner.linear import plan_linear
from tests.refusals import rejects

PACKING = Packing([7, 1, 0, 130, 2])
LAYOUT = Layout.zigzag(PACKING, 3)
ATTENTION = AttentionSpec(heads=6, kv_heads=2, head_dim=8, value_head_dim=16)
LINEAR = LinearSpec("gdn", heads=6, key_heads=2, head_dim=8, value_head_dim=16)


@pytest.mark.parametrize("slot", [ATTENTION, LINEAR], ids=["attention", "linear"])
def test_slots_are_values_and_take_transports_by_name(slot):
    same = dataclasses.replace(slot)
    assert same is not slot
    assert same == slot
    assert hash(same) == hash(slot)
    assert len({slot, same, dataclasses.replace(slot, heads=8), dataclasses.replace(slot, head_dim=16)}) == 3
    by_name, by_value = (
        dataclasses.replace(slot, transport=transport) for transport in ("pairwise", Transport("pairwise"))
    )
    assert by_name == by_value
    assert len({by_name, by_value, slot}) == 2
    assert by_name.plan(LAYOUT).transport == Transport("pairwise")
    rejects("hosts_of", dataclasses.replace, slot, transport="hierarchical")


def test_slots_plan_all_they_say():
    same = AttentionSpec(heads=6, kv_heads=2, head_dim=8)
    assert same == AttentionSpec(6, 2, 8, 8)
    assert same.value_head_dim == 8
    assert AttentionSpec(heads=6, head_dim=8).kv_heads == 6
    assert AttentionSpec(heads=2, head_dim=8, latent=(2, 4)).kv_heads == 2
    assert same.plan(LAYOUT) == AttentionSpec(6, 2, 8, 8).plan(LAYOUT)
    assert ATTENTION.value_head_dim == 16
    slot = dataclasses.replace(ATTENTION, mask="window:5,0", scheme="a2a+p2p", ulysses_degree=2, head_chunks=1)
    layout = Layout.zigzag(PACKING, 4)
    expected = plan_attention(
        PACKING, layout, heads=6, kv_heads=2, head_dim=8, value_head_dim=16, mask=Mask.window(PACKING, 5, 0),
        scheme="a2a+p2p", ulysses_degree=2, head_chunks=1,
    )  # fmt: skip
    assert slot.plan(layout) == expected
    assert slot.plan(layout) != ATTENTION.plan(layout)
    expected = plan_linear(
        PACKING, LAYOUT, "gdn", heads=6, key_heads=2, head_dim=8, value_head_dim=16, mode="redistribute", conv_width=3,
        hidden_size=64, layers=2,
    )  # fmt: skip
    slot = dataclasses.replace(LINEAR, mode="redistribute", conv_width=3, hidden_size=64, run=(LINEAR, LINEAR))
    assert slot.plan(LAYOUT) == expected
    expected = plan_linear(PACKING, LAYOUT, "mamba", heads=6, groups=2, state=8, head_dim=16)
    assert dataclasses.replace(LINEAR, kind="mamba").plan(LAYOUT) == expected


def test_pads_inside_a_batch_are_seen_by_no_attention():
    lengths = [5, 1, 0, 130, 0]
    plans = BatchPlan(LAYOUT, [dataclasses.replace(ATTENTION, mask="full"), LINEAR], lengths=lengths)
    assert plans.plans[0].mask == Mask.full(PACKING).unpadded(lengths)
    assert plans.plan(ATTENTION).mask == Mask.causal(PACKING).unpadded(lengths)
    assert plans.plan(LINEAR) == LINEAR.plan(LAYOUT)  # it is causal, and pads are behind
    whole = BatchPlan(LAYOUT, [dataclasses.replace(ATTENTION, mask="full"), LINEAR])
    assert plans.fingerprint() != whole.fingerprint()


@pytest.mark.parametrize(("mode", "run"), [("chunkwise", False), ("redistribute", False), ("auto", True)])
def test_a_linear_slot_says_what_its_mode_leaves_unused(mode, run):
    large = LinearSpec("gdn", 32, 16, 128, 128, mode=mode, codec="fp8", head_chunks=2, hidden_size=64)
    slot = dataclasses.replace(large, run=(dataclasses.replace(large, hidden_size=None),) if run else ())
    packing = Packing([60_000, 500, 5_036])
    plan = slot.plan(Layout.zigzag(packing, 8))
    scheme = "redistribute" if plan.redistribution else plan.scheme
    assert scheme == ("redistribute" if run else mode)
    note = f"codec fp8 and 2 head chunks are unused: {scheme} was chosen, which exchanges no heads; headwise uses them"
    assert plan.notes[-1] == note
    assert not dataclasses.replace(slot, mode="headwise").plan(plan.layout).notes


def test_layers_of_equal_slots_share_a_plan(monkeypatch):
    plans = BatchPlan(LAYOUT, [ATTENTION, LINEAR, dataclasses.replace(ATTENTION), LINEAR])
    assert len(plans.plans) == 2
    assert plans.plan(dataclasses.replace(ATTENTION)) is plans.plan(ATTENTION)
    assert plans.plan(ATTENTION) is plans.plans[0]
    assert plans.plan(LINEAR) is plans.plans[1]
    assert BatchPlan(LAYOUT).cp_size == 3
    assert BatchPlan(LAYOUT).plans == []
    one = BatchPlan(LAYOUT, [ATTENTION, LINEAR])
    other = BatchPlan(Layout.zigzag(Packing([7, 1, 0, 130, 2]), 3), [dataclasses.replace(ATTENTION), LINEAR])
    assert len(one.fingerprint()) == 16
    assert one.fingerprint() == other.fingerprint()
    assert one.describe() == other.describe()
    plans = BatchPlan(LAYOUT, [ATTENTION])
    monkeypatch.setattr(AttentionSpec, "plan", None)
    assert plans.plan(ATTENTION).layout is LAYOUT


def test_a_kind_that_was_not_named_is_planned_once_when_its_first_layer_asks(monkeypatch):
    plans, made = BatchPlan(LAYOUT, [ATTENTION]), []
    plan = LinearSpec.plan
    monkeypatch.setattr(LinearSpec, "plan", lambda *args: made.append(args) or plan(*args))
    assert len(plans.plans) == 1
    first = plans.plan(LINEAR)
    assert plans.plan(dataclasses.replace(LINEAR)) is first
    assert plans.plans == [plans.plan(ATTENTION), first]
    assert made == [(LINEAR, LAYOUT)]


def test_other_batches_have_other_fingerprints():
    """By their layouts, also without a plan, and by each plan and its place."""
    heads = dataclasses.replace(ATTENTION, heads=8)
    given = [[], [ATTENTION], [ATTENTION, LINEAR], [LINEAR, ATTENTION], [heads, LINEAR]]
    layouts = [LAYOUT, LAYOUT.padded(min_rows=1), Layout.contiguous(PACKING, 3)]
    batches = [BatchPlan(layout, slots) for layout in layouts for slots in given]
    assert len({batch.fingerprint() for batch in batches}) == len(batches)
    assert BatchPlan(LAYOUT).fingerprint() == BatchPlan(Layout.zigzag(PACKING, 3)).fingerprint()


def test_rejects_slots_that_cannot_be_planned():
    slot = dataclasses.replace(ATTENTION, scheme="a2a+p2p")  # a product of 3
    rejects("^scheme: got ", BatchPlan, LAYOUT, [slot])
    rejects("^scheme: got ", BatchPlan(LAYOUT).plan, slot)


def causal_but_for_the_first(packing):
    """Returns a mask in which the first token of each document sees all of it."""
    starts, ends = packing.cu_seqlens[:-1], packing.cu_seqlens[1:]
    slices = [(s, e, s, e, "causal") for s, e in zip(starts, ends, strict=True) if e > s]
    return Mask.from_slices(packing, [*slices, *((s, s + 1, s, e, "full") for s, e, *_ in slices)])


def whole_for_the_last(packing):
    """Returns a mask in which the last token of each document sees all of it, and the others themselves."""
    spans = list(packing.spans())
    alone = [(token, token + 1, token, token + 1, "full") for token in range(packing.total)]
    return Mask.from_slices(packing, [*alone, *((end - 1, end, start, end, "full") for start, end in spans)])


def test_a_function_takes_no_pads_for_tokens():
    lengths = [5, 1, 0, 100, 2]
    mask = dataclasses.replace(ATTENTION, mask=whole_for_the_last).plan(LAYOUT, lengths).mask
    seen = np.split(mask.seen, PACKING.cu_seqlens[1:-1])
    for length, whole, found in zip(lengths, PACKING.lengths, seen, strict=True):
        assert found.tolist() == ([1] * (length - 1) + [length] if length else []) + [0] * (whole - length)
    assert mask != whole_for_the_last(PACKING).unpadded(lengths)  # whose last tokens are pads
    rejects("lengths: .*numbers up to", dataclasses.replace(ATTENTION, mask=whole_for_the_last).plan, LAYOUT, [999] * 5)


def test_a_mask_is_a_name_a_mask_or_a_function_of_the_packing_everywhere():
    """In a spec, `plan_attention` and the choice of a layout."""
    masks = {"window:6": Mask.window(PACKING, 5), causal_but_for_the_first: causal_but_for_the_first(PACKING)}
    for given, mask in masks.items():
        expected = plan_attention(PACKING, LAYOUT, heads=6, kv_heads=2, head_dim=8, value_head_dim=16, mask=mask)
        assert expected.mask == mask
        for way in (given, mask):
            spec = dataclasses.replace(ATTENTION, mask=way)
            assert spec.plan(LAYOUT) == expected
            assert BatchPlan(LAYOUT, [spec]).plan(spec) == expected
            own = dataclasses.replace(spec).plan(LAYOUT, [5, 1, 0, 100, 2]).mask
            assert own == mask.unpadded([5, 1, 0, 100, 2])
            assert plan_attention(
                PACKING, LAYOUT, heads=6, kv_heads=2, head_dim=8, value_head_dim=16, mask=way
            ) == expected  # fmt: skip
            assert layout_by_name("balanced", PACKING, 3, mask=way) == Layout.balanced(PACKING, 3, mask=mask)
            assert choose_layout(PACKING, 3, [spec]).name in CHOICES
    of_another = dataclasses.replace(ATTENTION, mask=Mask.causal(Packing([3])))
    rejects(r"a function, which makes a mask for each batch\.", of_another.plan, LAYOUT)
    rejects(
        "mask: got 'a function that returns 5'; allowed: a mask over the same packing",
        dataclasses.replace(ATTENTION, mask=lambda packing: 5).plan, LAYOUT,
    )  # fmt: skip
    rejects('or a name, such as "window:128"', dataclasses.replace, ATTENTION, mask=5)
    rejects(r"Did you mean window:N\?", dataclasses.replace, ATTENTION, mask="windw:5")
