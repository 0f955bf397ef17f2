"""flash-attn on CUDA: version 2 (package flash-attn) and version 3 (built from its `hopper` folder)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megatron_cp.extras import install, installed_version
from megatron_cp.softmax.kernels.base import AttentionCall
from megatron_cp.softmax.kernels.common.varlen_calls import DeviceSegments
from megatron_cp.softmax.kernels.common.varlen_kernel import SegmentedAttention, common_refusal


class FlashAttention2(SegmentedAttention):
    """flash-attn 2, by the variable-length forward and backward that its public functions wrap."""

    name = "flash_attn"
    package = "flash-attn"

    def refusal(self, call: AttentionCall) -> str | None:
        installed = installed_version(self.package)
        if installed is None or installed[0] != 2:
            what = "not installed" if installed is None else f"of version {installed[0]}, not 2"
            return f"flash-attn is {what}; {install('flash')}"
        return common_refusal(call)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: DeviceSegments, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn_2()._flash_attn_varlen_forward(
            q=q, k=k, v=v, dropout_p=0.0, softmax_scale=call.scale, causal=segments.is_causal, softcap=call.softcap,
            **segments.keywords,
        )  # fmt: skip
        return out, lse

    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: DeviceSegments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_2()._flash_attn_varlen_backward(
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, dropout_p=0.0,
            softmax_scale=call.scale, causal=segments.is_causal, softcap=call.softcap, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **segments.keywords,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttention3(SegmentedAttention):
    """flash-attn 3 on Hopper.

    Its internal functions changed from build to build. Builds whose functions take the window as two arguments are
    supported.
    """

    name = "flash_attn_3"
    package = "flash_attn_interface"

    def refusal(self, call: AttentionCall) -> str | None:
        if find_spec(self.package) is None:
            return "flash-attn 3 is not installed; build it in the folder hopper of flash-attention, or use flash_attn"
        refusal = common_refusal(call)
        if refusal is None and torch.cuda.get_device_capability(call.device) != (9, 0):
            return "flash-attn 3 runs only on Hopper; use flash_attn or varlen"
        if refusal is None and not _windows_are_two_arguments():
            return "this build of flash-attn 3 is too old; build a newer one, or use flash_attn or varlen"
        return refusal

    def head_sizes(self, call: AttentionCall) -> tuple[int, int]:
        """Returns 192 and 128, the sizes of MLA, or equal sizes: the kernel was built for these."""
        if 128 < call.head_dim <= 192 and call.value_head_dim <= 128:
            return 192, 128
        return super().head_sizes(call)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: DeviceSegments, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_attn_3()._flash_attn_forward(
            q, k, v, softmax_scale=call.scale, causal=segments.is_causal, softcap=call.softcap, **segments.keywords
        )
        return out, lse

    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: DeviceSegments,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_3()._flash_attn_backward(
            dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=call.scale, is_causal=segments.is_causal,
            softcap=call.softcap, deterministic=torch.are_deterministic_algorithms_enabled(), **segments.keywords,
        )  # fmt: skip
        return dq, dk, dv


def _flash_attn_2() -> Any:
    return import_module("flash_attn.flash_attn_interface")


def _flash_attn_3() -> Any:
    return import_module("flash_attn_interface")


@cache
def _windows_are_two_arguments() -> bool:
    functions = (_flash_attn_3()._flash_attn_forward, _flash_attn_3()._flash_attn_backward)
    names = [signature(getattr(function, "_init_fn", function)).parameters for function in functions]
    return all("window_size_left" in parameters for parameters in names) and "is_causal" in names[1]
