"""The two functions of flash-attn 4 that its kernel here calls, on the emulated device: its checks, dense attention.

`tests/functional_tests/test_real_packages.py` holds names and defaults to the package's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_cp.torch_private import varlen_operators
from tools.nullgpu.varlen import SOFTCAP


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = False, softcap: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, softcap)
    window = _limits(causal, window_size_left, window_size_right)
    operators = varlen_operators()
    assert operators is not None
    with _capped(softcap):
        out, lse, _ = operators[0](
            q, k, _as_wide(v, q), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window
        )
    return out[..., : v.shape[-1]].contiguous(), lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    deterministic: bool = False,  # noqa: ARG001 - dense attention is deterministic
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, softcap)
    assert out.shape == dout.shape == (*q.shape[:2], v.shape[-1])
    assert lse.shape == (q.shape[1], q.shape[0])
    assert (lse.dtype, out.dtype, dout.dtype) == (torch.float32, q.dtype, q.dtype)
    window = _limits(causal, window_size_left, window_size_right)
    operators = varlen_operators()
    assert operators is not None
    rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
    with _capped(softcap):
        dq, dk, dv = operators[1](
            _as_wide(dout, q), q, k, _as_wide(v, q), _as_wide(out, q), lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, causal, rng, softmax_scale, window,
        )  # fmt: skip
    return dq, dk, dv[..., : v.shape[-1]]


@contextmanager
def _capped(softcap: float | None) -> Iterator[None]:
    token = SOFTCAP.set(softcap or 0.0)
    try:
        yield
    finally:
        SOFTCAP.reset(token)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, softcap: float | None) -> None:
    assert softcap is None or softcap >= 0.0
    assert q.dtype == k.dtype == v.dtype in (torch.float16, torch.bfloat16)
    assert q.is_cuda
    sizes = (q.shape[-1], v.shape[-1])
    if torch.cuda.get_device_capability(q.device)[0] == 10:
        assert max(sizes) <= 128 or sizes == (192, 128), sizes
    else:
        assert sizes[0] == sizes[1] <= 256, sizes  # backward needs it where queries share a key head
    assert all(size % 8 == 0 for size in sizes)
    assert all(x.dtype == torch.int32 and x.stride(0) == 1 for x in (cu_seqlens_q, cu_seqlens_k))


def _limits(causal: bool, left: int | None, right: int | None) -> list[int]:
    """Returns limits as torch's operator has them. Unless both limits are below 0, one below 0 is a number."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    assert all(limit is None or limit >= 0 for limit in (left, right)), "such a limit hides every key of a query"
    return [-1 if limit is None else limit for limit in (left, right)]


def _as_wide(x: Tensor, q: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, q.shape[-1] - x.shape[-1]))
