"""Tests on CUDA: a step over plans in `GraphTables` is captured once and serves every pack that fits."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.exchange.device import on_device
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.kernels import choose_kernel
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.on_rank import LinearOnRank
from megatron_cp.softmax.kernels import KERNELS
from megatron_cp.softmax.kernels.common.varlen_calls import device_calls
from megatron_cp.softmax.on_rank import attention_call
from tests.functional_tests.test_cuda import seconds_of_ranks
from tests.refusals import rejects
from tests.slots_problem import CAPACITY, CONTIGUOUS, KINDS, MASKED, errors_of, packs_drawn, run_on_rank
from tools.gpu_check.one_rank import StillGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)
RANKS = "threads"
IS_EMULATED = os.environ.get("NULLGPU") == "1"
PACKS = packs_drawn(20)


class HybridStep:
    """A training step of an attention and a Gated DeltaNet layer, one after the other, on one rank of several."""

    def __init__(self, group: Any, slots: cp.GraphTables, scheme: str = "a2a", mode: str = "headwise") -> None:
        gdn = KINDS["gdn"] if mode == "headwise" else CONTIGUOUS["gdn chunkwise"]
        self.group, self.slots, self.kinds = group, slots, [KINDS[scheme], gdn]
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()

        self.embedding = drawn(50, 96)
        self.to_qkv, self.to_gdn = drawn(96, 160), drawn(96, 160 + 12)
        self.conv, self.decay, self.bias = drawn(160, 4), drawn(6), drawn(6)
        self.parameters = [self.embedding, self.to_qkv, self.to_gdn, self.conv, self.decay, self.bias]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.loss = torch.zeros((), device=DEVICE)

    def shard(self, lengths: list[int]) -> cp.LocalBatch:
        tokens = np.random.default_rng(sum(lengths)).integers(0, 50, sum(lengths))
        layout = self.slots.layout(lengths)
        return cp.shard_batch(tokens, layout, self.group, slots=self.kinds, device=DEVICE, into=self.slots, agree=False)

    def __call__(self, batch: cp.LocalBatch) -> None:
        x = self.embedding[batch.tokens]
        q, k, v = (x @ self.to_qkv).split([96, 32, 32], 1)
        heads = (part.unflatten(1, (-1, 16)) for part in (q, k, v))
        x = x + cp.attention(*heads, batch.plan(self.kinds[0]), self.group, kernel="varlen").flatten(1)
        qkv, beta, alpha = (x @ self.to_gdn).split([160, 6, 6], 1)
        out = cp.gated_delta_net(
            qkv, beta, alpha, batch.plan(self.kinds[1]), self.group,
            conv=self.conv, A_log=self.decay, dt_bias=self.bias, kernel="chunked",
        )  # fmt: skip
        x = x + out.flatten(1)
        loss = (x.float().square().mean(1) * batch.loss_weights).sum()
        gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad.copy_(gradient)
        self.loss.copy_(loss.detach())


def captured(step: HybridStep, batch: cp.LocalBatch) -> torch.cuda.CUDAGraph:
    """The usual way: some eager steps on another stream, and then the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            step(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.autograd.set_multithreading_enabled(False):
        step(batch)
    return graph


def counted(name: str) -> int:
    return int(getattr(ctypes.CDLL(None), f"nullgpu_{name}")()) if IS_EMULATED else 0


@pytest.mark.parametrize(
    ("scheme", "size", "mode"),
    [*(("a2a", 1, mode) for mode in ("headwise", "chunkwise")), ("a2a", 2, "headwise"), ("a2a", 3, "chunkwise"),
     ("p2p", 3, "headwise"), ("all_gather", 2, "headwise"), ("exact", 3, "headwise")],
)  # fmt: skip
def test_a_captured_step_serves_twenty_packs(scheme, size, mode):
    """Its tables are in the graph's memory; on a GPU loss and gradients of one rank are those of an eager step."""
    group = ThreadGroup.create(1)[0] if size == 1 else StillGroup(size // 2, size)
    layout = "zigzag" if mode == "headwise" else "contiguous"
    step = HybridStep(group, cp.GraphTables(CAPACITY, 6, size, align_documents=2 * size, layout=layout), scheme, mode)
    graph, kernels = captured(step, step.shard(PACKS[0])), set()
    for lengths in PACKS:
        batch = step.shard(lengths)
        step.slots.check_loaded(batch.plans)
        before = counted("launches")
        graph.replay()
        kernels.add(counted("launches") - before)
        if IS_EMULATED:  # kernels of a replay are counted there, and not run
            assert len(kernels) == 1
            assert min(kernels) > 0
        if IS_EMULATED or size > 1:  # where nothing arrives, results are of whatever stood there
            continue
        replayed = [step.loss.clone(), *(parameter.grad.clone() for parameter in step.parameters)]
        step(batch)
        eager = [step.loss, *(parameter.grad for parameter in step.parameters)]
        for one, other in zip(replayed, eager, strict=True):
            torch.testing.assert_close(one, other)


def test_a_graph_reads_the_tables_of_the_pack_that_was_loaded():
    step = HybridStep(StillGroup(1, 3), cp.GraphTables(CAPACITY, 6, 3, align_documents=6))
    addresses = set()
    for lengths in PACKS:
        batch = step.shard(lengths)
        plan = batch.plan(KINDS["a2a"])
        order, offsets = (
            plan.tables.orders["order"],
            device_calls(plan.tables.tiles(0, plan.attend.stages[0]), DEVICE).calls[0].queries.offsets,
        )
        sizes = [-(-length // 6) * 6 for length in lengths]
        assert order.tolist() == plan.layout.order.tolist()
        assert offsets.tolist() == np.cumsum([0, *sizes, *[0] * (6 - len(sizes))]).tolist()
        addresses.add((order.data_ptr(), offsets.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.skipif(not IS_EMULATED, reason="counts of the emulated device")
@pytest.mark.parametrize("way", ["a2a", "p2p", "all_gather", "exact", "chunkwise"])
def test_a_capture_copies_nothing_from_the_host_and_allocates_nothing_there(way):
    layout, choice = ("contiguous", ("a2a", way)) if way == "chunkwise" else ("zigzag", (way,))
    step = HybridStep(StillGroup(0, 2), cp.GraphTables(CAPACITY, 6, 2, align_documents=4, layout=layout), *choice)
    batch = step.shard(PACKS[0])
    captured(step, batch)  # which also runs it eagerly
    names = ("host_copies", "pinned_allocations")
    before = [counted(name) for name in names]
    launches = counted("launches")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.autograd.set_multithreading_enabled(False):
        step(batch)
    assert [counted(name) for name in names] == before
    assert counted("launches") > launches


def test_a_pack_is_loaded_by_one_copy_into_the_same_memory():
    slots = cp.GraphTables(CAPACITY, 6, 2, align_documents=4)
    step = HybridStep(StillGroup(0, 2), slots)
    first = step.shard(PACKS[0])
    copies, allocations = counted("host_copies"), counted("pinned_allocations")
    second = step.shard(PACKS[1])
    assert counted("host_copies") - copies == (1 if IS_EMULATED else 0)
    assert counted("pinned_allocations") == allocations
    for name in ("tokens", "labels", "loss_weights", "position_ids"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (3, "zigzag"), (3, "contiguous")])
def test_padded_tables_give_one_ranks_numbers(size, layout):
    """Eagerly, with the tables that a graph reads, on ragged packs."""
    packs, given = PACKS[:3], (DEVICE, torch.bfloat16, layout)
    ranks = run_ranks(run_on_rank, size, packs, *given, kind=RANKS, timeout=seconds_of_ranks())
    for number, lengths in enumerate(packs):
        errors = errors_of(ranks[0][number], lengths, size, *given[1:])
        assert all(error <= 2e-2 for error in errors.values()), (lengths, errors)
        if layout == "contiguous":
            continue
        filled = sum(-(-length // (2 * size)) * 2 * size for length in lengths)
        of_attention = [x for name, x in ranks[0][number].items() if name.split()[0] in MASKED]
        assert len(of_attention) == 4 * len(KINDS.keys() & MASKED)
        assert not any(x[filled:].count_nonzero() for x in of_attention)  # not even NaN of memory that nobody wrote


def test_auto_takes_kernels_that_serve_graphs():
    slots = cp.GraphTables(CAPACITY, 6, 1, align_documents=2)
    step = HybridStep(ThreadGroup.create(1)[0], slots)
    plans = step.shard(PACKS[0]).plans
    ((_, _, conv, rule),) = LinearOnRank(plans.plan(KINDS["gdn"]), step.group, "auto", "qkv", step.to_gdn).kernels
    assert rule.serves_graphs
    assert conv.serves_graphs
    call = attention_call(plans.plan(KINDS["a2a"]), torch.bfloat16, DEVICE)
    assert choose_kernel(KERNELS, "auto", call).serves_graphs


def test_a_graph_is_replayed_for_the_pack_that_was_loaded_last():
    slots = cp.GraphTables(CAPACITY, 6, 1, align_documents=2)
    step = HybridStep(ThreadGroup.create(1)[0], slots)
    first = step.shard(PACKS[0])
    slots.check_loaded(first.plans)
    second = step.shard(PACKS[1])
    slots.check_loaded(second.plans)
    rejects(r"those of another pack", slots.check_loaded, first.plans)


def test_rejects_tensors_on_another_device_than_the_tables():
    slots = cp.GraphTables(CAPACITY, 6, 2, align_documents=4)
    plans = cp.BatchPlan(slots.layout(PACKS[0]), [KINDS["a2a"]])
    slots.load(plans, 0, DEVICE)
    q, k, v = (torch.randn(CAPACITY // 2, heads, 16) for heads in (6, 2, 2))
    rejects("q: got 'a tensor on cpu'; allowed: one on cuda:0", cp.attention, q, k, v, plans.plans[0], StillGroup(0, 2))


def test_plans_that_layers_have_run_with_may_be_loaded():
    slots, group = cp.GraphTables(CAPACITY, 6, 2, align_documents=4), StillGroup(0, 2)
    plans = cp.BatchPlan(slots.layout(PACKS[0]), [KINDS["a2a"]])
    q, k, v = (torch.randn(CAPACITY // 2, heads, 16, device=DEVICE, dtype=torch.bfloat16) for heads in (6, 2, 2))
    cp.attention(q, k, v, plans.plans[0], group, kernel="varlen")
    assert plans.plans[0].tables is None
    slots.load(plans, 0, DEVICE)
    assert plans.plans[0].tables is not None  # without them the capture below is refused
    cp.attention(q, k, v, plans.plans[0], group, kernel="varlen")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        cp.attention(q, k, v, plans.plans[0], group, kernel="varlen")


def test_rejects_captures():
    """The first two captures are also the first calls; the others have run before, and run after."""
    new = HybridStep(StillGroup(0, 2), cp.GraphTables(CAPACITY, 6, 2, align_documents=4))
    step = HybridStep(ThreadGroup.create(1)[0], cp.GraphTables(CAPACITY, 6, 1, align_documents=2))
    of_new, batch, ones = new.shard(PACKS[0]), step.shard(PACKS[0]), torch.ones(4, device=DEVICE)
    of_one_pack, four = KINDS["a2a"].plan(cp.Layout.zigzag(cp.Packing([7, 1, 40]), 1)), cp.Packing([4])
    layout, rows = cp.Layout.contiguous(four, 1), torch.ones(4, 4, device=DEVICE)
    conv = functools.partial(cp.causal_conv1d, rows, rows, None, cp.plan_linear(four, layout, "conv1d", channels=4))

    def attends(plan, kernel):
        total = plan.layout.packing.total
        q, k, v = (torch.randn(total, heads, 16, device=DEVICE, dtype=torch.bfloat16) for heads in (6, 2, 2))
        return functools.partial(cp.attention, q, k, v, plan, kernel=kernel)

    for ran, says, call in (
        (False, "Run the step once, eagerly", functools.partial(new, of_new)),
        (False, "Run the step once eagerly", functools.partial(on_device, np.arange(5), DEVICE)),
        (True, "GraphTables", attends(of_one_pack, "varlen")),
        (True, "kernel: got 'reference'.*serves every pack", attends(batch.plan(KINDS["a2a"]), "reference")),
        (True, "Leave this call out", functools.partial(cp.gather, rows, layout, None)),
        (True, "stream that is being captured", functools.partial(cp.relayout, rows, layout, layout, None)),
        (True, "stream that is being captured", conv),
        (True, "num_tokens: got 8", functools.partial(cp.token_loss, ones, ones, num_tokens=8)),
    ):
        if ran:
            call()
        with pytest.raises(cp.ArgumentError, match=says), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        if ran:
            call()
