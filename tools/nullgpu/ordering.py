"""The order of transfers and of what touches their memory: checked, since here everything happens at once.

From its start until the current stream has waited for it, a transfer's memory may be neither written, nor, where it
arrives, read; nor may it be acquired, or released, for something else. What breaks this is an `OrderError`, in the
operator that does it. With `Clocks` the order of all accesses of device memory is checked, by whatever stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.cuda import _gpu_trace as gpu_trace
from torch.utils._pytree import tree_leaves

from megatron_cp.exchange.buffers import Buffers
from tools.nullgpu.clocks import Clocks, OrderError, runs

_DONE_KEPT = 256  # transfers that some stream has waited for, and another may not have


@dataclass(eq=False)
class Transfer:
    """A transfer that has been started.

    Attributes:
        name: name for errors.
        sent, received: the bytes that it reads and writes, as a half-open range of addresses.
        waited: the streams that have waited for it.
    """

    name: str
    sent: tuple[int, int]
    received: tuple[int, int]
    waited: set[int] = field(default_factory=set)


class Watch:
    """All transfers of a process.

    Args:
        clocks: checks all accesses as well, if given.
    """

    def __init__(self, clocks: Clocks | None = None) -> None:
        self.clocks = clocks
        self.lock = threading.RLock()
        self.under_way: list[Transfer] = []
        self.done: deque[Transfer] = deque(maxlen=_DONE_KEPT)
        self.events: dict[int, list[Transfer]] = {}  # what comes before an event
        self.checks = 0

    def start(self, name: str, sent: Tensor, received: Tensor) -> Transfer:
        """Starts a transfer; earlier transfers with the same memory must have been waited for."""
        transfer = Transfer(name, span(sent), span(received))
        self.touch(f"the start of {name}", [transfer.sent], [transfer.received])
        with self.lock:
            mine = (transfer.sent, transfer.received)  # whose history begins anew
            older = [t for t in self.done if not any(overlaps(a, b) for a in (t.sent, t.received) for b in mine)]
            self.done = deque(older, maxlen=_DONE_KEPT)
            self.under_way.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Makes the current stream wait for a transfer."""
        with self.lock:
            transfer.waited.add(stream())
            if transfer in self.under_way:
                self.under_way.remove(transfer)
                self.done.append(transfer)

    def touch(self, name: str, read: Iterable[tuple[int, int]], written: Iterable[tuple[int, int]]) -> None:
        """Refuses what may not be read or written yet."""
        read, written = list(read), list(written)
        for transfer in self.unordered():
            for way, ranges, targets in (
                ("reads", read, (transfer.received,)), ("writes", written, (transfer.received, transfer.sent)),
            ):  # fmt: skip
                if any(overlaps(given, target) for given in ranges for target in targets):
                    raise OrderError(f"{name} {way} memory of {transfer.name}, which its stream has not waited for")

    def touch_addresses(self, name: str, addresses: np.ndarray, *, writes: bool) -> None:
        """Checks a kernel's accesses."""
        if self.clocks is not None:
            self.clocks.access(name, runs(addresses), writes=writes)
        for transfer in self.unordered():
            for lo, hi in (transfer.received, transfer.sent) if writes else (transfer.received,):
                if ((addresses >= lo) & (addresses < hi)).any():
                    way = "writes" if writes else "reads"
                    raise OrderError(f"{name} {way} memory of {transfer.name}, which its stream has not waited for")

    def unordered(self) -> list[Transfer]:
        """Returns the transfers that the current stream has not waited for."""
        self.checks += 1
        with self.lock:
            if not self.under_way and not self.done:
                return []
            here = stream()
            return [transfer for transfer in (*self.under_way, *self.done) if here not in transfer.waited]

    def record(self, event: int, stream_of_event: int) -> None:
        if self.clocks is not None:
            self.clocks.record(event, stream_of_event)
        with self.lock:
            known = (*self.under_way, *self.done)
            self.events[event] = [transfer for transfer in known if stream_of_event in transfer.waited]

    def wait_event(self, event: int, waiting: int) -> None:
        if self.clocks is not None:
            self.clocks.wait_event(event, waiting)
        with self.lock:
            for transfer in self.events.get(event, ()):
                transfer.waited.add(waiting)


active: Watch | None = None


@contextlib.contextmanager
def watching(clocks: Clocks | None = None) -> Iterator[Watch]:
    """Checks every operator, kernel and buffer of the process within it."""
    global active
    watch = Watch(clocks)
    acquire, release = Buffers.acquire, Buffers.release

    def acquired(self: Buffers, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        found = acquire(self, size, device, pinned=pinned)
        watch.touch("a buffer's acquisition", [], [span(found)])
        return found

    def released(self: Buffers, *tensors: Tensor) -> None:
        watch.touch("a buffer's release", [], [span(tensor) for tensor in tensors])
        release(self, *tensors)

    hooks = ((gpu_trace.EventRecordCallbacks, watch.record), (gpu_trace.EventWaitCallbacks, watch.wait_event))
    torch._C._activate_gpu_trace()
    for registry, hook in hooks:
        registry.add_callback(hook)
    active = watch
    try:
        with patch.object(Buffers, "acquire", acquired), patch.object(Buffers, "release", released):
            yield watch
    finally:
        active = None
        for registry, hook in hooks:
            registry.callback_list.remove(hook)


def check_operator(func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
    """Checks an operator's tensors before it runs."""
    assert active is not None
    if active.clocks is not None:
        targets = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor) and leaf.is_cuda]
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda]
        sources = [source for source in sources if not any(source is target for target in targets)]
        active.clocks.access(str(func), list(map(span, sources)), writes=False)
        active.clocks.access(str(func), list(map(span, targets)), writes=True)
    if not active.unordered():
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda]
    active.touch(str(func), map(span, tensors), map(span, tree_leaves(written)))


def span(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses from a tensor's first byte to its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def overlaps(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns True if two ranges have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]


def stream() -> int:
    """The current one."""
    return torch.cuda.current_stream().cuda_stream
