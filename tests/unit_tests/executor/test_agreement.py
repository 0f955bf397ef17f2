"""Ranks that planned differently all fail, and say in what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import megatron_cp as cp
from megatron_cp.errors import PlanMismatchError
from megatron_cp.executor.groups import Pending, RankGroup, ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.plan import Plan
from megatron_cp.executor.run import check_agreement
from tests.limits import limit

LENGTHS = (7, 1, 13, 2)
SIZE = 3


def attention_plan(
    lengths: tuple[int, ...] = LENGTHS,
    layout: str = "zigzag",
    align: int = 1,
    heads: int = 6,
    kv_heads: int = 3,
    head_dim: int = 4,
    value_head_dim: int = 4,
    mask: str = "causal",
) -> Plan:
    packing = cp.Packing(lengths)
    return cp.plan_attention(
        packing, getattr(cp.Layout, layout)(packing, SIZE, align=align), heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_head_dim=value_head_dim, mask=getattr(cp.Mask, mask)(packing),
    )  # fmt: skip


def linear_plan(lengths: tuple[int, ...] = LENGTHS) -> Plan:
    packing = cp.Packing(lengths)
    return cp.plan_linear(packing, cp.Layout.zigzag(packing, SIZE), "gdn", heads=6, head_dim=4)


def refusals(plans: list[Plan]) -> list[str]:
    """What each rank is told."""

    def rank_main(group: RankGroup) -> str:
        with pytest.raises(PlanMismatchError) as caught:
            check_agreement(plans[group.rank], group)
        return str(caught.value)

    return run_ranks(rank_main, SIZE, timeout=limit(5))


def test_equal_plans_cost_one_all_gather_of_16_bytes():
    def rank_main(group: ThreadGroup) -> list[tuple[str, int]]:
        calls = []
        for name in ("start_all_gather", "start_all_to_all", "start_messages"):  # the first is built on the second
            setattr(group, name, _noted(name, getattr(group, name), calls))
        check_agreement(attention_plan(), group)  # each rank makes its own
        return calls

    assert run_ranks(rank_main, SIZE) == [[("start_all_gather", 16), ("start_all_to_all", 16 * SIZE)]] * SIZE


def _noted(name: str, method: Callable[..., Pending], calls: list[tuple[str, int]]) -> Callable[..., Pending]:
    def noted(received: Tensor, sent: Tensor, *splits: list[int]) -> Pending:
        calls.append((name, sent.nbytes))
        return method(received, sent, *splits)

    return noted


# What one rank plans otherwise, and what the message shows of each side.
DIFFERENCES = {
    "lengths": ({"lengths": (7, 1, 12, 3)}, "Packing([7, 1, 13, 2])", "Packing([7, 1, 12, 3])"),
    "a document more": ({"lengths": (7, 1, 13, 2, 0)}, "Packing([7, 1, 13, 2])", "Packing([7, 1, 13, 2, 0])"),
    "layout": ({"layout": "contiguous"}, "fragments hash", "fragments hash"),
    "align": ({"align": 8}, "align 1", "align 8"),
    "heads": ({"heads": 9}, "q 6 x 4", "q 9 x 4"),
    "key/value heads": ({"kv_heads": 6}, "k 3 x 4", "k 6 x 4"),
    "head size": ({"head_dim": 5}, "q 6 x 4", "q 6 x 5"),
    "value size": ({"value_head_dim": 5}, "v 3 x 4", "v 3 x 5"),
    "mask": ({"mask": "full"}, "mask: causal in each document", "mask: full in each document"),
}


@pytest.mark.parametrize("odd", [0, 2], ids=lambda rank: f"rank {rank} differs")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_rejects_plans_that_differ_on_every_rank_showing_both(name: str, odd: int):
    options, ours, theirs = DIFFERENCES[name]
    plans = [attention_plan()] * SIZE
    plans[odd] = attention_plan(**options)
    messages = refusals(plans)
    assert len(set(messages)) == 1
    other = odd or 1  # the first rank that differs from rank 0
    at_rank_0, at_other = (theirs, ours) if odd == 0 else (ours, theirs)
    assert _shown(messages[0], 0, at_rank_0)
    assert _shown(messages[0], other, at_other)
    assert _lines(messages[0], 0) != _lines(messages[0], other)


def _lines(message: str, rank: int) -> list[str]:
    start = f"  rank {rank}: "
    return [line.removeprefix(start) for line in message.splitlines() if line.startswith(start)]


def _shown(message: str, rank: int, text: str) -> bool:
    return any(text in line for line in _lines(message, rank))


def test_only_lines_that_differ_are_shown():
    (message, *_) = refusals([attention_plan(), attention_plan(), attention_plan(mask="full")])
    assert _lines(message, 0) == ["mask: causal in each document"]
    assert _lines(message, 2) == ["mask: full in each document"]


def test_rejects_layers_of_different_kinds():
    plans = [attention_plan(), linear_plan(), attention_plan()]
    for message in refusals(plans):
        assert _shown(message, 0, "kind: attention")
        assert _shown(message, 1, "kind: gdn")


def test_rejects_documents_that_differ_behind_those_that_are_printed():
    plans = [attention_plan((3,) * 20), attention_plan((3,) * 20), attention_plan((3,) * 19 + (4,))]
    for message in refusals(plans):
        assert _shown(message, 0, "20 documents, 60 tokens")
        assert _shown(message, 2, "20 documents, 61 tokens")


def test_rejects_a_group_that_is_not_the_plans():
    for group in (None, ThreadGroup.create(2)[0]):
        with pytest.raises(cp.ArgumentError, match="group"):
            check_agreement(attention_plan(), group)
