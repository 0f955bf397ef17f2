"""flash-linear-attention's Triton kernels on CUDA (package fla-core).

Headwise it calls the public operations, chunkwise the internal functions that these are made of (`fla_scan`).

Shapes: fla has a leading axis of 1, `[1, T, h, d]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.layout import Packing
from megatron_cp.linear.kernels.base import ConvKernel, Delta, Inputs, LinearCall, RuleKernel, ScanWork
from megatron_cp.linear.kernels.common.fla_scan import CHUNK, Gdn2Scan, GdnScan, KdaScan, conv_states, documents
from megatron_cp.linear.kernels.common.installed import package_refusal
from megatron_cp.plan.kinds import GDN, GDN2

SERIES = (0, 6)  # other versions may have other internal functions
MAX_HEAD_DIM = 256


class FlaRule(RuleKernel):
    """`chunk_gated_delta_rule`, `chunk_kda` and `chunk_gdn2` of fla, and for segments their internal functions.

    Tensors may be strided. On CUDA, float32 is multiplied as TF32. With heads of 128 features, a rank whose segments
    all receive and pass on a state computes a third more multiplications than a rank with whole documents.
    """

    name = "fla"
    package = "fla-core"
    devices = ("cuda",)
    kinds = ("gdn", "kda", "gdn2")
    serves_graphs = True

    def refusal(self, call: LinearCall) -> str | None:
        reason = _unusable(call)
        if reason is not None:
            return reason
        if call.head_dim > MAX_HEAD_DIM:
            return f"has key heads of at most {MAX_HEAD_DIM}, not {call.head_dim}; use chunked or reference"
        if call.kind == GDN2.name and call.for_graphs:
            return "counts the chunks of gdn2 on the host, which a CUDA graph cannot; use chunked"
        if call.streams:
            return "starts a state for each document on the host, which a CUDA graph of chunkwise cannot; use chunked"
        # It is refused without gradients too, so that evaluation runs the kernel of training. KDA has a backward of its
        # own without the fault.
        if call.kind == GDN.name and _gradients_are_wrong():
            return (
                "this Triton's gradients are wrong on Hopper (flash-linear-attention issue 640); pip install tilelang, "
                "which needs nvcc, or Triton 3.7.1 or newer, or use chunked"
            )
        return None

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        assert isinstance(inputs, Delta)
        if call.kind == GDN2.name:
            return _gdn2(inputs, groups, scale, call)
        operation = chunk_gated_delta_rule if inputs.g.ndim == 2 else chunk_kda
        q, k, v, g, beta = (x[None] for x in _evenly_grouped(inputs, groups))
        given = documents(call) if call.tables is None else _fixed(call, call.tables["documents"])
        out, _ = operation(q, k, v, g, beta, scale=scale, **given)
        return out.squeeze(0)

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        assert isinstance(inputs, Delta)
        # The internal functions, unlike the operations, require contiguous tensors.
        grouped = _expanded(inputs, groups) if call.kind == GDN2.name else _evenly_grouped(inputs, groups)
        tensors = [x.contiguous() for x in grouped]
        scans: dict[str, type[GdnScan | KdaScan]] = {"gdn": GdnScan, "kda": KdaScan, "gdn2": Gdn2Scan}
        local = scans[call.kind](scale, call)
        return ScanWork(tensors, local, lambda out: out)


def _gdn2(inputs: Delta, groups: list[int], scale: float, call: LinearCall) -> Tensor:
    from fla.ops.gdn2 import chunk_gdn2

    q, k, v, g, beta = (x[None] for x in _expanded(inputs, groups))
    # fla multiplies values by a write gate, which has been done.
    out, _ = chunk_gdn2(q, k, v, g, beta, torch.ones_like(v), scale=scale, **documents(call))
    return out.squeeze(0)


class FlaConv(ConvKernel):
    """`causal_conv1d` of flash-linear-attention, in Triton. It supports strided tensors and any width."""

    name = "fla"
    package = "fla-core"
    devices = ("cuda",)

    def refusal(self, call: LinearCall) -> str | None:
        return _unusable(call)

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, *, silu: bool,
        history: Callable[[], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        from fla.modules.causal_conv1d import causal_conv1d

        states = None
        if history is not None:
            before = history()
            if before.numel():
                states = conv_states(before, call)
            else:  # no segment has a past here, but other ranks wait in backward for the gradient of the history
                weight = weight + before.sum().to(weight.dtype)
        activation = "silu" if silu else None
        y, _ = causal_conv1d(x[None], weight, bias, initial_state=states, activation=activation, **documents(call))
        return y.squeeze(0)


def fixed_documents(packing: Packing) -> dict[str, NDArray]:
    """Returns tables of documents and their chunks, whose shapes depend on the numbers of tokens and documents only.

    The last document has no tokens. Chunks that a packing does not have belong to it, and read and write nothing.
    """
    counts = -(-packing.lengths // CHUNK)
    document = np.repeat(np.arange(packing.num_documents), counts)
    place = np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks = np.zeros((packing.total // CHUNK + packing.num_documents, 2), dtype=np.int32)
    chunks[:, 0] = packing.num_documents
    chunks[: document.size] = np.stack([document, place], 1)
    return {"offsets": np.append(packing.cu_seqlens, packing.total).astype(np.int32), "chunks": chunks}


def _fixed(call: LinearCall, tables: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the arguments of `documents` for a CUDA graph."""
    # fla caches its tables by the identity of a tensor, which may hold another pack's offsets here, so that every call
    # passes another view.
    offsets = tables["offsets"][:]
    if call.kind == GDN.name:
        return {"cu_seqlens": offsets, "chunk_indices": tables["chunks"]}
    return {"cu_seqlens": offsets, "use_graph": True}  # fla makes the chunks on the device


def _unusable(call: LinearCall) -> str | None:
    modules = "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.gdn2"
    return package_refusal(call, FlaRule.package, "fla", SERIES, *modules, only=True)


def _evenly_grouped(inputs: Delta, groups: list[int]) -> Delta:
    """Expands the key heads unless each is shared by equally many consecutive heads, as fla requires."""
    heads_per_group, rest = divmod(inputs.v.shape[1], inputs.q.shape[1])
    if not rest and groups == [head // heads_per_group for head in range(inputs.v.shape[1])]:
        return inputs
    return _expanded(inputs, groups)


def _expanded(inputs: Delta, groups: list[int]) -> Delta:
    """Expands the key heads to the heads that share them."""
    if groups == list(range(inputs.q.shape[1])):
        return inputs
    # The gradient of indexing would be a zero-filled copy of all heads for each index; that of unbind is not.
    q, k = (torch.stack([heads[group] for group in groups], 1) for heads in (inputs.q.unbind(1), inputs.k.unbind(1)))
    return inputs._replace(q=q, k=k)


def _gradients_are_wrong() -> bool:
    """True if fla's backward would raise, by its own condition in `chunk_bwd_dqkwg` of fla/ops/common/chunk_o.py."""
    from fla.ops.common.backends import CommonTileLangBackend
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    broken = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    return broken and not CommonTileLangBackend.can_use()
