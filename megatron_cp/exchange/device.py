"""Host tables on a device, without the host waiting for it."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(table: NDArray, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A copy of a host table on `device`.

    Through pinned memory to CUDA, since a copy from pageable memory makes the host wait for the stream.
    """
    with torch.inference_mode(False):  # tables outlive an evaluation, and autograd saves no inference tensor
        host = torch.tensor(table, dtype=dtype)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
