"""flash-attn 4 on Hopper and Blackwell: the package flash-attn-4, which compiles a kernel before its first run."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_cp.extras import import_failure, install, installed_version
from megatron_cp.softmax.kernels.base import AttentionCall
from megatron_cp.softmax.kernels.common.varlen_calls import DeviceSegments
from megatron_cp.softmax.kernels.common.varlen_kernel import SegmentedAttention, common_refusal

_MODULE = "flash_attn.cute.interface"
_EXPECTED = {
    "_flash_attn_fwd": ("cu_seqlens_q", "max_seqlen_q", "window_size_left", "softcap", "return_lse"),
    "_flash_attn_bwd": ("cu_seqlens_q", "max_seqlen_q", "window_size_left", "softcap", "deterministic"),
}


class FlashAttention4(SegmentedAttention):
    """flash-attn 4, by the forward and backward that its public functions wrap.

    torch's `activate_flash_attention_impl("FA4")` reaches the same functions, but not for these calls: torch 2.11
    unpacks two results where flash-attn-4 4.0.0b36 returns five, its backward refuses windows, and it passes -1 for no
    limit, which next to a limit on the other side flash-attn 4 takes as a number.
    """

    name = "flash_attn_4"
    package = "flash-attn-4"
    serves_graphs = False  # nobody has seen it captured

    def refusal(self, call: AttentionCall) -> str | None:
        if installed_version(self.package) is None:
            return f"flash-attn 4 is not installed; {install('flash4')}"
        refusal = common_refusal(call)
        if refusal is not None:
            return refusal
        generation = _generation(call.device)
        if generation not in (9, 10):
            return f"runs on compute capability 9 and 10 (Hopper, B200), not on {generation}; use varlen or flash_attn"
        if generation == 10 and self.head_sizes(call) == (256, 256):  # whose backward has neither windows nor a cap
            sizes = f"{call.head_dim} and {call.value_head_dim}"
            return f"has heads of at most 128 features here, or of 192 and 128, not of {sizes}; use flash_attn or flex"
        failure = import_failure(_MODULE)
        if failure is not None:
            return f"cannot be imported: {failure}; use varlen or flash_attn"
        lacking = _lacking(import_module(_MODULE))
        return f"is of a version without {', '.join(lacking)}; {install('flash4')}" if lacking else None

    def head_sizes(self, call: AttentionCall) -> tuple[int, int]:
        """Returns equal sizes; on Blackwell of at most 128 features, or 192 and 128, which are those of MLA, or 256."""
        size, _ = super().head_sizes(call)
        if size <= 128 or _generation(call.device) != 10:
            return size, size  # Hopper's backward has no others for queries that share a key head
        return (192, 128) if call.head_dim <= 192 and call.value_head_dim <= 128 else (256, 256)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: DeviceSegments, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _function("_flash_attn_fwd")(
            q, k, v, softmax_scale=call.scale, softcap=call.softcap, return_lse=True, **_keywords(segments)
        )
        return out, lse

    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: DeviceSegments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = _function("_flash_attn_bwd")(
            q, k, v, out, dout, lse, softmax_scale=call.scale, softcap=call.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_keywords(segments),
        )  # fmt: skip
        return dq, dk, dv


def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _keywords(segments: DeviceSegments) -> dict[str, Any]:
    left, right = (None if limit < 0 else limit for limit in segments.window)
    return {**segments.keywords, "window_size_left": left, "window_size_right": right}


def _function(name: str) -> Any:
    return getattr(import_module(_MODULE), name)


@cache
def _lacking(module: ModuleType) -> list[str]:
    functions = {name: getattr(module, name, None) for name in _EXPECTED}
    return [
        f"{name}({argument}=)"
        for name, function in functions.items()
        for argument in _EXPECTED[name]
        if function is None or argument not in signature(function).parameters
    ]
