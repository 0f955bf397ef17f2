"""Attention of documents whose first rows every rank holds is that of whole documents, gradients included."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.layout import Mask, Packing
from megatron_cp.plan.schemes import SCHEMES
from tests.limits import limit
from tests.random_tiles import TILED, assign_at_random
from tests.refusals import rejects

HELD, REST = Packing([3, 0, 5, 1, 2]), Packing([11, 4, 0, 1, 7])
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8}
DTYPE = torch.float64


def whole_tensors():
    random, total = torch.Generator().manual_seed(0), HELD.total + REST.total
    return [torch.randn(total, heads, 8, generator=random, dtype=DTYPE) for heads in (4, 2, 2, 4)]


def kinds():
    """The places of held rows, and of the others, in the stream of whole documents."""
    lengths = [n for both in zip(HELD.lengths, REST.lengths, strict=True) for n in both]
    is_held = torch.tensor([True, False] * len(HELD.lengths)).repeat_interleave(torch.tensor(lengths))
    return is_held.nonzero()[:, 0], (~is_held).nonzero()[:, 0]


def both_ways(mask, cp_size, scheme, layout="zigzag", align=1, sink=None, softcap=0.0):
    """Returns output and gradients of whole documents on one rank, and of held and spread rows over ranks."""
    held_at, rest_at = kinds()
    tensors = whole_tensors()
    whole = Packing(HELD.lengths + REST.lengths)
    plan_of_one = cp.plan_attention(whole, cp.Layout.contiguous(whole, 1), mask=mask, **SIZES)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]] + (
        [] if sink is None else [sink.clone().requires_grad_()]
    )
    out = cp.attention(*leaves[:3], plan_of_one, sink=None if sink is None else leaves[3], softcap=softcap)
    out.backward(tensors[3])
    expected = [out.detach(), *(x.grad for x in leaves)]
    spread = getattr(cp.Layout, layout)(REST, cp_size, align=align)
    plan = cp.plan_held_attention(spread, HELD, mask=mask, scheme=scheme, **SIZES)

    def rank(group):
        local = [spread.shard(x[rest_at], group.rank) for x in tensors]
        held = [x[held_at] for x in tensors]
        inputs = [x.clone().requires_grad_() for x in (*local[:3], *held[:3])]
        own_sink = None if sink is None else sink.clone().requires_grad_()
        out, held_out = cp.held_attention(*inputs, plan, group, sink=own_sink, softcap=softcap)
        # A loss of held rows counts once, in shares on all ranks but the first, which reads its own rows alone.
        shares = max(cp_size - 1, 1)
        counted = [(out, local[3]), (held_out, held[3] / shares)][: 1 if cp_size > 1 and group.rank == 0 else 2]
        torch.autograd.backward(*zip(*counted, strict=True))
        assert not out[spread.token_counts[group.rank] :].any()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return [out, *gradients[:3]], [held_out, *gradients[3:]], None if own_sink is None else own_sink.grad

    ranks = run_ranks(rank, cp_size, timeout=limit(60))
    assert all(torch.equal(each[1][0], ranks[0][1][0]) for each in ranks)
    found = []
    for n in range(4):
        held = ranks[0][1][0] if n == 0 else sum(each[1][n] for each in ranks)
        joined = torch.empty(len(held_at) + len(rest_at), *held.shape[1:], dtype=DTYPE)
        joined[held_at], joined[rest_at] = held.detach(), spread.unshard([each[0][n].detach() for each in ranks])
        found.append(joined)
    if sink is not None:
        found.append(sum(each[2] for each in ranks))
    return plan, found, expected


def check(*args, **options):
    plan, found, expected = both_ways(*args, **options)
    for ours, right in zip(found, expected, strict=True):
        assert torch.allclose(ours, right, rtol=0, atol=1e-12)
    return plan


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_held_rows_are_rows_of_their_documents_in_every_scheme(scheme, monkeypatch):
    if scheme in TILED:
        assign_at_random(monkeypatch)
    assert check("full", 4, scheme, align=4).moves_partials


def summary(packing):
    """The first token of a document sees its last two, and all others see the first and two before them."""
    slices = []
    for a, b in packing.spans():
        slices += [(a, b, a, b, "causal"), (a, a + 1, max(b - 2, a), b, "full")]
    return Mask.from_slices(packing, slices)


@pytest.mark.parametrize(
    "mask",
    ["causal", "window:4,1", "first:2+window:3,0", "prefix:5", summary],
    ids=lambda mask: mask if isinstance(mask, str) else "summary",
)
@pytest.mark.parametrize(("cp_size", "scheme"), [(1, "a2a"), (2, "p2p"), (3, "a2a"), (5, "exact")])
@pytest.mark.few
def test_masks_reach_over_both_kinds_of_rows(cp_size, scheme, mask):
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    plan = check(mask, cp_size, scheme, layout="contiguous", sink=sink, softcap=1.5)
    assert plan.moves_partials == (mask != "causal" and not str(mask).startswith("first"))


def test_causal_prefixes_are_not_gathered():
    plan = check("causal", 3, "p2p")
    assert plan.held_queries_plan(0) is None
    assert plan.held_keys_plan(0) is not None


def test_documents_without_held_rows_are_spread_documents():
    held, layout = Packing([0, 0]), cp.Layout.zigzag(Packing([5, 3]), 1)
    plan = cp.plan_held_attention(layout, held, mask="full", **SIZES)
    q, k, v = (x[:8] for x in whole_tensors()[:3])
    out, held_out = cp.held_attention(q, k, v, q[:0], k[:0], v[:0], plan)
    alone = cp.plan_attention(layout.packing, layout, mask="full", **SIZES)
    assert torch.equal(out, cp.attention(q, k, v, alone))
    assert held_out.shape == (0, 4, 8)


def test_ranks_that_hold_other_rows_are_told_apart():
    layout, rows = cp.Layout.zigzag(Packing([5, 3]), 2), torch.ones(4, 2, 8)

    def rank(group):
        held = Packing([1, 3] if group.rank else [3, 1])
        plan = cp.plan_held_attention(layout, held, heads=2, head_dim=8, scheme="p2p", mask="full")
        cp.held_attention(*[rows] * 6, plan, group)

    with pytest.raises(RankError, match="held rows and mask"):
        run_ranks(rank, 2)


def test_rejects_what_does_not_fit():
    layout = cp.Layout.zigzag(REST, 2)
    rejects("^held: got '1 documents'; allowed: 5", cp.plan_held_attention, layout, Packing([3]), **SIZES)
    tree = cp.Layout.contiguous(Packing.tree([3, 2, 2], [-1, 0, 0]), 2)
    rejects("^layout: got 'documents that branch'", cp.plan_held_attention, tree, Packing([1]), **SIZES)
    q, k, v = (x[: REST.total] for x in whole_tensors()[:3])
    plan = cp.plan_held_attention(cp.Layout.contiguous(REST, 1), HELD, **SIZES)
    rejects(r"^held_k: got .*\[11, 2, 8\]", cp.held_attention, q, k, v, q[:11], k[:9], v[:11], plan)
    rejects("^plan: got .*plan_held_attention", cp.held_attention, q, k, v, q, k, v, plan.plan)
