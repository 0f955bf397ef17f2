"""`Buffers`: memory for messages, kept from step to step."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_STEPS = 8  # sizes between one power of two and the next, so that ragged batches share buffers
_FORGOTTEN = 10_000  # takes after which a buffer that nobody wanted is let go: those of batches that are no more


class Buffers:
    """Bytes that a rank sends from and stages in.

    A message lives from its packing to the wait for it, and every layer has some: fresh memory would be paged in, or
    searched for, each time. What autograd keeps is never taken from here. Buffers come in steps of size, and each is
    for messages of its step: then a step of training that is like the one before allocates nothing.

    Attributes:
        allocations: buffers made so far.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: defaultdict[Any, list[Tensor]] = defaultdict(list)  # by place and size; the latest last
        self._taken: dict[int, tuple[Any, Tensor]] = {}  # by address
        self._takes = 0
        self._wanted: dict[int, int] = {}  # by address, when it was taken last
        self._lock = threading.Lock()  # autograd runs the backward of CUDA tensors on a thread of its own

    @property
    def size(self) -> int:
        """Bytes of all buffers, taken and free."""
        with self._lock:
            buffers = [*(b for free in self._free.values() for b in free), *(b for _, b in self._taken.values())]
            return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    def take(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """`[size]` unwritten bytes on a device, or on the host where `device` can reach them by itself."""
        # One stream writes a buffer again only after what it has queued before; another would not wait for that.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        place = (device, pinned, stream, _rounded(size))
        with self._lock:
            free = self._free[place]
            buffer = free.pop() if free else self._made(place)
            self._takes += 1
            self._wanted[_address(buffer)] = self._takes
            self._taken[_address(buffer)] = (place, buffer)
            return buffer.resize_(size)

    def give(self, *tensors: Tensor) -> None:
        """Takes back what `take` returned, once nothing reads or writes it any more. Other tensors are left alone."""
        with self._lock:
            for tensor in tensors:
                place, buffer = self._taken.pop(_address(tensor), (None, None))
                if buffer is not None:
                    self._free[place].append(buffer)

    def _made(self, place: Any) -> Tensor:
        for free in self._free.values():
            free[:] = [buffer for buffer in free if self._wanted[_address(buffer)] + _FORGOTTEN > self._takes]
        self.allocations += 1
        device, pinned, _, room = place
        with torch.inference_mode(False), _disable_current_modes():  # kept, whoever counts or poisons
            return torch.empty(room, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)


def _rounded(size: int) -> int:
    step = max(1 << max(size.bit_length() - 1, 0), 512) // _STEPS
    return -(-max(size, 1) // step) * step


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
