"""`Buffers`: memory for messages, kept from step to step."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.exchange.device import current_stream
from megatron_cp.exchange.split_counts import SPARE, rounded

# Takes after which a buffer that was neither taken nor given back is let go: its batch is no more. A step of training
# has some thousand; a long ring in many layers more.
_FORGOTTEN = 100_000


class Buffers:
    """Bytes that a rank sends from, stages in, and receives what is read once in.

    A message lives from its packing to the wait for it, and every layer has some: fresh memory would be paged in, or
    searched for, each time. What autograd keeps is never taken from here.

    A message takes the oldest free buffer that is large enough, and not too large. So a step of training that is like
    the one before takes the same buffers and allocates nothing: those that the one before had not yet made when it
    took one are younger. Of the smallest that fits this is not true: a message that borrowed a large buffer takes a
    smaller one in the next step, which another would have taken.

    Attributes:
        allocations: buffers made so far.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: defaultdict[Any, list[_Kept]] = defaultdict(list)  # by place
        self._taken: dict[int, _Kept] = {}  # by address
        self._takes = 0
        self._lock = threading.Lock()  # autograd runs the backward of CUDA tensors on a thread of its own

    @property
    def size(self) -> int:
        """Bytes of all buffers, taken and free."""
        with self._lock:
            return sum(kept.capacity for free in (*self._free.values(), self._taken.values()) for kept in free)

    def acquire(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """`[size]` unwritten bytes on a device, or on the host where `device` can reach them by itself."""
        # One stream writes a buffer again only after what it has queued before; another would not wait for that.
        on_cuda = device.type == "cuda"
        place, capacity = (device, pinned, current_stream(device) if on_cuda else 0), rounded(size)
        with self._lock:
            free, kept = self._free[place], None
            for each in free:
                if capacity <= each.capacity <= SPARE * capacity and (kept is None or each.number < kept.number):
                    kept = each
            if kept is None:
                kept = self._made(capacity, place)
            else:
                free.remove(kept)
            self._takes += 1
            if self._takes % _FORGOTTEN == 0:
                self._forget()
            kept.taken = self._takes
            if on_cuda:  # a graph writes there whenever it is replayed, which takes nothing
                kept.in_graph |= torch._C._cuda_isCurrentStreamCapturing()
            self._taken[kept.address] = kept
            return kept.buffer.resize_(size)

    def acquire_like(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """What `like.new_empty(*shape, dtype=dtype)` is, in a buffer."""
        dtype = like.dtype if dtype is None else dtype
        return self.acquire(math.prod(shape) * dtype.itemsize, like.device).view(dtype).view(shape)

    def release(self, *tensors: Tensor) -> None:
        """Takes back what `acquire` returned, or views of it, once nothing reads or writes it any more.

        Other tensors are left alone.
        """
        with self._lock:
            for tensor in tensors:
                kept = self._taken.pop(tensor.untyped_storage().data_ptr(), None)
                if kept is not None:
                    self._free[kept.place].append(kept)

    def _forget(self) -> None:
        oldest = self._takes - _FORGOTTEN
        for free in self._free.values():
            free[:] = [kept for kept in free if kept.taken >= oldest or kept.in_graph]
        # What was under way in a step that failed is never given back. Who holds it after all keeps its memory.
        self._taken = {address: kept for address, kept in self._taken.items() if kept.taken >= oldest or kept.in_graph}

    def _made(self, capacity: int, place: Any) -> _Kept:
        self.allocations += 1
        device, pinned, _ = place
        with torch.inference_mode(False), _disable_current_modes():  # kept, whoever counts or poisons
            buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)
        return _Kept(buffer, buffer.untyped_storage().data_ptr(), place, capacity, self.allocations)


@dataclass(eq=False)
class _Kept:
    """One buffer.

    Attributes:
        address: of its storage.
        capacity: bytes that it can hold.
        number: which it was of those that were made.
        taken: by which take it was taken last.
        in_graph: whether a CUDA graph uses it.
    """

    buffer: Tensor
    address: int
    place: Any
    capacity: int
    number: int
    taken: int = 0
    in_graph: bool = False
