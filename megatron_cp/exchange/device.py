"""Host tables on a device, without the host waiting for it."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.errors import ArgumentError


def on_device(table: NDArray, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A copy of a host table on `device`.

    Through pinned memory to CUDA, since a copy from pageable memory makes the host wait for the stream.

    Raises:
        ArgumentError: the table counts beyond what its type on the device holds.
    """
    if dtype == torch.int32 and table.size and not -(2**31) <= int(table.min()) <= int(table.max()) < 2**31:
        largest = max(int(table.max()), -int(table.min()))
        remedy = "Tables on a device count in 32 bits: use smaller packs."
        raise ArgumentError("packing", f"one whose tables count to {largest}", "fewer than 2**31 tokens", remedy)
    with torch.inference_mode(False):  # tables outlive an evaluation, and autograd saves no inference tensor
        host = torch.tensor(table, dtype=dtype)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
