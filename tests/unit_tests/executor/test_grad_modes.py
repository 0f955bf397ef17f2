"""Operations in `inference_mode`, before training goes on, and under `create_graph`, which they refuse."""

import dataclasses
import gc
import types

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.softmax.kernels.flex import FlexAttention
from tests import fuzz_check
from tests.counting_group import CountingGroup
from tests.fuzz_cases import KINDS, Call
from tests.fuzz_problem import problem_of

SIZES = {"lengths": (7, 1, 13), "layout": "zigzag", "heads": 4, "groups": 2}
EQUAL = {**SIZES, "groups": 4}
HOSTS = {"transport": "hierarchical", "hosts": (0, 0, 1, 1)}
TREE = {**SIZES, "parents": (-1, 0, 0)}
CALLS = {
    **{f"attention, {name}": Call("attention", mask=("window", 3, 0), scheme=name, **HOSTS, **SIZES)
       for name in SCHEMES},
    **{f"{name}, {mode}": Call(name, scheme=mode, **SIZES) for name in KINDS for mode in MODES},
    **{f"latent_attention, {mode}": Call("latent_attention", scheme="p2p", latent=(2, 3), latent_mode=mode, **EQUAL)
       for mode in LATENT_MODES},
    "attention, reference": Call("attention", mask=("first", 1, 2, 0), scheme="exact", kernel="reference", **SIZES),
    "attention, codes": Call("attention", scheme="a2a", codec="fp8", dtype="float32", sink=True, **SIZES),
    "attention, tree": Call("attention", scheme="exact", **TREE),
    "projected_attention": Call("projected_attention", scheme="a2a", head_chunks=2, **EQUAL),
    "sparse_attention": Call("sparse_attention", scheme="exact", width=3, options=("dense", "relu"), **SIZES),
    "sparse_attention, blocks": Call("sparse_attention", scheme="exact", width=2, block=2, **SIZES),
    "kda_mixer, tree": Call("kda_mixer", scheme="chunkwise", **TREE),
    "gather": Call("gather", scheme="same_loss", batch=1, **SIZES),
    "relayout": Call("relayout", kv_layout="balanced", batch=1, **SIZES),
}  # fmt: skip


# The tiles of a plan are searched for, which takes most of the time.
@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.thorough) if "tiled" in name else name for name in CALLS])
def call(request):
    return CALLS[request.param]


def kept_inference_tensors(*owners):
    """The tensors of `inference_mode` that are reachable from what outlives a call."""
    seen, left, found = set(), list(owners), []
    while left:
        owner = left.pop()
        if id(owner) in seen or isinstance(owner, type | types.ModuleType | types.CodeType | types.FrameType):
            continue
        seen.add(id(owner))
        if isinstance(owner, torch.Tensor):
            found += [owner] if owner.is_inference() else []
        elif isinstance(owner, types.FunctionType):
            left += [cell.cell_contents for cell in owner.__closure__ or ()]
        else:
            left += gc.get_referents(owner)
    return found


def trained(group, call, plan, problem, is_evaluated):
    if is_evaluated:
        with torch.inference_mode():
            fuzz_check._Rank(group, call, plan, problem).forward()
        assert kept_inference_tensors(plan, group.buffers) == []
    rank = fuzz_check._Rank(group, call, plan, problem)
    rank.forward()
    rank.backward()
    return rank.results()


@pytest.mark.filterwarnings("ignore:.*ranks get no")
def test_what_is_made_in_inference_mode_can_be_trained(call):
    size = len(call.hosts) or 2
    problem = problem_of(call, size)
    evaluated, alone = (
        run_ranks(trained, size, call, fuzz_check.plan_of(call, size), problem, first) for first in (True, False)
    )
    for had, expected in zip(evaluated, alone, strict=True):
        for name, value in expected.items():
            assert torch.equal(had[name], value), name


def test_tables_of_kernels_without_a_backward_here_are_none_of_inference_mode():
    tiles = Tiles(np.array([[0, 5, 0, 5, -2, 0]]), np.arange(5), np.arange(5))
    with torch.inference_mode():
        FlexAttention().prepare(tiles, torch.device("cpu"))
    assert kept_inference_tensors(tiles) == []


def test_slots_and_batches_of_an_evaluation_can_be_trained_on():
    kinds = [cp.AttentionSpec(2, 2, 4, 4, scheme="a2a"), cp.LinearSpec("mamba", 2, 2, 4, 4, mode="headwise")]
    embedding = torch.nn.Embedding(9, 8, dtype=torch.float64)
    for slots in (None, cp.GraphTables(12, 3, 1)):
        layout = cp.Layout.contiguous(cp.Packing([5, 3]), 1) if slots is None else slots.layout([5, 3])
        with torch.inference_mode():
            batch = cp.shard_batch(np.arange(8), layout, slots=kinds, into=slots)
        assert kept_inference_tensors(batch, slots) == []
        x = embedding(batch.tokens).unflatten(1, (2, 4))
        out = cp.attention(x, x, x, batch.plan(kinds[0]))
        out = out + cp.mamba2(x, x[..., 0].exp(), -torch.ones(2).double(), x, x, batch.plan(kinds[1]))
        cp.token_loss(out.square().mean((1, 2)), batch).backward()
        assert embedding.weight.grad.isfinite().all()


def differentiated_twice(group, call, plan, problem):
    """A loss that is linear in the output: autograd itself would leave out what the inputs do to the gradient."""
    group = CountingGroup(group)
    rank = fuzz_check._Rank(group, call, plan, problem)
    rank.forward()
    loss = (rank.outs[0].nan_to_num() * rank.gradients[0].nan_to_num()).sum()
    sent = group.bytes_sent
    for leaf in rank.leaves.values():
        with pytest.raises(cp.ArgumentError, match="create_graph: got True; allowed: False where"):
            torch.autograd.grad(loss, leaf, create_graph=True)
    assert group.bytes_sent == sent


@pytest.mark.filterwarnings("ignore:.*ranks get no")
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["", "one rank"])
def test_rejects_second_derivatives(call, alone):
    if alone:
        scheme = call.scheme if call.scheme in MODES or "sparse" in call.operation else "a2a"
        call = dataclasses.replace(call, scheme=scheme, transport="collective", hosts=())
    size = 1 if alone else len(call.hosts) or 2
    run_ranks(differentiated_twice, size, call, fuzz_check.plan_of(call, size), problem_of(call, size))
