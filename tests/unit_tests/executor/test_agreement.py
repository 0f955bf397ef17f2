"""Ranks that planned differently all fail, and say in what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.errors import CallMismatchError, PlanMismatchError
from megatron_cp.executor.agreement import _describe_contents, agree_on_inputs, check_agreement
from megatron_cp.executor.groups import Pending, RankGroup, ThreadGroup
from megatron_cp.executor.groups.base import Agreed
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan.plan import Plan
from megatron_cp.testing.parity import Case, run_layer
from tests.limits import limit
from tests.refusals import rejects

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


def linear_plan(lengths: tuple[int, ...] = LENGTHS, kind: str = "gdn", **sizes: int) -> Plan:
    packing = cp.Packing(lengths)
    return cp.plan_linear(packing, cp.Layout.zigzag(packing, SIZE), kind, heads=6, head_dim=4, **sizes)


def refusals(plans: list[Plan]) -> list[str]:
    """Returns the error of each rank."""

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
    "layout": ({"layout": "contiguous"}, "; rank 0 holds tokens 0:2, 6:7, 8:10, 19:22", "; rank 0 holds tokens 0:7"),
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


def test_rejects_layers_and_documents_that_differ():
    plans = [attention_plan(), linear_plan(), attention_plan()]
    for message in refusals(plans):
        assert _shown(message, 0, "kind: attention")
        assert _shown(message, 1, "kind: gdn")
    plans = [attention_plan((3,) * 20), attention_plan((3,) * 20), attention_plan((3,) * 19 + (4,))]
    for message in refusals(plans):
        assert _shown(message, 0, "20 documents, 60 tokens")
        assert _shown(message, 2, "20 documents, 61 tokens")
    for group in (None, ThreadGroup.create(2)[0]):
        rejects("group", check_agreement, attention_plan(), group)


BATCH = {
    "tokens": np.arange(23), "labels": np.arange(1, 24), "loss_mask": np.ones(23), "seed": 0,
    "slots": [cp.AttentionSpec(6, 6, 4), cp.LinearSpec("gdn", 6, 2, 8, 8), cp.AttentionSpec(6, 3, 4, scheme="p2p")],
}  # fmt: skip
FRAGMENTS = [[(0, 4), (5, 8)], [(4, 5), (8, 9), (10, 11), (12, 13), (14, 23)], [(9, 10), (11, 12), (13, 14)]]
SWAPPED = [*FRAGMENTS[:1], [(4, 5), (8, 9), (10, 11), (12, 13), (15, 23)], [*FRAGMENTS[2], (14, 15)]]
# What one rank gives otherwise, and all that the message says of rank 0 and of that rank.
OTHER_BATCHES = {
    "tokens": (
        {"tokens": np.where(np.arange(23) == 7, 9, np.arange(23))},
        ["tokens: int64 [23]; [7] is 7"], ["tokens: int64 [23]; [7] is 9"],
    ),
    "labels": (
        {"labels": np.full(23, 4)}, ["labels: int64 [23]; [0] is 1"], ["labels: int64 [23]; [0] is 4"],
    ),
    "weights": (
        {"loss_mask": np.full(23, 2.0)}, ["loss_weights: float32 [23]; [0] is 1.0"],
        ["loss_weights: float32 [23]; [0] is 2.0"],
    ),
    "seed": ({"seed": 5}, ["seed: 0"], ["seed: 5"]),
    "documents": (
        {"layout": cp.Layout.from_fragments(cp.Packing((7, 1, 12, 3)), FRAGMENTS)},
        ["documents: Packing([7, 1, 13, 2]); document 2 has 13 tokens"],
        ["documents: Packing([7, 1, 12, 3]); document 2 has 12 tokens"],
    ),
    "fragments": (
        {"layout": cp.Layout.from_fragments(cp.Packing(LENGTHS), SWAPPED)},
        ["layout: cp_size 3, align 1, at least 0 rows; rank 1 holds tokens ..., 14:23"],
        ["layout: cp_size 3, align 1, at least 0 rows; rank 1 holds tokens ..., 15:23"],
    ),
    "rows": (
        {"layout": cp.Layout.from_fragments(cp.Packing(LENGTHS), FRAGMENTS, align=4)},
        ["layout: cp_size 3, align 1, at least 0 rows"], ["layout: cp_size 3, align 4, at least 0 rows"],
    ),
    "key heads": (
        {"slots": [cp.AttentionSpec(6, 3, 4), *BATCH["slots"][1:]]},
        ["slot 0, heads: q 6 x 4, k 6 x 4, v 6 x 4"], ["slot 0, heads: q 6 x 4, k 3 x 4, v 3 x 4"],
    ),
    "scheme": (
        {"slots": [*BATCH["slots"][:2], cp.AttentionSpec(6, 3, 4, scheme="exact")]},
        ["slot 2, scheme: p2p"], ["slot 2, scheme: exact"],
    ),
    "a slot less": ({"slots": BATCH["slots"][:2]}, ["slot 2, kind: attention"], ["nothing"]),
    "slots in another order": (
        {"slots": BATCH["slots"][::-1]},
        ["slot 0, scheme: a2a", "slot 0, heads: q 6 x 4, k 6 x 4, v 6 x 4", "slot 2, scheme: p2p",
         "slot 2, heads: q 6 x 4, k 3 x 4, v 3 x 4"],
        ["slot 0, scheme: p2p", "slot 0, heads: q 6 x 4, k 3 x 4, v 3 x 4", "slot 2, scheme: a2a",
         "slot 2, heads: q 6 x 4, k 6 x 4, v 6 x 4"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_rejects_batches_that_differ_showing_where_and_nothing_that_follows(name: str):
    odd, at_rank_0, at_rank_2 = OTHER_BATCHES[name]
    layout = cp.Layout.from_fragments(cp.Packing(LENGTHS), FRAGMENTS)

    def rank_main(group: RankGroup) -> str:
        given: dict[str, Any] = {"layout": layout} | BATCH | (odd if group.rank == 2 else {})
        with pytest.raises(PlanMismatchError) as caught:
            cp.shard_batch(group=group, **given)
        return str(caught.value)

    (message,) = set(run_ranks(rank_main, SIZE, timeout=limit(5)))
    assert (_lines(message, 0), _lines(message, 2)) == (at_rank_0, at_rank_2)
    of_batch = name in ("tokens", "labels", "weights", "seed")
    assert ("given different batches (rank 2 differs from" in message) == of_batch
    assert ("made different plans (rank 2 differs from" in message) != of_batch


def test_rejects_layouts_of_which_one_differs_showing_which():
    packing = cp.Packing(LENGTHS)
    zigzag, contiguous = cp.Layout.zigzag(packing, SIZE), cp.Layout.contiguous(packing, SIZE)

    def rank_main(group: RankGroup) -> str:
        target = zigzag if group.rank == 1 else contiguous
        with pytest.raises(cp.CallMismatchError) as caught:
            cp.relayout(torch.ones(int(zigzag.row_counts[group.rank])), zigzag, target, group)
        return str(caught.value)

    (message,) = set(run_ranks(rank_main, SIZE, timeout=limit(5)))
    start = "target, layout: cp_size 3, align 1, at least 0 rows; rank 0 holds tokens"
    assert _lines(message, 0) == [f"{start} 0:7"]
    assert _lines(message, 1) == [f"{start} 0:2, 6:7, 8:10, 19:22"]


def calls(group: RankGroup, odd: dict[str, Any], repeat: int = 1) -> str:
    """Returns a rank's error when rank 1 calls attention with other options."""
    options: dict[str, Any] = {"dropout": 0.0, "kernel": "reference"} | (odd if group.rank == 1 else {})
    plan = attention_plan()
    rows, shape = int(plan.layout.row_counts[group.rank]), options.pop("batch", ())
    dtype, needs = options.pop("dtype", torch.float32), options.pop("needs_gradient", True)
    q, k, v = (torch.ones(rows, *shape, heads, 4, dtype=dtype, requires_grad=needs) for heads in (6, 3, 3))
    with torch.set_grad_enabled(options.pop("grad", True)):
        try:
            for _ in range(repeat):
                cp.attention(q, k, v, plan, group, **options)
        except cp.CallMismatchError as error:
            return str(error)
    return ""


ODD_CALLS = {
    "type": ({"dtype": torch.float64}, "q: float32, shape [rows, 6, 4], needs a gradient", "q: float64"),
    "batch": ({"batch": (2,)}, "q: float32, shape [rows, 6, 4]", "q: float32, shape [rows, 2, 6, 4]"),
    "scale": ({"softmax_scale": 2.0}, "softmax_scale: 0.5", "softmax_scale: 2.0"),
    "cap": ({"softcap": 30.0}, "softcap: 0.0", "softcap: 30.0"),
    "sink": ({"sink": torch.zeros(6)}, "sink: None", "sink: float32"),
    "dropout": ({"dropout": 0.5, "seed": 0}, "dropout: 0.0", "dropout: 0.5"),
    "kernel": ({"kernel": "auto"}, "kernel: 'reference'", "kernel: 'auto'"),
    "grad mode": ({"grad": False}, "gradients: on", "gradients: off"),
    "frozen inputs": ({"needs_gradient": False}, "q: float32, shape [rows, 6, 4], needs a gradient", "no gradient"),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_rejects_calls_that_differ_on_every_rank_showing_both(name: str):
    odd, at_rank_0, at_rank_1 = ODD_CALLS[name]
    messages = run_ranks(calls, SIZE, odd, timeout=limit(30))
    assert len(set(messages)) == 1
    assert "the ranks call attention in different ways" in messages[0]
    assert _shown(messages[0], 0, at_rank_0)
    assert _shown(messages[0], 1, at_rank_1)


def test_rejects_sinks_and_seeds_of_other_values():
    def rank_main(group: RankGroup, options: list[dict[str, Any]]) -> None:
        plan = attention_plan()
        q, k, v = (torch.ones(int(plan.layout.row_counts[group.rank]), heads, 4) for heads in (6, 3, 3))
        with pytest.raises(cp.CallMismatchError, match=r"values of sink|seed: 1"):
            cp.attention(q, k, v, plan, group, **options[group.rank])

    run_ranks(rank_main, SIZE, [{"sink": torch.full((6,), float(rank))} for rank in range(SIZE)], timeout=limit(30))
    run_ranks(rank_main, SIZE, [{"dropout": 0.5, "seed": rank} for rank in range(SIZE)], timeout=limit(30))


def _mixer(layer: str, group: RankGroup, odd: bool) -> None:
    """A whole mixer, of another type on one rank."""
    case = Case(layer, SIZE, LENGTHS, scheme="headwise", dtype=torch.float64 if odd else torch.float32)
    run_layer(group, case)


OTHER_CALLS: dict[str, Callable[..., object]] = {
    "gated_delta_rule": lambda group, odd: cp.gated_delta_rule(
        *(_linear_input(group, 4) for _ in "qkv"), _linear_input(group), _linear_input(group), linear_plan(), group,
        scale=2.0 if odd else None,
    ),
    "kda": lambda group, odd: cp.kda(
        *(_linear_input(group, 4) for _ in range(4)), _linear_input(group), linear_plan(kind="kda"), group,
        use_qk_l2norm_in_kernel=odd,
    ),
    "gdn2": lambda group, odd: cp.gdn2(
        *(_linear_input(group, 4) for _ in range(6)), linear_plan(kind="gdn2"), group, use_qk_l2norm_in_kernel=odd,
    ),
    "gated_delta_product": lambda group, odd: cp.gated_delta_product(
        *(_linear_input(group, 4) for _ in "qkv"), _linear_input(group), _linear_input(group), linear_plan(kind="gdp"),
        group, scale=2.0 if odd else None,
    ),
    "mamba2": lambda group, odd: cp.mamba2(
        _linear_input(group, 4), _linear_input(group), -torch.ones(6),
        *(_linear_input(group, 5)[:, :1] for _ in "BC"), linear_plan(kind="mamba", state=5), group, dt_softplus=odd,
    ),
    **{
        operation: partial(_mixer, layer)
        for layer, operation in (
            ("gdn", "gated_delta_net"), ("kda", "kda_mixer"), ("gdn2", "gdn2_mixer"),
            ("gdp", "gated_delta_product_mixer"), ("mamba", "mamba2_mixer"), ("conv1d", "causal_conv1d"),
        )
    },
    "gather": lambda group, odd: cp.gather(_linear_input(group), linear_plan().layout, group, same_loss=odd),
    "relayout": lambda group, odd: cp.relayout(
        _linear_input(group).to(torch.float64 if odd else torch.float32), linear_plan().layout,
        cp.Layout.contiguous(cp.Packing(LENGTHS), SIZE), group,
    ),
    "gather, transport": lambda group, odd: cp.gather(
        _linear_input(group), linear_plan().layout, group, transport="pairwise" if odd else "collective"
    ),
    "relayout, hosts": lambda group, odd: cp.relayout(
        _linear_input(group), linear_plan().layout, cp.Layout.contiguous(cp.Packing(LENGTHS), SIZE), group,
        transport=cp.Transport("hierarchical", (0, 1, 1) if odd else (0, 0, 1)),
    ),
}  # fmt: skip


def _linear_input(group: RankGroup, *features: int) -> Tensor:
    return torch.ones(int(linear_plan().layout.row_counts[group.rank]), 6, *features)


@pytest.mark.parametrize("operation", OTHER_CALLS)
def test_rejects_other_operations_called_differently(operation: str):
    def rank_main(group: RankGroup) -> None:
        name = operation.partition(",")[0]
        with pytest.raises(cp.CallMismatchError, match=f"the ranks call {name} in different ways"):
            OTHER_CALLS[operation](group, group.rank == 1)

    run_ranks(rank_main, SIZE, timeout=limit(30))


def messages_sent(group: ThreadGroup, prepare: Callable[[Plan, ThreadGroup], None]) -> list[int]:
    """The all-gathers of two calls with one plan."""
    gathered, plan = [], attention_plan()
    prepare(plan, group)
    all_gather, counts = group.start_all_gather, []
    group.start_all_gather = lambda received, sent: gathered.append(sent.nbytes) or all_gather(received, sent)
    q, k, v = (torch.ones(int(plan.layout.row_counts[group.rank]), heads, 4) for heads in (6, 3, 3))
    for _ in range(2):
        cp.attention(q, k, v, plan, group)
        counts.append(sum(gathered))
        gathered.clear()
    return counts


def test_calls_are_compared_once_or_not_at_all():
    assert run_ranks(messages_sent, SIZE, lambda plan, group: None) == [[16, 0]] * SIZE
    assert run_ranks(messages_sent, SIZE, lambda plan, group: cp.compare_calls(group, False)) == [[0, 0]] * SIZE


def test_plans_are_forgotten_before_calls(monkeypatch):
    """There are new plans in every batch, and a call that is forgotten would cost a collective within a step."""
    monkeypatch.setattr(Agreed, "_MOST", 3)

    def prepare(plan: Plan, group: ThreadGroup) -> None:
        q, k, v = (torch.ones(int(plan.layout.row_counts[group.rank]), heads, 4) for heads in (6, 3, 3))
        cp.attention(q, k, v, attention_plan(mask="full"), group)  # the same call of another plan
        for length in range(1, 9):
            check_agreement(attention_plan((length,)), group)
        check_agreement(plan, group)

    assert run_ranks(messages_sent, SIZE, prepare) == [[0, 0]] * SIZE


def test_rejects_tokens_or_seeds_that_differ():
    def rank_main(group: RankGroup) -> None:
        with pytest.raises(PlanMismatchError, match=r"rank 0: tokens and seed: 7\n  rank 2: tokens and seed: 8"):
            check_agreement(attention_plan(), group, seed=7 + (group.rank == 2))

    run_ranks(rank_main, SIZE, timeout=limit(30))


def test_tensors_of_any_stride_are_compared():
    def compare(group: RankGroup) -> None:
        check_agreement(attention_plan(), group, tensors={"one": torch.ones(1).expand(3)[:1], "none": torch.empty(0)})

    run_ranks(compare, SIZE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex128, torch.int32])
def test_inputs_that_differ_are_named(dtype: torch.dtype) -> None:
    def call(group: RankGroup, noise: float) -> None:
        pair = (torch.zeros(1).expand(1), torch.empty(0), None)
        inputs = {
            "noise": torch.full((3, 1), noise * group.rank).to(dtype),
            "steps": {4: "{", "other": object()},
            "pair": pair,
        }
        agree_on_inputs(group, "Model", inputs)

    run_ranks(call, 2, 0.0)
    with pytest.raises((RankError, CallMismatchError), match="the ranks call Model with different inputs") as caught:
        run_ranks(call, 2, 1.0)
    assert f"noise: {str(dtype)[6:]} [3, 1], sum" in str(caught.value)
    assert "steps" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(-1)[-1:].add_(1.0), lambda x: x.view(-1)[8192 * 70 + 5 :][:1].mul_(-1.0),
        lambda x: x.copy_(torch.cat([x[8192:16384], x[:8192], x[16384:]])), lambda x: x.add_(0.0),
    ],
    ids=["last", "inside", "two blocks exchanged", "none"],
)  # fmt: skip
def test_large_tensors_are_compared_by_sums(change) -> None:
    values = torch.randn(8192 * 80 + 3, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    change(other)
    assert (_describe_contents(values) == _describe_contents(other)) == torch.equal(values, other)
    assert _describe_contents(values) == _describe_contents(values.repeat_interleave(2)[::2])
