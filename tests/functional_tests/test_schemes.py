"""Tests of every attention scheme besides exactness: bytes, isolation, recomputing, determinism, the wire."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.testing.parity import Case, compare, draw, run_layer
from tests import mask_oracle
from tests.counting_group import CountingGroup
from tests.functional_tests.test_in_flight import alone, assert_same_bits, recomputed, together
from tests.isolation import leaks
from tests.limits import limit
from tests.random_tiles import TILED, assign_at_random
from tests.scheme_cases import SCHEMES, check, check_sequences_alone, over_ranks

RAGGED = (7, 1, 40, 0, 13, 2, 11)
MASKS = ("causal", "window:5,2", "first:3+window:4,0", "chunk:6", "prefix:5", "full")


def case_of(scheme, **changes):
    return Case(
        "attention", **{"cp": 4, "lengths": RAGGED, "scheme": scheme, "head_dim": 8, "value_head_dim": 8, **changes}
    )


@pytest.mark.parametrize("mask", ["causal", "full", "window:4,1", "first:2+window:3,0"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_cross_attention_with_keys_of_other_lengths_in_another_layout(scheme, mask):
    keys = {"kv_lengths": (3, 5, 17, 2, 0, 1, 30), "kv_layout": "random"}
    check(case_of(scheme, mask=mask, layout="contiguous", heads=4, groups=2, **keys))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_a_query_that_sees_no_key_is_zero_and_passes_no_gradient(scheme, sink):
    slices = ((8, 30, 8, 20, "causal"), (50, 60, 48, 55, "full"))
    case = case_of(scheme, mask=("from_slices", slices), layout="random", learned_sink=sink)
    pairs, found = mask_oracle.pairs_of_case(case), over_ranks(case)
    blind, unseen = ~torch.from_numpy(pairs.any(1)), ~torch.from_numpy(pairs.any(0))
    assert 10 < blind.sum() < len(blind)
    assert not found["out"][blind].any()
    assert not found["d_q"][blind].any()
    assert not found["d_k"][unseen].any()
    assert not found["d_v"][unseen].any()
    check(case)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mask_without_a_pair_is_all_zeros_and_the_same_run_has_the_same_bits(scheme):
    found = over_ranks(case_of(scheme, mask=("from_slices", ()), learned_sink=True))
    assert not any(x.any() for x in found.values())
    case = case_of(scheme, layout="random", mask="window:9,1", learned_sink=True, heads=7, groups=1)
    plan = case.plan()
    first, second = over_ranks(case), over_ranks(case)
    assert all(torch.equal(first[name], second[name]) for name in first)
    del plan  # held so far, so that it was made once


def bytes_of_rank(inner, case, plan):
    """Returns the bytes that this rank sends forward and backward."""
    compare_calls(inner, False)  # what a plan costs once is not part of it
    group = CountingGroup(inner)
    problem = draw(case)
    local = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
    out = cp.attention(*local, plan, group)
    forward = group.bytes_sent
    out.backward(plan.layout.shard(problem.output_gradient, group.rank))
    return forward, group.bytes_sent - forward


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random", "balanced"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.few
def test_bytes_sent_are_those_that_the_plan_says(scheme, layout, dtype):
    case = case_of(scheme, layout=layout, mask="window:5,0", dtype=dtype)
    plan = case.plan()
    sent = run_ranks(bytes_of_rank, case.cp, case, plan)
    for way, forward in enumerate((True, False)):
        assert plan.bytes_sent(dtype.itemsize, forward=forward) == [rank[way] for rank in sent]


def needed_rows(plan, pairs):
    """Returns, by the oracle, for each owner and reader the keys of one that queries of the other see."""
    readers = np.repeat(np.arange(plan.cp_size), plan.layout.token_counts)[plan.layout.inverse_order]
    needed = np.zeros((plan.cp_size, plan.cp_size), dtype=np.int64)
    for key, owner in enumerate(readers):
        for reader in set(readers[pairs[:, key]]) - {owner}:
            needed[owner, reader] += 1
    return needed


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.few
def test_exact_sends_what_the_mask_needs_and_nothing_else(layout, mask):
    case = case_of("exact", layout=layout, mask=mask)
    plan, pairs = case.plan(), mask_oracle.pairs_of_case(case)
    needed, row = needed_rows(plan, np.asarray(pairs)), case.groups * (case.head_dim + case.value_head_dim) * 8
    sent = run_ranks(bytes_of_rank, case.cp, case, plan)
    assert [rank[0] for rank in sent] == (needed.sum(1) * row).tolist()
    assert [rank[1] for rank in sent] == ((needed.sum(1) + needed.sum(0)) * row).tolist()
    assert plan.bytes_needed(8, forward=True) == [rank[0] for rank in sent]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.few
def test_exact_never_sends_more_than_a_ring_or_an_all_gather(layout, mask):
    case = case_of("exact", layout=layout, mask=mask, cp=5)
    for scheme, forward in itertools.product(("p2p", "all_gather"), (True, False)):
        exact, other = (
            sum(dataclasses.replace(case, scheme=name).plan().bytes_sent(2, forward=forward))
            for name in ("exact", scheme)
        )
        assert exact <= other


@pytest.mark.parametrize("mask", ["causal", "first:2+window:4,0"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_a_change_in_one_document_changes_no_bit_of_any_other(scheme, mask):
    case = Case("attention", 4, (7, 1, 40, 13, 2), "zigzag", mask=mask, scheme=scheme, learned_sink=True)
    plan = case.plan()
    for document in (1, 2):
        assert not any(leaks(case, document).values())
    del plan  # held so far, so that it was made once


FLIGHT = [
    Case("attention", 4, (7, 1, 40), dropout=0.2),
    Case("attention", 4, (2, 33, 5, 1), "random", mask="window:6,0"),
]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("backward_order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_recomputed_activations_and_two_microbatches_in_flight_give_the_bits_of_one(
    scheme, backward_order, use_reentrant
):
    cases = [dataclasses.replace(case, scheme=scheme) for case in FLIGHT]
    plans = [case.plan() for case in cases]
    found, expected = run_ranks(together, 4, cases, backward_order), [run_ranks(alone, 4, case) for case in cases]
    for number in range(2):
        assert_same_bits([of_rank[number] for of_rank in found], expected[number])
    assert_same_bits(run_ranks(recomputed, 4, cases[0], use_reentrant), expected[0])
    del plans  # held so far, so that each was made once


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.parametrize("mask", ["causal", "window:5,2", "prefix:9", "first:2+window:4,0"])
@pytest.mark.parametrize(("heads", "groups", "sink"), [(6, 2, True), (7, 7, False), (7, 1, False)])
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.few(together=2)
def test_a_head_exchange_is_bitwise_equal_to_one_rank(mask, layout, heads, groups, sink, size):
    case = Case("attention", size, (7, 1, 130, 64, 2, 11), layout, heads=heads, groups=groups, mask=mask, scheme="a2a",
                learned_sink=sink)  # fmt: skip
    assert compare(case).bitwise_forward, case


def rank_results(group, cases):
    return [run_layer(group, case) for case in cases]


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_ranks_in_processes_give_the_bits_of_threads(first):
    """A scheme is run in one of two layouts and masks, or in the other."""
    ways = (("zigzag", "causal"), ("random", "window:5,0"))
    cases = [
        Case("attention", 4, (7, 1, 130, 64, 2, 11), layout, mask=mask, scheme=scheme, learned_sink=True)
        for number, scheme in enumerate(SCHEMES)
        for layout, mask in (ways[(first + number) % 2],)
    ]
    processes = run_ranks(rank_results, 4, cases, kind="processes")
    threads = run_ranks(rank_results, 4, cases)
    for rank in range(4):
        for number, case in enumerate(cases):
            for name, value in threads[rank][number].items():
                assert torch.equal(processes[rank][number][name], value), (case, name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dropout_is_the_same_over_ranks_and_another_in_every_sequence_of_a_batch(scheme):
    packing = Packing([12])
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 1, n, 8, generator=random, dtype=torch.float64).expand(-1, 2, -1, -1) for n in (4, 2, 2))

    def rank(group, layout, plan):
        return cp.attention(*(layout.shard(x, group.rank) for x in (q, k, v)), plan, group, dropout=0.5, seed=7)

    def whole(size, scheme):
        layout = cp.Layout.zigzag(packing, size)
        plan = cp.plan_attention(packing, layout, heads=4, kv_heads=2, head_dim=8, scheme=scheme)
        return layout.unshard(run_ranks(rank, size, layout, plan))

    found = whole(4, scheme)
    assert torch.allclose(found, whole(1, "a2a"), atol=1e-14)
    assert not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_of_sequences_is_each_sequence_alone(scheme):
    check_sequences_alone(4, 11, 3, scheme)


PADDED = {"lengths": (9, 1, 17, 0, 4), "align": 4}
LSE_CASES = [
    case_of("a2a", cp=3, **PADDED, learned_sink=True),
    case_of("a2a", **PADDED, heads=12, groups=12, head_chunks=3, layout="random"),
    case_of("a2a", cp=8, **PADDED, softcap=1.5),  # more ranks than heads
    case_of("a2a", cp=1, **PADDED, learned_sink=True),
    case_of("p2p", cp=3, **PADDED, learned_sink=True, mask="window:5,0"),
    case_of("all_gather", cp=3, **PADDED, dropout=0.3),
    case_of("exact", **PADDED, mask=("from_slices", ((3, 9, 3, 20, "full"),))),
    case_of("a2a+p2p", **PADDED, learned_sink=True),
    case_of("a2a+all_gather", cp=6, **PADDED),
    case_of("p2p", cp=1, **PADDED),
    case_of("tiled", cp=5, **PADDED, learned_sink=True),
    case_of("a2a+tiled", **PADDED, mask="window:5,2"),
]


def lse_of_rank(group, case, plan, batch):
    """This rank's log-sum-exp, and its gradients where a loss reads it alone.

    A loss also reads the output (asked for the log-sum-exp or not), both, or one of them on every other rank.
    """
    problem, random = draw(case), torch.Generator().manual_seed(1)
    inputs, gradient = problem.inputs | problem.parameters, problem.output_gradient
    shards = {"q": plan.layout, "k": plan.kv_layout, "v": plan.kv_layout}
    dlse = plan.layout.shard(torch.randn(gradient.shape[:2], generator=random, dtype=case.dtype), group.rank)
    dlse[plan.layout.token_counts[group.rank] :] = torch.nan  # as pad rows may be
    results = {}
    for reads in ("out alone", "out", "lse", "both", "by turns", "by other turns"):
        turn = {"by turns": ("out", "lse"), "by other turns": ("lse", "out")}.get(reads, (reads,) * 2)[group.rank % 2]
        local = {name: shards[name].shard(inputs[name], group.rank) for name in shards}
        if batch:
            local = {name: torch.stack([x, 2 * x], 1) for name, x in local.items()}
        leaves = [x.clone().requires_grad_() for x in (*local.values(), *problem.parameters.values())]
        found = cp.attention(
            *leaves[:3], plan, group, sink=leaves[3] if case.learned_sink else None, softcap=case.softcap,
            dropout=case.dropout, seed=case.seed, return_lse=reads != "out alone",
        )  # fmt: skip
        out, lse = found if reads != "out alone" else (found, None)
        given = []
        if turn != "lse":
            rows = plan.layout.shard(gradient, group.rank).view(len(out), *[1] * batch, *out.shape[-2:])
            given.append((out, rows.expand_as(out)))
        if turn in ("lse", "both"):
            rows = dlse.unsqueeze(1).expand_as(lse) if batch else dlse
            given.append((lse, rows.masked_fill(lse == -torch.inf, torch.nan)))  # as a loss of nothing may give
        torch.autograd.backward(*zip(*given, strict=True))
        results[reads] = [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]
    alone, asked, of_lse, *of_both = results.values()
    of_both = [of_both[0], [x + y for x, y in zip(*of_both[1:], strict=True)]]
    moves_lse = plan.ulysses_degree > 1 or plan.attend.tiled is not None  # then its gradient is 0 where it is not read
    for one, other, of_one, *both in zip(alone, asked, of_lse, *of_both, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12) if moves_lse else torch.equal(one, other)
        if one is not alone[0]:
            assert all(torch.allclose(one + of_one, total, rtol=1e-12, atol=1e-12) for total in both)
    return lse.detach(), *of_lse[1:]


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("batch", [False, True], ids=["thd", "sbhd"])
@pytest.mark.parametrize("case", LSE_CASES, ids=lambda case: f"{case.scheme} over {case.cp}")
@pytest.mark.few
def test_the_log_sum_exp_is_that_of_all_scores_and_has_their_gradient(case, batch, monkeypatch):
    if case.scheme in TILED:
        assign_at_random(monkeypatch)
    plan, pairs, problem = case.plan(), mask_oracle.pairs_of_case(case), draw(case)
    ranks = [
        list(each) for each in zip(*run_ranks(lse_of_rank, case.cp, case, plan, batch, timeout=limit(60)), strict=True)
    ]
    for rank, lse in enumerate(ranks[0]):
        assert (lse[plan.layout.token_counts[rank] :] == -torch.inf).all()
    found = [
        layout.unshard(each)
        for layout, each in zip((plan.layout, plan.layout, plan.kv_layout, plan.kv_layout), ranks, strict=False)
    ]
    ratio, parameters = case.heads // case.groups, {name: x.requires_grad_() for name, x in problem.parameters.items()}
    dlse = torch.randn(len(pairs), case.heads, generator=torch.Generator().manual_seed(1), dtype=case.dtype)
    for entry in range(1 + batch):
        q, k = ((problem.inputs[name] * (1 + entry)).requires_grad_() for name in "qk")
        scores = torch.einsum("ihd,jhd->ihj", q, k.repeat_interleave(ratio, 1)) * case.head_dim**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~torch.from_numpy(np.asarray(pairs))[:, None], -torch.inf)
        if case.learned_sink:
            scores = torch.cat([scores, parameters["sink"].expand(len(q), -1)[..., None]], -1)
        expected, own = scores.logsumexp(-1), [x[:, entry] if batch else x for x in found]
        seen = expected > -torch.inf
        assert own[0].shape == expected.shape
        assert torch.equal(own[0] > -torch.inf, seen)
        assert (own[0] - expected)[seen].abs().max() <= 1e-12
        scores[seen].logsumexp(-1).backward(dlse[seen])
        for ours, right in zip(own[1:], (q.grad, k.grad, torch.zeros_like(own[3])), strict=True):
            assert torch.allclose(ours, right, rtol=0, atol=1e-12)
    if case.learned_sink:
        assert torch.allclose(sum(ranks[4]), parameters["sink"].grad, rtol=0, atol=1e-11)
