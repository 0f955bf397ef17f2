"""`Buffers`: memory for messages, reused from step to step."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_cp.exchange.device import current_stream
from megatron_cp.exchange.split_counts import SPARE, rounded
from megatron_cp.torch_private import is_capturing, no_modes

# Acquisitions after which a buffer that was neither taken nor released is dropped, since its batch has ended. A step of
# training has some thousand; a long ring in many layers more.
_FORGOTTEN = 100_000


class Buffers:
    """Byte buffers for messages that a rank sends, stages, or receives to be read once.

    A message lives from its packing to the wait for it, and every layer has several: fresh memory would be paged in, or
    searched for, each time. Tensors that autograd keeps are never taken from here.

    A message takes the oldest free buffer that is large enough, and not too large. So a step of training that repeats
    the one before takes the same buffers and allocates nothing: buffers that did not yet exist when the earlier step
    took one are younger. Taking the smallest buffer that fits does not have this property: a message that borrowed a
    large buffer would take, in the next step, a smaller one that another message took before.

    Attributes:
        allocations: buffers made so far.
    """

    def __init__(self) -> None:
        self._host_memory: Callable[[int], Tensor] | None = None
        self.allocations = 0
        self._free: defaultdict[Any, list[_Buffer]] = defaultdict(list)  # by place
        self._taken: dict[int, _Buffer] = {}  # by address
        self._takes = 0
        self._lock = threading.Lock()  # autograd runs the backward of CUDA tensors on another thread

    @property
    def size(self) -> int:
        """The number of bytes of all buffers, taken and free."""
        with self._lock:
            return sum(kept.capacity for free in (*self._free.values(), self._taken.values()) for kept in free)

    def make_host_memory_by(self, make: Callable[[int], Tensor]) -> None:
        """Makes later buffers that are neither pinned nor a device's by a function of the number of bytes."""
        with self._lock:
            self._host_memory = make
            self._free.clear()
            # Those that are taken are not taken back: a tensor that still refers to one keeps its memory.
            self._taken = {address: kept for address, kept in self._taken.items() if kept.place[0].type != "cpu"}

    def acquire(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """Returns `[size]` uninitialised bytes on a device, or in host memory that `device` can access if `pinned`."""
        # Work of one stream is ordered, so that it may reuse a buffer; another stream would not wait for it.
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
            if on_cuda:  # a graph writes there on every replay, without acquiring it
                kept.in_graph |= is_capturing()
            self._taken[kept.address] = kept
            return kept.buffer.resize_(size)

    def acquire_like(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a buffer in place of `like.new_empty(*shape, dtype=dtype)`."""
        dtype = like.dtype if dtype is None else dtype
        return self.acquire(math.prod(shape) * dtype.itemsize, like.device).view(dtype).view(shape)

    def release(self, *tensors: Tensor) -> None:
        """Takes back tensors from `acquire`, or views of them, once nothing reads or writes them any more.

        Other tensors are ignored.
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
        # Buffers of a step that failed are never released. A tensor that still refers to one keeps its memory.
        self._taken = {address: kept for address, kept in self._taken.items() if kept.taken >= oldest or kept.in_graph}

    def _made(self, capacity: int, place: Any) -> _Buffer:
        self.allocations += 1
        device, pinned, _ = place
        make = self._host_memory
        with torch.inference_mode(False), no_modes():  # outlives modes that count or poison
            if make is not None and device.type == "cpu" and not pinned:
                buffer = make(capacity)
            else:
                buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)
        return _Buffer(buffer, buffer.untyped_storage().data_ptr(), place, capacity, self.allocations)


@dataclass(eq=False)
class _Buffer:
    """A buffer of the pool.

    Attributes:
        place: device, whether its memory is pinned, and stream.
        number: its position among all buffers in the order of allocation.
        taken: the number of the acquisition that took it last.
        in_graph: True if a CUDA graph uses it.
    """

    buffer: Tensor
    address: int
    place: Any
    capacity: int
    number: int
    taken: int = 0
    in_graph: bool = False
