"""The device's time for a call, and the host's, each by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

_SLEEP = 2_000_000  # cycles at least: about a millisecond
_MOST_SLEEP = 400_000_000
_CYCLES = 3000  # for each microsecond that the host needs: half as much again as it is
_BEYOND_L2 = 256 << 20  # bytes


@dataclass(frozen=True)
class Times:
    """Medians over the repeats.

    Attributes:
        device_us: from the first to the last of what the call queues, while the queue is never empty.
        host_us: until the call returns.
        host_bound: the queue ran empty meanwhile, so that device_us has some of the host's time in it.
    """

    device_us: float
    host_us: float
    host_bound: bool

    def row(self) -> dict[str, Any]:
        """Returns the times as a row of a report."""
        return {name: round(value, 1) for name, value in asdict(self).items()} | {"host_bound": self.host_bound}


def times(call: Callable[[], Any], repeats: int) -> Times:
    """Measures a call that queues work on the current stream without waiting for it.

    Before every repeat the L2 cache is overwritten, and the device sleeps for so long that the host has queued the call
    when it awakes: otherwise a call of 20 us on the device that takes the host 100 us would seem to take 100. A queue
    takes about a thousand launches: of a call that makes more, the host waits for the device to awake, and the time is
    host-bound. The host's time is taken apart, with an empty queue.
    """
    beyond = torch.empty(_BEYOND_L2, dtype=torch.uint8, device="cuda")
    call()
    torch.cuda.synchronize()
    on_device, on_host, late = [], [], False
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        on_host.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    sleep = min(max(int(statistics.median(on_host) * _CYCLES), _SLEEP), _MOST_SLEEP)
    for _ in range(repeats):
        beyond.zero_()
        torch.cuda._sleep(sleep)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        late |= start.query()  # it slept no more when all was queued
        torch.cuda.synchronize()
        on_device.append(start.elapsed_time(end) * 1e3)
    return Times(statistics.median(on_device), statistics.median(on_host), late)
