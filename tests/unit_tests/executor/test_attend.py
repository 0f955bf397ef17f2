"""The loop of attention by itself: whose keys arrive, what is merged, and in which type sums are kept."""

from dataclasses import replace

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Packing
from megatron_cp.plan import schemes
from megatron_cp.plan.tile_assignment import TiledWork
from megatron_cp.planner.layouts import layout_by_name
from megatron_cp.planner.predict import machine
from megatron_cp.planner.predict.hardware import Rates
from megatron_cp.planner.predict.memory import buffer_bytes
from megatron_cp.planner.predict.walk import workload_of
from megatron_cp.testing.parity import Case
from tests import fuzz_cases, fuzz_check
from tests.fuzz_cases import Call
from tests.random_tiles import TILED, assign_all_to, assign_at_random, at_query_owners, random_assignment
from tests.scheme_cases import check, over_ranks
from tests.scheme_in_halves import add_by_distance, add_halves

SCHEMES = tuple(schemes.SCHEMES)


PACKING = Packing([60, 1, 37])
HEADS, GROUPS, SIZE = 4, 1, 4


def one_hot_problem():
    """Every query looks at the first key of its document alone, whose value it takes whole; gradients are integers.

    So outputs are values, and the gradient of a value is a sum of integers: exact in fp32, in any order. bf16 has every
    integer up to 256, and every even one up to 512: no rank adds more than the one, and the sum of the first document
    is even and below the other. In bf16 the sum would round on its way.
    """
    random = torch.Generator().manual_seed(0)
    firsts = torch.tensor([0, 60, 61])
    q = torch.ones(PACKING.total, HEADS, SIZE)
    k = torch.full((PACKING.total, GROUPS, SIZE), -64.0)
    k[firsts] = 64.0
    v = torch.randint(-100, 101, (PACKING.total, GROUPS, SIZE), generator=random).float()
    gradient = torch.randint(1, 3, (PACKING.total, HEADS, SIZE), generator=random).float()
    gradient[0, 0] += gradient[:60].sum((0, 1)) % 2
    return q, k, v, gradient


def expected_results():
    q, _, v, gradient = one_hot_problem()
    firsts = torch.tensor([0] * 60 + [60] + [61] * 37)
    out = v[firsts].repeat_interleave(HEADS // GROUPS, 1)
    of_groups = gradient.unflatten(1, (GROUPS, -1)).sum(2)
    dv = torch.zeros_like(v).index_add_(0, firsts, of_groups)
    return {"out": out, "dq": torch.zeros_like(q), "dk": torch.zeros_like(v), "dv": dv}


def run_bf16(group, plan):
    *inputs, gradient = (plan.layout.shard(x.bfloat16(), group.rank) for x in one_hot_problem())
    q, k, v = (x.requires_grad_() for x in inputs)
    out = cp.attention(q, k, v, plan, group, kernel="reference")
    out.backward(gradient)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_sums_over_ranks_are_kept_in_fp32_and_rounded_once(scheme, layout):
    made = layout_by_name(layout, PACKING, 4, align=3)
    plan = cp.plan_attention(PACKING, made, heads=HEADS, kv_heads=GROUPS, head_dim=SIZE, scheme=scheme)
    ranks = run_ranks(run_bf16, 4, plan)
    for name, value in expected_results().items():
        found = made.unshard([rank[name] for rank in ranks])
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, value.bfloat16()), name
        for rank, count in enumerate(made.token_counts.tolist()):
            assert not ranks[rank][name][count:].any()


@pytest.mark.parametrize("head_chunks", [1, 2])
@pytest.mark.parametrize("layout", ["zigzag", "random"])
@pytest.mark.few
def test_a_schedule_of_several_fetches_is_dense_attention(layout, head_chunks, monkeypatch):
    add_halves(monkeypatch)
    case = Case("attention", 4, (7, 1, 40, 0, 13), layout, scheme="halves", head_chunks=head_chunks, align=2)
    assert len(case.plan().attend.stages) == 2
    check(case)


@pytest.mark.parametrize("head_chunks", [1, 2])
@pytest.mark.parametrize("layout", ["zigzag", "random"])
@pytest.mark.few
def test_own_keys_may_be_computed_before_the_first_fetch(layout, head_chunks, monkeypatch):
    """Prices and buffers follow, since they walk over the program that runs."""
    add_by_distance(monkeypatch)
    case = Case("attention", 5, (7, 1, 40, 0, 13), layout, scheme="by_distance", head_chunks=head_chunks, align=2)
    plan = case.plan()
    assert plan.attend.collectives(forward=True) == 2 * head_chunks
    assert plan.attend.collectives(forward=False) == 4 * head_chunks
    sent, exact = (each.plan().bytes_sent(8, forward=True) for each in (case, replace(case, scheme="exact")))
    assert sent == exact
    assert all(buffer_bytes(plan, rank, 8) > 0 for rank in range(5))
    names = [each.name for each in workload_of(plan, Rates(machine().hardware, 8, forward=True)).transfers]
    assert names == ["keys and values"] * (2 * head_chunks)
    check(case)


TILES = Case("attention", 4, (7, 1, 40, 0, 13), heads=6, groups=2, head_dim=8, value_head_dim=12, align=2)
WAYS = {
    "causal": {},
    "full, random": {"mask": "full", "layout": "random"},
    "window": {"mask": "window:9,1", "layout": "contiguous"},
    "sink": {"learned_sink": True, "heads": 8, "groups": 8, "head_chunks": 2},
    "softcap and dropout": {"kernel": "reference", "softcap": 1.5, "dropout": 0.3},
    "keys of another pack": {"kv_lengths": (3, 5, 17, 2, 30), "kv_layout": "random", "mask": "full"},
    "MLA sizes": {"head_dim": 24, "value_head_dim": 16, "heads": 4, "groups": 4},
    "by pairs": {"transport": "pairwise"},
    "over hosts": {"transport": "hierarchical"},
    "poisoned": {"seed": 8},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", TILED)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.few
def test_attention_is_dense_whichever_rank_computes_a_tile(seed, scheme, way, monkeypatch):
    assign_at_random(monkeypatch, seed)
    case = replace(TILES, scheme=scheme, **WAYS[way])
    assert case.plan().attend.moves_queries(forward=True)
    check(case)


@pytest.mark.parametrize("heads", [1, 4])
def test_one_key_head_is_dense_whichever_rank_computes_a_tile(heads, monkeypatch):
    assign_at_random(monkeypatch)
    check(replace(TILES, scheme="tiled", heads=heads, groups=1))


@pytest.mark.parametrize("forward", [True, False], ids=["forward alone", "backward alone"])
def test_tiles_may_leave_home_in_one_direction_alone(forward, monkeypatch):
    """Gradients of keys that stay are written where they belong, though keys travelled before."""

    def assigned(step, *_):
        ways = random_assignment(step, 0), at_query_owners(step)
        return TiledWork(*(ways if forward else ways[::-1]))

    monkeypatch.setattr("megatron_cp.planner.request.assigned_tiles", assigned)
    case = replace(TILES, cp=2, lengths=(32, 32), layout="contiguous", scheme="tiled", seed=8)
    attend = case.plan().attend
    assert [len(attend.stages_in(forward=way)) > 1 for way in (forward, not forward)] == [True, False]
    check(case)


@pytest.mark.parametrize("scheme", TILED)
def test_assigned_tiles_sum_in_fp32_and_round_once(scheme, monkeypatch):
    for seed in range(2):
        assign_at_random(monkeypatch, seed)
        test_sums_over_ranks_are_kept_in_fp32_and_rounded_once(scheme, "zigzag")


def test_keys_that_own_queries_and_remote_queries_see_are_summed_in_fp32(monkeypatch):
    """The sum of remote queries at the first key is odd and above 256; own queries make it even again."""
    assign_all_to(monkeypatch, 2)
    own = layout_by_name("contiguous", PACKING, 4, align=3).tokens(2)
    visiting = [token for token in range(60) if token not in own]
    left = one_hot_problem()[3][visiting].sum((0, 1))
    assert len(visiting) < 60
    assert ((left > 256) & (left % 2 == 1)).any()
    test_sums_over_ranks_are_kept_in_fp32_and_rounded_once("tiled", "contiguous")


@pytest.mark.parametrize("scheme", TILED)
def test_assigned_tiles_give_the_same_bits_twice(scheme, monkeypatch):
    assign_all_to(monkeypatch, 1)
    check(replace(TILES, scheme=scheme, mask="window:9,1", learned_sink=True))
    assign_at_random(monkeypatch)
    case = replace(TILES, scheme=scheme, mask="full", layout="random", dtype=torch.float32, head_chunks=2, groups=6)
    first, second = over_ranks(case), over_ranks(case)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_assigned_tiles_of_a_batch_are_dense(monkeypatch):
    assign_at_random(monkeypatch)
    call = Call("attention", (31,), layout="zigzag", scheme="tiled", heads=4, groups=2, batch=2)
    fuzz_check.check(fuzz_cases.Case(3, (call,)))
