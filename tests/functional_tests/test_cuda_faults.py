"""Faults that only CUDA shows, planted on purpose: the emulated device sees every one, and nothing without them.

It refuses what a GPU refuses, and its values are right.
"""

import os
from dataclasses import replace

import pytest
import torch

from megatron_cp.exchange.kernels import copies
from megatron_cp.executor import halo
from megatron_cp.executor.groups import TorchGroup, torch_group
from megatron_cp.executor.groups.base import Done
from megatron_cp.softmax.kernels.varlen import VarlenAttention
from tests.functional_tests.test_cuda import ATTENTION, GDN, assert_close, layer_on_device, seconds_of_ranks, steps_of

pytestmark = pytest.mark.skipif("NULLGPU" not in os.environ, reason="needs the emulated device")

A2A = replace(ATTENTION, lengths=(7, 1, 20), scheme="a2a", layout="zigzag")
CHUNKWISE = replace(GDN, lengths=(7, 1, 20), layer="conv1d", scheme="chunkwise", cp=3)


def over_nccl(case, tolerance):
    """Runs a layer whose result is held to float64."""
    from tools.nullgpu.nccl import run_ranks_over_nccl

    ranks = run_ranks_over_nccl(layer_on_device, case.cp, case, False, timeout=seconds_of_ranks(20))
    assert_close(case, ranks, A2A if case.layer == "attention" else CHUNKWISE, tolerance)


def on_one_rank(what):
    """A step, the tables made before, in which the host may not wait."""
    forward, inputs = steps_of(what)

    def step():
        outputs = forward()
        torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autograd.set_multithreading_enabled(False):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(case):
    on_one_rank(case) if isinstance(case, str) else over_nccl(case, 2e-2 if case.layer == "attention" else 1e-5)


def on_the_host(make, table, device, *rest):
    return make(table, torch.device("cpu"), *rest)


def looks_at_an_item(forward, kernel, out, *rest):
    forward(kernel, out, *rest)
    out[0, 0, 0].item()


def counts(pack, tensors, *rest):
    tensors[0].nonzero()
    return pack(tensors, *rest)


def copies_pageable_memory(pack, tensors, *rest):
    torch.ones(4).to(tensors[0].device)
    return pack(tensors, *rest)


def gives_back_too_early(start, group, received, sent, *splits):
    pending = start(group, received, sent, *splits)
    group.buffers.release(sent)
    return pending


def writes_what_travels(start, group, received, sent, *splits):
    pending = start(group, received, sent, *splits)
    sent.mul_(1)
    return pending


def forgets_to_wait(wait, works):
    pass


def waits_in_another_stream(wait, works):
    with torch.cuda.stream(torch.cuda.Stream()):
        wait(works)


def splits_wrongly(start, group, received, sent, received_splits, sent_splits, *_):
    if group.rank == 1 and sent_splits[0]:
        sent_splits = [sent_splits[0] - 1, sent_splits[1] + 1, *sent_splits[2:]]
    return start(group, received, sent, received_splits, sent_splits)


def starts_nothing(start, group, sends, receives):
    idles = not any(message.tensor.numel() for message in (*sends, *receives))
    return Done() if idles else start(group, sends, receives)


def leaves_rows_unwritten(pack, tensors, message, at):
    before = message[-64:].clone()
    done = pack(tensors, message, at)
    message[-64:].copy_(before)
    return done


OVER_HOSTS = replace(A2A, cp=3, transport="hierarchical", hosts=(0, 0, 1))
SENDS, WAITS = (TorchGroup, "start_all_to_all"), (torch_group._Works, "wait")
# What does another thing, which one, the case that shows it (a step on one rank, or a layer over NCCL), and the error.
FAULTS = [
    (halo, "on_device", on_the_host, CHUNKWISE, "tensors on one device"),
    (VarlenAttention, "forward", looks_at_an_item, "varlen", "synchronizing"),
    (copies, "pack_tokens", counts, "exchange", "synchronizing"),
    (copies, "pack_tokens", copies_pageable_memory, "exchange", "synchronizing"),
    (*SENDS, gives_back_too_early, A2A, "release writes memory of all_to_all"),
    (*SENDS, writes_what_travels, A2A, "mul_.* writes memory of all_to_all"),
    (*WAITS, forgets_to_wait, A2A, "reads memory of all_to_all|has not waited|did not wait"),
    (*WAITS, waits_in_another_stream, A2A, "a load of a kernel reads memory of all_to_all|release writes memory"),
    (*SENDS, splits_wrongly, A2A, "rank 1 sends .* bytes to rank ., which receives"),
    (TorchGroup, "start_messages", starts_nothing, OVER_HOSTS,
     "NCCL: in collective .*, which receives 0|ranks started .* collectives"),
    (copies, "pack_tokens", leaves_rows_unwritten, A2A, "other numbers"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "change", "case", "seen"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_seen(owner, name, change, case, seen, monkeypatch):
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: change(real, *arguments))
    with pytest.raises(Exception, match=seen):
        run(case)


@pytest.mark.parametrize("case", ["varlen", "exchange", A2A, OVER_HOSTS, CHUNKWISE], ids=str)
def test_nothing_is_seen_without_one(case):
    run(case)


REFUSED = {
    "item": lambda x: x[0].item(), "tolist": lambda x: x.tolist(), "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(), "a mask": lambda x: x[x > 2], "two devices": lambda x: x + torch.ones(6),
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "an index of the device into the host's": lambda x: torch.ones(6)[x.long()],
    "a pageable copy": lambda x: torch.ones(6).to("cuda"),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_a_gpu_refuses_is_refused(call):
    x = torch.arange(6.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            call(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_are_right_and_memory_that_nobody_wrote_is_nan():
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = torch.ones(6).pin_memory().to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.arange(6.0, device="cuda") @ y).item() == 15
    assert torch.empty(10_000_000, device="cuda").isnan().all().item()
