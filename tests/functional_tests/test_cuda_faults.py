"""Faults that only CUDA shows, planted on purpose: the emulated device sees every one, and nothing without them.

It refuses what a GPU refuses, and its values are right.
"""

import os
from dataclasses import replace

import pytest
import torch

from megatron_cp.exchange import device as device_module
from megatron_cp.exchange.kernels import copies
from megatron_cp.executor import halo
from megatron_cp.executor.groups import TorchGroup, torch_group
from megatron_cp.executor.groups.base import Done
from megatron_cp.softmax.kernels.varlen import VarlenAttention
from megatron_cp.testing.parity import judge, whole
from tests.functional_tests.test_cuda import ATTENTION, GDN, in_float64, layer_on_device, seconds_of_ranks, steps_of

pytestmark = pytest.mark.skipif("NULLGPU" not in os.environ, reason="needs the emulated device")

A2A = replace(ATTENTION, lengths=(7, 1, 20), scheme="a2a", layout="zigzag")
CHUNKWISE = replace(GDN, lengths=(7, 1, 20), layer="conv1d", scheme="chunkwise", cp=3)


def over_nccl(case, tolerance=2e-2):
    """Runs a layer whose result is held to float64."""
    from tools.nullgpu.nccl import run_ranks_over_nccl

    ranks = run_ranks_over_nccl(layer_on_device, case.cp, case, False, timeout=seconds_of_ranks(20))
    alone = A2A if case.layer == "attention" else CHUNKWISE
    parity = judge(case, whole(case, ranks), in_float64(alone))
    assert all(error <= tolerance for error in parity.errors.values()), "other numbers than in float64"


def on_one_rank(what="varlen"):
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


def a_table_on_the_host(patch):
    make = device_module.on_device
    patch.setattr(halo, "on_device", lambda table, device, *rest: make(table, torch.device("cpu"), *rest))
    return lambda: over_nccl(CHUNKWISE, 1e-5), "tensors on one device"


def an_item_in_a_kernel(patch):
    forward = VarlenAttention.forward

    def and_looks(self, out, *rest):
        forward(self, out, *rest)
        out[0, 0, 0].item()

    patch.setattr(VarlenAttention, "forward", and_looks)
    return on_one_rank, "synchronizing"


def a_size_that_depends_on_data(patch):
    pack = copies.pack_tokens

    def and_counts(tensors, *rest):
        tensors[0].nonzero()
        return pack(tensors, *rest)

    patch.setattr(copies, "pack_tokens", and_counts)
    return lambda: on_one_rank("exchange"), "synchronizing"


def a_copy_from_pageable_memory(patch):
    pack = copies.pack_tokens

    def and_copies(tensors, *rest):
        torch.ones(4).to(tensors[0].device)
        return pack(tensors, *rest)

    patch.setattr(copies, "pack_tokens", and_copies)
    return lambda: on_one_rank("exchange"), "synchronizing"


def a_buffer_given_back_too_early(patch):
    start = TorchGroup.start_all_to_all

    def and_gives_back(self, received, sent, *splits):
        pending = start(self, received, sent, *splits)
        self.buffers.release(sent)
        return pending

    patch.setattr(TorchGroup, "start_all_to_all", and_gives_back)
    return lambda: over_nccl(A2A), "release writes memory of all_to_all"


def a_message_written_while_it_travels(patch):
    start = TorchGroup.start_all_to_all

    def and_writes(self, received, sent, *splits):
        pending = start(self, received, sent, *splits)
        sent.mul_(1)
        return pending

    patch.setattr(TorchGroup, "start_all_to_all", and_writes)
    return lambda: over_nccl(A2A), "mul_.* writes memory of all_to_all"


def a_wait_forgotten(patch):
    wait, waits = torch_group._Works.wait, []

    def forgets_the_first(self):
        waits.append(self)
        if len(waits) > 1:
            wait(self)

    patch.setattr(torch_group._Works, "wait", forgets_the_first)
    return lambda: over_nccl(A2A), "reads memory of all_to_all|has not waited|did not wait"


def a_wait_in_another_stream(patch):
    wait, aside = torch_group._Works.wait, torch.cuda.Stream()

    def waits_aside(self):
        with torch.cuda.stream(aside):
            wait(self)

    patch.setattr(torch_group._Works, "wait", waits_aside)
    return lambda: over_nccl(A2A), "a load of a kernel reads memory of all_to_all|release writes memory"


def a_wrong_split(patch):
    start = TorchGroup.start_all_to_all

    def moves_a_byte(self, received, sent, received_splits, sent_splits):
        if self.rank == 1 and sent_splits[0]:
            sent_splits = [sent_splits[0] - 1, sent_splits[1] + 1, *sent_splits[2:]]
        return start(self, received, sent, received_splits, sent_splits)

    patch.setattr(TorchGroup, "start_all_to_all", moves_a_byte)
    return lambda: over_nccl(A2A), "rank 1 sends .* bytes to rank ., which receives"


def a_rank_that_starts_nothing(patch):
    start = TorchGroup.start_messages

    def idles(self, sends, receives):
        if not any(message.tensor.numel() for message in (*sends, *receives)):
            return Done()
        return start(self, sends, receives)

    patch.setattr(TorchGroup, "start_messages", idles)
    case = replace(A2A, cp=3, transport="hierarchical", hosts=(0, 0, 1))
    return lambda: over_nccl(case), "NCCL: in collective .*, which receives 0|ranks started .* collectives"


def rows_that_nobody_writes(patch):
    pack = copies.pack_tokens

    def all_but_the_last_bytes(tensors, message, at):
        before = message[-64:].clone()
        done = pack(tensors, message, at)
        message[-64:].copy_(before)
        return done

    patch.setattr(copies, "pack_tokens", all_but_the_last_bytes)
    return lambda: over_nccl(A2A), "other numbers"


FAULTS = [
    a_table_on_the_host, an_item_in_a_kernel, a_size_that_depends_on_data, a_copy_from_pageable_memory,
    a_buffer_given_back_too_early, a_message_written_while_it_travels, a_wait_forgotten, a_wait_in_another_stream,
    a_wrong_split, a_rank_that_starts_nothing, rows_that_nobody_writes,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_is_seen(fault, monkeypatch):
    run, seen = fault(monkeypatch)
    with pytest.raises(Exception, match=seen):
        run()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_seen_without_it(fault):
    with pytest.MonkeyPatch.context() as patch:
        run, _ = fault(patch)  # and takes it back
    run()


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
