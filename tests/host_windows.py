"""Windows of symmetric memory on the host, for ranks that are threads: all but the streams."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.groups.base import Done
from megatron_cp.executor.transports.symmetric_memory import DeviceWindow
from tools.nullgpu.symmetric import Handle, Memory


class HostWindow(DeviceWindow):
    """A window whose work is done at once, on this thread."""

    def _new_stream(self):
        return None

    def queue(self, work, tensors):
        work()
        return Done()


def host_windows(slot: int) -> Callable[[RankGroup], DeviceWindow]:
    """Returns a function in place of `window_of` whose windows have slots of so many bytes for each rank."""
    memories: dict[int, Memory] = {}
    known: WeakKeyDictionary[Buffers, DeviceWindow] = WeakKeyDictionary()

    def window_of(group: RankGroup) -> DeviceWindow:
        if group.buffers not in known:
            memory = Memory(group.size)
            memories[id(memory)] = memory  # kept, so that no later one has this number
            first = group.all_gather_object(id(memory))[0]
            buffer = torch.empty(2 * slot * group.size, dtype=torch.uint8)
            known[group.buffers] = HostWindow(Handle(memories[first], group.rank, buffer), torch.device("cpu"))
        return known[group.buffers]

    return window_of
