"""`Buffers`: memory for messages, kept from step to step."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_STEPS = 8  # sizes between one power of two and the next, so that ragged batches share buffers


class Buffers:
    """Bytes that a rank sends from and stages in.

    A message lives from its packing to the wait for it, and every layer has some: fresh memory would be paged in, or
    searched for, each time. What autograd keeps is never taken from here.

    Attributes:
        allocations: buffers made so far.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: dict[Any, list[Tensor]] = {}
        self._taken: dict[int, tuple[Any, Tensor]] = {}  # by address
        self._lock = threading.Lock()  # autograd runs the backward of CUDA tensors on a thread of its own

    @property
    def size(self) -> int:
        """Bytes of all buffers, taken and free."""
        with self._lock:
            taken = [buffer for _, buffer in self._taken.values()]
            return sum(_capacity(buffer) for buffers in (*self._free.values(), taken) for buffer in buffers)

    def take(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """`[size]` unwritten bytes on a device, or on the host where `device` can reach them by itself."""
        # One stream writes a buffer again only after what it has queued before; another would not wait for that.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        place = (device, pinned, stream)
        with self._lock:
            free = self._free.setdefault(place, [])
            free.sort(key=_capacity)
            fitting = next((index for index, buffer in enumerate(free) if _capacity(buffer) >= size), None)
            if fitting is None and free:
                free.pop()  # a larger one takes its place
            buffer = self._made(size, device, pinned=pinned) if fitting is None else free.pop(fitting)
            self._taken[buffer.untyped_storage().data_ptr()] = (place, buffer)
            return buffer.resize_(size)

    def give(self, *tensors: Tensor) -> None:
        """Takes back what `take` returned, once nothing reads or writes it any more. Other tensors are left alone."""
        with self._lock:
            for tensor in tensors:
                place, buffer = self._taken.pop(tensor.untyped_storage().data_ptr(), (None, None))
                if buffer is not None:
                    self._free[place].append(buffer)

    def _made(self, size: int, device: torch.device, *, pinned: bool) -> Tensor:
        self.allocations += 1
        step = max(1 << max(size.bit_length() - 1, 0), 512) // _STEPS
        room = -(-max(size, 1) // step) * step
        with torch.inference_mode(False), _disable_current_modes():  # kept, whoever counts or poisons
            return torch.empty(room, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)


def _capacity(buffer: Tensor) -> int:
    return buffer.untyped_storage().nbytes()
