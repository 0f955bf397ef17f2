"""Tests on CUDA: a stream waits for tables of other streams, and buffers of graphs stay."""

import gc

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.exchange import buffers as buffers_module
from megatron_cp.exchange import device as device_module
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.device import on_device, order_tables
from megatron_cp.exchange.kernels import copies
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.run import prepare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)
RAGGED = (7, 1, 40, 16)


@pytest.fixture
def waits(monkeypatch):
    """The streams that were made to wait for an event, and the tensors whose memory they keep."""
    found = []
    wait_event = torch.cuda.Stream.wait_event
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_event", lambda stream, event: found.append(stream) or wait_event(stream, event)
    )
    return found


@pytest.fixture(autouse=True)
def no_tables_of_others(monkeypatch):
    gc.collect()
    monkeypatch.setattr(device_module, "_live_tables", device_module._LiveTables())


def attention_step(layout="random"):
    """A call of attention on one rank whose rows are exchanged, and its plan."""
    from megatron_cp.planner.layouts import layout_by_name

    packing = cp.Packing(RAGGED)
    plan = cp.plan_attention(packing, layout_by_name(layout, packing, 1), heads=4, head_dim=16)
    q, k, v = (torch.randn(packing.total, 4, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    return plan, lambda: cp.attention(q, k, v, plan, ThreadGroup.create(1)[0], kernel="varlen")


def test_a_stream_waits_once_for_each_table_of_another(waits):
    ahead, layers = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(ahead):
        tables = [on_device(np.arange(5), DEVICE) for _ in range(3)]
    with torch.cuda.stream(layers):
        order_tables(DEVICE)
        assert waits == [layers] * 3
        order_tables(DEVICE)
        assert len(waits) == 3
        tables.append(on_device(np.arange(5), DEVICE))  # its own
        order_tables(DEVICE)
        assert len(waits) == 3
    with torch.cuda.stream(ahead):
        tables.append(on_device(np.arange(5), DEVICE))
    order_tables(DEVICE)  # the default stream, which has seen none
    assert len(waits) == 3 + 5
    with torch.cuda.stream(layers):
        order_tables(torch.device("cuda"))
        assert len(waits) == 3 + 5 + 1


def test_tables_that_nobody_has_any_more_are_forgotten(waits):
    ahead = torch.cuda.Stream()
    with torch.cuda.stream(ahead):
        for _ in range(10):
            on_device(np.arange(5), DEVICE)
    order_tables(DEVICE)
    assert waits == []
    assert not any(device_module._live_tables._made[DEVICE].values())


def test_layers_wait_for_tables_that_were_prepared_in_a_stream_ahead(waits):
    plan, step = attention_step()
    ahead, layers = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(ahead):
        prepare(plan, 0, DEVICE)
    with torch.cuda.stream(layers):
        step()
    assert layers in waits
    seen = len(waits)
    with torch.cuda.stream(layers):
        step()
    assert len(waits) == seen


def test_a_second_stream_makes_no_table_anew(monkeypatch):
    _, step = attention_step()
    step()
    made = []
    on_device = device_module.on_device
    monkeypatch.setattr(
        "megatron_cp.exchange.kernels.pieces.on_device", lambda *args: made.append(args) or on_device(*args)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    assert made == []


def test_a_backward_waits_for_tables_that_another_stream_has_made_since(waits):
    """Tables of the copy kernels are kept for all layers, whichever stream makes them first."""
    plan, _ = attention_step()
    layers, other = torch.cuda.Stream(), torch.cuda.Stream()

    def forward():
        tensors = [torch.randn(sum(RAGGED), 4, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        return cp.attention(*(x.requires_grad_() for x in tensors), plan, ThreadGroup.create(1)[0], kernel="varlen")

    with torch.cuda.stream(layers):
        out = forward()
    copies._token_table.cache_clear()
    copies._head_table.cache_clear()
    with torch.cuda.stream(other):
        forward().sum().backward()
    waits.clear()
    with torch.cuda.stream(layers):
        out.sum().backward()
    assert layers in waits


def test_a_buffer_that_a_graph_uses_is_not_let_go(monkeypatch):
    monkeypatch.setattr(buffers_module, "_FORGOTTEN", 100)
    buffers = Buffers()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        taken = buffers.acquire(1_000_000, DEVICE)
        buffers.release(taken)
    address = taken.data_ptr()
    del taken
    for _ in range(500):
        buffers.release(buffers.acquire(10, DEVICE))
    with torch.cuda.stream(stream):
        again = buffers.acquire(1_000_000, DEVICE)
    assert again.data_ptr() == address


def test_gradients_of_a_halo_are_the_same_bits_in_every_run():
    """Over segments of single tokens, whose halos share rows: on CUDA in rounds, in the order of one after another."""
    from megatron_cp.executor.communicator import over
    from megatron_cp.executor.halo import InFlightHalo, rounds_without_repeats
    from megatron_cp.plan.recurrence import Halo
    from megatron_cp.planner.layouts import layout_by_name

    packing = cp.Packing((30, 1, 2, 40))
    step = Halo(layout_by_name("random", packing, 4), 4, 3)
    tables = ((rank, name) for rank in range(4) for name in ("send_rows", "local_rows"))
    repeats = (at for at in tables if len(rounds_without_repeats(getattr(step.tables(at[0]), at[1]))) > 1)
    rank, name = next(repeats)
    in_flight = InFlightHalo(step, over(ThreadGroup.create(4)[rank]), torch.ones(1, 3))
    rows = getattr(step.tables(rank), name).astype(np.int64)
    values = torch.randn(len(rows), 3).bfloat16()
    target = torch.zeros(int(step.layout.row_counts[rank]), 3).bfloat16()
    found = target.to(DEVICE)
    in_flight.add(found, name, values.to(DEVICE))
    for row, value in zip(rows, values, strict=True):
        target[row] += value
    assert torch.equal(found.cpu(), target)


def test_a_stream_that_waits_for_one_that_captures_joins_the_capture():
    side, source, target = torch.cuda.Stream(), torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source)
        torch.cuda.current_stream().wait_stream(side)
    target.zero_()
    graph.replay()
    assert target.all()
