"""flash-linear-attention's Triton kernels on CUDA (package fla-core)."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.layout import Packing
from megatron_cp.linear.kernels.base import GatedDeltaKernel, LinearCall

SERIES = (0, 6)  # what `refusal` reads of fla's inside, no other version promises
MAX_HEAD_DIM = 256


class FlaGatedDelta(GatedDeltaKernel):
    """`causal_conv1d` and `chunk_gated_delta_rule` of flash-linear-attention.

    Strided tensors and any convolution width will do. On CUDA, float32 is multiplied as TF32.
    """

    name = "fla"
    package = "fla-core"
    devices = ("cuda",)

    def refusal(self, call: LinearCall) -> str | None:
        installed = _installed_version()
        if installed != SERIES:
            what = "not installed" if installed is None else "not of version 0.6"
            return f"fla-core is {what}; pip install fla-core==0.6.0 einops"
        if call.device.type != "cuda":
            return f"runs on CUDA, the tensors are on {call.device.type}; use chunked or reference"
        if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"has no {call.dtype}; use chunked or reference"
        if call.head_dim > MAX_HEAD_DIM:
            return f"has key heads of at most {MAX_HEAD_DIM}, not {call.head_dim}; use chunked or reference"
        # Whether or not gradients are wanted now, so that evaluation runs the kernel that training runs.
        if _gradients_are_wrong():
            return (
                "this Triton's gradients are wrong on Hopper (flash-linear-attention issue 640); pip install tilelang, "
                "which needs nvcc, or Triton 3.7.1 or newer, or use chunked"
            )
        return None

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        y, _ = causal_conv1d(x[None], weight, bias, activation="silu", **_documents(call))
        return y.squeeze(0)

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        groups: list[int],
        scale: float,
        call: LinearCall,
    ) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        heads_per_group, rest = divmod(v.shape[1], q.shape[1])
        if rest or groups != [head // heads_per_group for head in range(v.shape[1])]:
            # fla shares key heads evenly only; unbound, because the gradient of indexing is a zero-filled copy of all.
            q, k = (torch.stack([heads[group] for group in groups], 1) for heads in (q.unbind(1), k.unbind(1)))
        out, _ = chunk_gated_delta_rule(q[None], k[None], v[None], g[None], beta[None], scale=scale, **_documents(call))
        return out.squeeze(0)


def _documents(call: LinearCall) -> dict[str, Tensor]:
    """Where documents start and end; on the host too, where fla counts its chunks without waiting for the device."""
    host = torch.device("cpu")
    return {"cu_seqlens": _offsets(call.packing, call.device), "cu_seqlens_cpu": _offsets(call.packing, host)}


def _offsets(packing: Packing, device: torch.device) -> Tensor:
    """`cu_seqlens` without empty documents. Always the same tensor for a packing: fla caches by tensor identity."""
    return packing.table(("fla offsets", device), lambda: on_device(np.unique(packing.cu_seqlens), device))


@cache
def _installed_version() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version(FlaGatedDelta.package).split(".")[:2])
    except PackageNotFoundError:
        return None


def _gradients_are_wrong() -> bool:
    """Whether fla's backward would raise here: its own condition, `chunk_bwd_dqkwg` in fla/ops/common/chunk_o.py."""
    from fla.ops.common.backends import CommonTileLangBackend
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    broken = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    return broken and not CommonTileLangBackend.can_use()
