"""Transport `symmetric_memory` on CUDA: layers, and, on the emulated device, the order of its copies and signals.

On the emulated device ranks are threads, torch's handle of symmetric memory is `tools.nullgpu.symmetric`'s, and every
access of device memory is held against `tools.nullgpu.clocks`. On a GPU ranks are processes with torch's own handle, on
as many devices as there are.
"""

import os
from dataclasses import replace

import pytest
import torch

from megatron_cp.exchange.split_counts import SplitCounts
from megatron_cp.executor.communicator import Communicator
from megatron_cp.executor.groups import Message
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.executor.transports import symmetric_memory
from megatron_cp.executor.transports.symmetric_memory import DeviceWindow, _Queued
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.plan.transport import Transport
from tests.functional_tests.test_cuda import ATTENTION, GDN, SMALL, assert_close, layer_on_device
from tests.limits import limit
from tests.refusals import rejects

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IS_EMULATED = "NULLGPU" in os.environ
emulated = pytest.mark.skipif(not IS_EMULATED, reason="needs the emulated device")
BY, DEVICE = Transport("symmetric_memory"), torch.device("cuda", 0)
ATTENTION, GDN = replace(ATTENTION, **SMALL, scheme="a2a"), replace(GDN, **SMALL, scheme="headwise")
CASES = {
    **{scheme: replace(ATTENTION, cp=4, layout="balanced", scheme=scheme) for scheme in SCHEMES},
    **{f"p2p over {cp}": replace(ATTENTION, cp=cp, layout="zigzag", scheme="p2p") for cp in (2, 3, 5)},
    **{f"gdn {mode}": replace(GDN, cp=3, layout="random", scheme=mode) for mode in ("headwise", "chunkwise")},
}


def over_symmetric_memory(function, size, *args, slot=4096):
    """Runs ranks as this device allows it, with slots of that many bytes for each rank."""
    if not IS_EMULATED:
        return run_ranks(in_slots, size, slot * size, function, *args, kind="processes", timeout=limit(120))
    from tools.nullgpu.symmetric import run_ranks_over_symmetric_memory

    return run_ranks_over_symmetric_memory(function, size, *args, slot=slot * size, timeout=60.0)


def in_slots(group, slot, function, *args):
    symmetric_memory.SLOT = slot
    return function(group, *args)


@pytest.fixture(autouse=True)
def shared_devices(monkeypatch):
    """Lets torch share memory among processes of one device, where there are fewer devices than ranks."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


@pytest.mark.parametrize("name", CASES)
def test_layers_equal_float64(name):
    case = CASES[name]
    ranks = over_symmetric_memory(layer_on_device, case.cp, replace(case, transport=BY.name), False)
    alone, tolerance = (ATTENTION, 2e-2) if case.layer == "attention" else (GDN, 1e-5)
    assert_close(case, ranks, alone, tolerance)


def talk(group, turns, sync_debug=False):
    """A ring, all-to-alls of uneven pieces and all-gathers, of what this stream writes, and this stream reads."""
    comm, rank, size = Communicator(group, BY), group.rank, group.size
    device = comm.wire.window.device
    counts = SplitCounts(torch.arange(1, 1 + size * size).view(size, size).mul(37).numpy())
    before, after = (rank - 1) % size, (rank + 1) % size

    def filled(count, value):
        return comm.buffers.acquire(4 * count, device).view(torch.float32).fill_(value)

    def landing(count):
        return comm.acquire(4 * count, device).view(torch.float32)

    def turn(number):
        sums = []
        sent, received = filled(500, rank + number), landing(500)
        comm.start_messages([Message(sent, after)], [Message(received, before)]).wait()
        sums.append(received.sum() - 500 * (before + number))
        comm.release(sent, received)
        if number % 2:  # else only neighbours speak, so that no other message shows that a piece has been read
            sent, arrived = filled(sum(counts.sent_by(rank)), rank), landing(sum(counts.received_by(rank)))
            shared, everyone = filled(300, rank), landing(300 * size)
            pending = [comm.start_all_to_all(arrived, sent, counts), comm.start_all_gather(everyone, shared)]
            for each in pending:
                each.wait()
            sums.append(arrived.sum() - sum(peer * n for peer, n in enumerate(counts.received_by(rank))))
            sums.append(everyone.sum() - 300 * sum(range(size)))
            comm.release(sent, arrived, shared, everyone)
        return sums

    found = turn(1)
    group.barrier()
    torch.cuda.set_sync_debug_mode("error" if sync_debug else "default")
    try:
        for number in range(turns):
            found += turn(number)
        group.barrier()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(each.cpu()) for each in found]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_arrive_and_the_host_waits_for_none(size):
    for found in over_symmetric_memory(talk, size, 6, True):
        assert set(found) == {0.0}


# -- faults ------------------------------------------------------------------------------------------------------------


def a_signal_not_waited_for(window, piece, peer, slot, at, limit):
    piece.copy_(window._place(peer, slot, at, piece))
    window._handle.put_signal(peer, 2 + slot, limit)


def a_slot_written_before_its_reader_is_done(window, slot, limit):
    for reader in window._unread[slot]:  # the signal is taken back, and nobody waits for it
        window._handle.memory.signals.pop((window.rank, reader, 2 + slot), None)
    window._unread[slot] = []


def a_signal_sent_before_the_copy(window, piece, readers, slot, at, limit):
    for reader in readers:
        window._handle.put_signal(reader, slot, limit)
    window._place(window.rank, slot, at, piece).copy_(piece)
    window._unread[slot] += readers


def a_signal_back_before_the_read(window, piece, peer, slot, at, limit):
    window._handle.wait_signal(peer, slot, limit)
    window._handle.put_signal(peer, 2 + slot, limit)
    piece.copy_(window._place(peer, slot, at, piece))


def a_start_before_what_is_sent_is_written(window, work, tensors):
    with torch.cuda.stream(window._stream):
        work()
    return _Queued(window._stream.record_event(), window.device, tensors)


def a_wait_forgotten(queued):
    pass


def in_the_callers_stream(patch, method):
    """The copies of a method are in the caller's stream, and its signals in the window's."""
    queue, plain = DeviceWindow.queue, getattr(DeviceWindow, method)

    def remembers(self, work, tensors):
        self.callers = torch.cuda.current_stream()
        return queue(self, work, tensors)

    def copies_there(self, piece, *rest):
        with torch.cuda.stream(self.callers), pytest.MonkeyPatch.context() as inner:
            for name in ("put_signal", "wait_signal"):
                inner.setattr(self._handle, name, beside(self._stream, getattr(self._handle, name)), raising=False)
            plain(self, piece, *rest)

    patch.setattr(DeviceWindow, "queue", remembers)
    patch.setattr(DeviceWindow, method, copies_there)


def beside(stream, call):
    def called(*args):
        with torch.cuda.stream(stream):
            call(*args)

    return called


IN_NO_ORDER = "copy_.* reads what .*copy_.* writes in another stream|copy_.* writes what .* reads"
WRITTEN_EARLY = "copy_.* writes what .*copy_.* reads in another stream|copy_.* reads"
FAULTS = [
    (DeviceWindow, "_read", a_signal_not_waited_for, IN_NO_ORDER),
    (DeviceWindow, "_await_readers", a_slot_written_before_its_reader_is_done, WRITTEN_EARLY),
    (DeviceWindow, "_stage", a_signal_sent_before_the_copy, IN_NO_ORDER),
    (DeviceWindow, "_read", a_signal_back_before_the_read, WRITTEN_EARLY),
    (DeviceWindow, "_stage", None, "in another stream, in no order"),
    (DeviceWindow, "_read", None, "in another stream, in no order"),
    (DeviceWindow, "queue", a_start_before_what_is_sent_is_written,
     "copy_.* reads what .*fill_.* writes in another stream"),
    (_Queued, "wait", a_wait_forgotten, "(sum|fill_).* (reads|writes) what .*copy_.* (writes|reads) in another stream"),
]  # fmt: skip


@emulated
@pytest.mark.parametrize(("owner", "name", "fault", "seen"), FAULTS)
def test_a_fault_of_order_is_seen(owner, name, fault, seen, monkeypatch):
    """A fault is seen in whatever order the ranks' threads run; without one, `talk` and all layers pass."""
    in_the_callers_stream(monkeypatch, name) if fault is None else monkeypatch.setattr(owner, name, fault)
    with pytest.raises(RankError, match=f"OrderError: .*({seen})"):
        over_symmetric_memory(talk, 3, 6)


# -- refusals ----------------------------------------------------------------------------------------------------------


def captured(group):
    comm = Communicator(group, BY)
    sent = torch.ones(4, device=comm.wire.window.device)
    received = sent.new_empty(4 * group.size)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        rejects("allowed: operations that no CUDA graph captures", comm.start_all_gather, received, sent)


def test_rejects_being_captured():
    over_symmetric_memory(captured, 2) if not IS_EMULATED else one_after_another()


def one_after_another():
    """The emulated device captures one stream at a time."""
    from tools.nullgpu.symmetric import Handle, Memory

    window = DeviceWindow(Handle(Memory(1), 0, torch.empty(64, dtype=torch.uint8, device=DEVICE)), DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        rejects("allowed: operations that no CUDA graph captures", window.queue, list, [])


@emulated
def test_rejects_memory_that_cannot_be_shared(monkeypatch):
    from tools.nullgpu.nccl import run_ranks_over_nccl

    def fails(size, device, group):
        raise RuntimeError("of torch")

    monkeypatch.setattr(symmetric_memory, "symmetric_memory", fails)
    run_ranks_over_nccl(refused, 2)


def refused(group):
    rejects(r"each with a CUDA device that the others reach \(rank 0: of torch; rank 1: of torch\)",
            Communicator, group, BY)  # fmt: skip
