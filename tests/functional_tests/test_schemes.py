"""Tests of every attention scheme besides exactness: bytes, bits, and the log-sum-exp with its gradient."""

import itertools

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, draw, run_layer
from tests import mask_oracle, softmax_oracle
from tests.counting_group import bytes_of_layer
from tests.covering import covering
from tests.limits import limit
from tests.random_tiles import TILED, assign_at_random
from tests.scheme_cases import SCHEMES

RAGGED = (7, 1, 40, 0, 13, 2, 11)
MASKS = ("causal", "window:5,2", "first:3+window:4,0", "chunk:6", "prefix:5", "full")


def case_of(scheme, **changes):
    return Case(
        "attention", **{"cp": 4, "lengths": RAGGED, "scheme": scheme, "head_dim": 8, "value_head_dim": 8, **changes}
    )


@pytest.mark.parametrize(
    ("scheme", "layout", "dtype"),
    covering(SCHEMES, ("contiguous", "zigzag", "random", "balanced"), (torch.float64, torch.bfloat16)),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.few
def test_bytes_sent_are_those_that_the_plan_says(scheme, layout, dtype):
    case = case_of(scheme, layout=layout, mask="window:5,0", dtype=dtype)
    plan = case.plan()  # which all share while it is held
    expected = [plan.bytes_sent(dtype.itemsize, forward=forward) for forward in (True, False)]
    assert run_ranks(bytes_of_layer, case.cp, case) == list(zip(*expected, strict=True))


def needed_rows(plan, pairs):
    """Returns, by the oracle, for each owner and reader the keys of one that queries of the other see."""
    readers = np.repeat(np.arange(plan.cp_size), plan.layout.token_counts)[plan.layout.inverse_order]
    needed = np.zeros((plan.cp_size, plan.cp_size), dtype=np.int64)
    for key, owner in enumerate(readers):
        for reader in set(readers[pairs[:, key]]) - {owner}:
            needed[owner, reader] += 1
    return needed


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "random"])
@pytest.mark.few
def test_exact_sends_what_the_mask_needs_and_nothing_else(layout, mask):
    case = case_of("exact", layout=layout, mask=mask)
    plan, pairs = case.plan(), mask_oracle.pairs_of_case(case)
    needed, row = needed_rows(plan, np.asarray(pairs)), case.groups * (case.head_dim + case.value_head_dim) * 8
    forward, backward = zip(*run_ranks(bytes_of_layer, case.cp, case), strict=True)
    assert list(forward) == plan.bytes_needed(8, forward=True) == (needed.sum(1) * row).tolist()
    assert list(backward) == ((needed.sum(1) + needed.sum(0)) * row).tolist()


def rank_results(group, cases):
    return [run_layer(group, case) for case in cases]


def test_ranks_in_processes_give_the_bits_of_threads():
    """Every second scheme is run in the other of two layouts and masks."""
    ways = (("zigzag", "causal"), ("random", "window:5,0"))
    cases = [
        Case("attention", 4, (7, 1, 130, 64, 2, 11), layout, mask=mask, scheme=scheme, learned_sink=True)
        for scheme, (layout, mask) in zip(SCHEMES, itertools.cycle(ways), strict=False)
    ]
    processes = run_ranks(rank_results, 4, cases, kind="processes")
    threads = run_ranks(rank_results, 4, cases)
    for rank in range(4):
        for number, case in enumerate(cases):
            for name, value in threads[rank][number].items():
                assert torch.equal(processes[rank][number][name], value), (case, name)


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
    plan, problem = case.plan(), draw(case)
    pairs = torch.from_numpy(np.asarray(mask_oracle.pairs_of_case(case)))
    lse, dq, dk, dv, *d_sink = (
        list(each) for each in zip(*run_ranks(lse_of_rank, case.cp, case, plan, batch, timeout=limit(60)), strict=True)
    )
    for rank, rows in enumerate(lse):
        assert (rows[plan.layout.token_counts[rank] :] == -torch.inf).all()
    found = [plan.layout.unshard(lse), plan.layout.unshard(dq), plan.kv_layout.unshard(dk), plan.kv_layout.unshard(dv)]
    sink = problem.parameters["sink"].requires_grad_() if case.learned_sink else None
    dlse = torch.randn(len(pairs), case.heads, generator=torch.Generator().manual_seed(1), dtype=case.dtype)
    for entry in range(1 + batch):
        q, k, v = ((problem.inputs[name] * (1 + entry)).requires_grad_() for name in "qkv")
        options = {"scale": case.head_dim**-0.5, "softcap": case.softcap, "sink": sink}
        expected = softmax_oracle.attend(q, k, v, pairs, **options)[1].t()
        own, seen = [x[:, entry] if batch else x for x in found], expected > -torch.inf
        assert own[0].shape == expected.shape
        assert torch.equal(own[0] > -torch.inf, seen)
        assert (own[0] - expected)[seen].abs().max() <= 1e-12
        expected[seen].backward(dlse[seen])
        for ours, right in zip(own[1:], (q.grad, k.grad, torch.zeros_like(v)), strict=True):
            assert torch.allclose(ours, right, rtol=0, atol=1e-12)
    if case.learned_sink:
        assert torch.allclose(sum(d_sink[0]), sink.grad, rtol=0, atol=1e-11)
