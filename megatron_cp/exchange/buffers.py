"""`Buffers`: memory for messages, kept from step to step."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron_cp.exchange.traffic import rounded

_SPARE = 2  # times a message's size that its buffer may have, so that ragged batches share buffers
_FORGOTTEN = 2000  # takes after which a buffer that nobody wanted is let go: those of batches that are no more


class Buffers:
    """Bytes that a rank sends from and stages in.

    A message lives from its packing to the wait for it, and every layer has some: fresh memory would be paged in, or
    searched for, each time. What autograd keeps is never taken from here. A message takes a buffer of its own size (in
    steps of an eighth) before a larger one: so it leaves those to whom they were made for, and a step of training that
    is like the one before allocates nothing.

    Attributes:
        allocations: buffers made so far.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._free: defaultdict[Any, list[Tensor]] = defaultdict(list)  # by place
        self._taken: dict[int, tuple[Any, Tensor]] = {}  # by address
        self._takes = 0
        self._wanted: dict[int, int] = {}  # by address, when it was taken last
        self._lock = threading.Lock()  # autograd runs the backward of CUDA tensors on a thread of its own

    @property
    def size(self) -> int:
        """Bytes of all buffers, taken and free."""
        with self._lock:
            buffers = [*(b for free in self._free.values() for b in free), *(b for _, b in self._taken.values())]
            return sum(map(_room, buffers))

    def take(self, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """`[size]` unwritten bytes on a device, or on the host where `device` can reach them by itself."""
        # One stream writes a buffer again only after what it has queued before; another would not wait for that.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        place, room = (device, pinned, stream), rounded(size)
        with self._lock:
            fitting = [b for b in self._free[place] if room <= _room(b) <= _SPARE * room]
            buffer = min(fitting, key=_room) if fitting else self._made(room, device, pinned=pinned)
            self._free[place] = [b for b in self._free[place] if b is not buffer]
            self._takes += 1
            if self._takes % _FORGOTTEN == 0:
                self._forget()
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

    def _forget(self) -> None:
        for free in self._free.values():
            for buffer in list(free):
                if self._wanted[_address(buffer)] + _FORGOTTEN < self._takes:
                    free[:] = [b for b in free if b is not buffer]
                    del self._wanted[_address(buffer)]

    def _made(self, room: int, device: torch.device, *, pinned: bool) -> Tensor:
        self.allocations += 1
        with torch.inference_mode(False), _disable_current_modes():  # kept, whoever counts or poisons
            return torch.empty(room, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)


def _room(buffer: Tensor) -> int:
    return buffer.untyped_storage().nbytes()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
