"""The order of transfers and of what touches their memory: checked, since here everything happens at once.

From its start until the current stream has waited for it, a transfer's memory may be neither written, nor, where it
arrives, read; nor may it be acquired, or released, for something else. A transfer is a stream of its own in `clocks`,
which comes after the stream that starts it, and before those that have waited for it. What breaks this is an
`OrderError`, in the operator that does it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as gpu_trace
from torch.utils._pytree import tree_leaves

from megatron_cp.exchange.buffers import Buffers
from tools.nullgpu.clocks import Clocks


class Watch(Clocks):
    """The order of all accesses of a process, and its transfers."""

    def __init__(self) -> None:
        super().__init__()
        self._transfers = itertools.count(-1, -1)  # no stream of CUDA has a number below 0

    def start(self, name: str, sent: Tensor, received: Tensor) -> int:
        """Starts a transfer; earlier transfers with the same memory must have been waited for. Returns its stream."""
        transfer = next(self._transfers)
        self.acquire(transfer, self.release(stream()))
        self.access(name, [span(sent)], writes=False, stream=transfer)
        self.access(name, [span(received)], writes=True, stream=transfer)
        return transfer

    def wait(self, transfer: int) -> None:
        """Makes the current stream wait for a transfer."""
        self.acquire(stream(), self.release(transfer))


active: Watch | None = None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Checks every operator, kernel and buffer of the process within it."""
    global active
    watch = Watch()
    acquire, release = Buffers.acquire, Buffers.release

    def acquired(self: Buffers, size: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        found = acquire(self, size, device, pinned=pinned)
        watch.check_transfers("a buffer's acquisition", span(found), stream())
        return found

    def released(self: Buffers, *tensors: Tensor) -> None:
        for tensor in tensors:
            watch.check_transfers("a buffer's release", span(tensor), stream())
        release(self, *tensors)

    hooks = ((gpu_trace.EventRecordCallbacks, watch.record), (gpu_trace.EventWaitCallbacks, watch.wait_event))
    torch._C._activate_gpu_trace()
    for registry, hook in hooks:
        registry.add_callback(hook)
    active = watch
    try:
        with patch.object(Buffers, "acquire", acquired), patch.object(Buffers, "release", released):
            yield
    finally:
        active = None
        for registry, hook in hooks:
            registry.callback_list.remove(hook)


def check_operator(func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
    """Checks an operator's tensors before it runs."""
    assert active is not None
    targets = _of_device(written)
    sources = [source for source in _of_device((args, kwargs)) if not any(source is target for target in targets)]
    for tensors, writes in ((sources, False), (targets, True)):
        active.access(str(func), map(span, tensors), writes=writes, stream=stream())


def _of_device(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_cuda]


def span(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses from a tensor's first byte to its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def stream() -> int:
    """Returns the current one."""
    return torch.cuda.current_stream().cuda_stream
