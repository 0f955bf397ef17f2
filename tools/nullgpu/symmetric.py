"""Symmetric memory among ranks that are threads: torch's handle of it, in place of memory that several devices reach.

`put_signal` and `wait_signal` are kernels of a stream on a GPU. Here the host waits in their place: a rank's operations
are queued in an order in which none needs a later one of its own, so others come to signal it. On the emulated device a
signal carries the clock of its stream (`clocks`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.transports import symmetric_memory
from tools.nullgpu import ordering
from tools.nullgpu.nccl import run_ranks_over_nccl

T = TypeVar("T")


class Memory:
    """The memory and the signals of all ranks."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size, self.timeout = size, timeout
        self.buffers: dict[int, Tensor] = {}
        self.signals: dict[tuple[int, int, int], dict[int, int]] = {}  # by receiver, sender and channel
        self.changed = threading.Condition()
        self.is_aborted = False

    def abort(self) -> None:
        """Ends every wait."""
        with self.changed:
            self.is_aborted = True
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_aborted or condition(), self.timeout):
                raise RuntimeError(f"symmetric memory: {what} in {self.timeout:g} s")
            if self.is_aborted:
                raise RuntimeError("symmetric memory: another rank failed")


class Handle:
    """torch's `_SymmetricMemory` of one rank, as far as it is used."""

    def __init__(self, memory: Memory, rank: int, buffer: Tensor) -> None:
        self.memory, self.rank, self.world_size, self.buffer_size = memory, rank, memory.size, buffer.numel()
        with memory.changed:
            memory.buffers[rank] = buffer
            memory.changed.notify_all()
        memory.wait_until(lambda: len(memory.buffers) == memory.size, "ranks did not come")

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        assert storage_offset == 0
        return self.memory.buffers[rank].view(dtype).view(sizes)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        memory, key = self.memory, (dst_rank, self.rank, channel)
        text = f"rank {dst_rank} did not take signal {channel} of rank {self.rank}"
        memory.wait_until(lambda: key not in memory.signals, text)
        with memory.changed:
            memory.signals[key] = {} if ordering.active is None else ordering.active.release(ordering.stream())
            memory.changed.notify_all()

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        memory, key = self.memory, (self.rank, src_rank, channel)
        memory.wait_until(lambda: key in memory.signals, f"rank {src_rank} sent rank {self.rank} no signal {channel}")
        with memory.changed:
            seen = memory.signals.pop(key)
            memory.changed.notify_all()
        if ordering.active is not None:
            ordering.active.acquire(ordering.stream(), seen)


def run_ranks_over_symmetric_memory(
    function: Callable[..., T], size: int, *args: Any, slot: int = 1 << 20, timeout: float = 60.0
) -> list[T]:
    """`run_ranks_over_nccl` with symmetric memory besides, slots of some bytes and the order of all accesses checked.

    A rank has a stream of its own, as on a device of its own.
    """
    memory = Memory(size, 0.5 * timeout)
    # Made here, since torch holds a lock when it makes the first ones, and would call what traces them with it.
    streams = [torch.cuda.Stream() for _ in range(size)]
    torch.cuda.Stream(priority=-1)

    def rendezvous(bytes_: int, device: torch.device, group: Any) -> tuple[Tensor, Handle]:
        buffer = torch.empty(bytes_, dtype=torch.uint8, device=device)
        return buffer, Handle(memory, group.own_rank, buffer)

    with patch.multiple(symmetric_memory, symmetric_memory=rendezvous, SLOT=slot):
        return run_ranks_over_nccl(partial(_on_rank, memory, streams, function), size, *args, timeout=timeout)


def _on_rank(
    memory: Memory, streams: list[torch.cuda.Stream], function: Callable[..., Any], group: RankGroup, *args: Any
) -> Any:
    try:
        with torch.cuda.stream(streams[group.rank]):
            assert ordering.active is not None
            ordering.active.callers.add(ordering.stream())
            return function(group, *args)
    except BaseException:
        memory.abort()
        raise
