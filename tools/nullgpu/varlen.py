"""`torch.nn.attention.varlen` on the emulated device: torch's own checks of arguments, and dense attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

SOFTCAP: ContextVar[float] = ContextVar("softcap", default=0.0)  # flash-attn 4 takes one, torch's operators do not


def run(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs the operator forward or backward, into memory that torch has allocated."""
    from tools.nullgpu.emulation import on_host

    results = func(*args, **kwargs)
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    at = {key: on_host(value) if isinstance(value, Tensor) else value for key, value in given.items()}
    how = (at["is_causal"], at.get("scale"), at.get("window_size") or [-1, -1])
    if name == "_varlen_attn":
        out, lse = (on_host(result) for result in results[:2])
        for queries, keys, seen, ratio, scale in _documents(at, *how):
            scores = _scores(at["query"][queries], at["key"][keys], ratio, scale, seen)
            norms = scores.logsumexp(-1)
            weights = (scores - norms[..., None]).exp().nan_to_num(0.0)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, _spread(at["value"][keys], ratio)).to(out.dtype)
            lse[:, queries] = torch.where(norms == -math.inf, math.inf, norms)  # as flash-attention has it
        return results
    dq, dk, dv = (on_host(result).zero_() for result in results)
    for queries, keys, seen, ratio, scale in _documents(at, *how):
        scores = _scores(at["query"][queries], at["key"][keys], ratio, scale, seen)
        weights = (scores - at["lse"][:, queries, None]).exp().masked_fill(~seen, 0.0)
        dout, out = at["grad_out"][queries].float(), at["out"][queries].float()
        dweights = torch.einsum("qhd,khd->hqk", dout, _spread(at["value"][keys], ratio))
        dscores = weights * (dweights - (dout * out).sum(-1).T[..., None]) * scale
        if cap := SOFTCAP.get():
            dscores *= 1.0 - (scores.masked_fill(~seen, 0.0) / cap) ** 2
        dq[queries] = torch.einsum("hqk,khd->qhd", dscores, _spread(at["key"][keys], ratio)).to(dq.dtype)
        for target, left, right in ((dk, dscores, at["query"][queries].float()), (dv, weights, dout)):
            of_heads = torch.einsum("hqk,qhd->khd", left, right)
            target[keys] = of_heads.unflatten(1, (-1, ratio)).sum(2).to(target.dtype)
    return results


_numbers = Tensor.tolist  # as it is now: whoever counts waits of the host from later on counts none of ours


def _documents(
    at: dict[str, Any], is_causal: bool, scale: float | None, window: list[int]
) -> Iterator[tuple[slice, slice, Tensor, int, float]]:
    """Rows of queries and keys of each document, and which of them meet."""
    left, right = window
    ends = (itertools.pairwise(_numbers(at[name])) for name in ("cu_seq_q", "cu_seq_k"))
    for (q0, q1), (k0, k1) in zip(*ends, strict=True):
        behind = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        seen = torch.ones(behind.shape, dtype=torch.bool)
        if left >= 0:
            seen &= behind <= left
        if is_causal or right >= 0:
            seen &= behind >= -(0 if is_causal else right)
        ratio = at["query"].shape[1] // at["key"].shape[1]
        yield slice(q0, q1), slice(k0, k1), seen, ratio, at["query"].shape[2] ** -0.5 if scale is None else scale


def _scores(q: Tensor, k: Tensor, ratio: int, scale: float, seen: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.float(), _spread(k, ratio)) * scale
    cap = SOFTCAP.get()
    return (cap * (scores / cap).tanh() if cap else scores).masked_fill(~seen, -math.inf)


def _spread(x: Tensor, ratio: int) -> Tensor:
    """Repeats key heads for the query heads that read them."""
    return x.float().repeat_interleave(ratio, 1)
