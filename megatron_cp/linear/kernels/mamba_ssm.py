"""mamba_ssm's Triton kernels of the Mamba-2 recurrence on CUDA (package mamba-ssm).

Its operation takes an initial state for the first document of a row only, and returns the final state of the last only.
So chunkwise it is called once for each stretch of rows that ends with a segment that passes a state on, always from a
state of zero. The contribution of the state before a segment, `exp(sum_{i <= t} dt_i A) C_t S`, is added after that
state has arrived. The recurrence is linear in the state, so nothing is computed twice, and backward gets the gradient
of the state before a segment without another recurrence.

The package's states are `[h, dv, dk]`, ours transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.scan import LocalScan
from megatron_cp.layout.packing import IntArray
from megatron_cp.linear.kernels.base import Inputs, LinearCall, RuleKernel, ScanWork, StateSpace
from megatron_cp.linear.kernels.common.installed import package_refusal

OLDEST = (2, 2)  # versions 2.2.4, 2.2.6, 2.3.0 and 2.3.2 have been tested, all in Triton's interpreter


class MambaSsmRule(RuleKernel):
    """`mamba_chunk_scan_combined` of mamba_ssm.

    Chunkwise there is one call for each segment whose document continues elsewhere, and one for the rows after them.
    So it is fast with few segments a rank, as in a contiguous layout, and slow with two of each document, as in zigzag.

    Args:
        chunk_size: tokens that are multiplied as one matrix, a power of 2 from 16; mamba_ssm's layer has 256.
    """

    name = "mamba_ssm"
    package = "mamba-ssm"
    devices = ("cuda",)
    kinds = ("mamba",)

    def __init__(self, chunk_size: int = 256) -> None:
        self.chunk_size = chunk_size

    def refusal(self, call: LinearCall) -> str | None:
        return package_refusal(call, self.package, "mamba", OLDEST, "mamba_ssm.ops.triton.ssd_combined")

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        assert isinstance(inputs, StateSpace)
        key = ("mamba_ssm documents", call.device)
        documents = call.packing.memo(key, lambda: _numbers(call.packing.lengths, call.device))
        return self._scanned(_prepared(inputs, groups, scale), documents)[0]

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        assert isinstance(inputs, StateSpace)
        assert call.segments is not None
        inputs = _prepared(inputs, groups, scale)
        x, dt, A, B, C = inputs  # noqa: N806
        spans, calls = call.segments_table("mamba_ssm calls", lambda: _calls(call))
        outputs, states = [], []
        sizes = [documents.shape[1] for documents in calls]
        for rows, documents in zip(zip(*(t.split(sizes) for t in (x, dt, B, C)), strict=True), calls, strict=True):
            out, state = self._scanned(StateSpace(rows[0], rows[1], A, rows[2], rows[3]), documents)
            outputs.append(out)
            states.append(state)
        leaving = int(call.segments.future.sum())  # each ends a call, and one more call may follow the last
        decays = [(dt[start:end].float() * A.float()).cumsum(0) for start, end in spans]
        passing = call.segments.future[call.segments.past]
        transitions = [decay[-1].exp() for decay, goes_on in zip(decays, passing, strict=True) if goes_on]
        nothing = x.new_zeros(0, len(groups), dtype=torch.float32)
        empty = nothing[..., None, None].expand(-1, -1, B.shape[2], x.shape[2])
        tensors = [
            torch.cat(outputs),
            torch.cat([empty, *states[:leaving]]),
            torch.stack(transitions)[..., None, None] if transitions else nothing[..., None, None],
            torch.cat([C[:0], *(C[start:end] for start, end in spans)]),
            torch.cat([nothing, *decays]),
        ]
        return ScanWork(tensors, _Contributions(spans, call), lambda out: out)

    def _scanned(self, inputs: StateSpace, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs `[T, h, dv]` from states of zero, and the last document's state `[1, h, dk, dv]`."""
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, dt, A, B, C = inputs  # noqa: N806
        out, state = mamba_chunk_scan_combined(
            x[None], dt[None], A, B[None], C[None], self.chunk_size, seq_idx=documents, return_final_states=True
        )
        return out.squeeze(0), state.transpose(2, 3)


class _Contributions(LocalScan):
    """The scan that adds the contributions of the states before segments to outputs computed without them.

    Its tensors are the outputs `[T, h, dv]`, E, M, and for the tokens of segments with a past C `[.., g, dk]` and the
    log decays since the beginning of the segment, `[.., h]`. As in the package, products have C's type and sums are
    float32.

    Args:
        spans: the rows of the segments with a past.
    """

    def __init__(self, spans: list[tuple[int, int]], call: LinearCall) -> None:
        assert call.segments is not None
        self.spans, past, future = spans, call.segments.past, call.segments.future
        # The places of segments with a past and a future among those with a future, and among those with a past.
        self.passing = call.segments_table(
            "mamba_ssm passing",
            lambda: tuple(
                on_device(np.flatnonzero(mask), call.device, torch.int64) for mask in (past[future], future[past])
            ),
        )

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        _, empty, transitions, _, _ = tensors
        return empty, transitions, None

    def meanwhile(self, tensors: Sequence[Tensor], begun: Any) -> Any:
        return tensors[0].clone()

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        out: Tensor = begun
        for (start, end), state, query, decay in zip(self.spans, states, *self._rows(tensors), strict=True):
            out[start:end] += decay.exp()[..., None] * _read(query, state)
        return out, [states]

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        wanted, begun = torch.empty_like(kept[0]), []
        for slot, ((start, end), query, decay) in enumerate(zip(self.spans, *self._rows(tensors), strict=True)):
            decayed = (decay.exp()[..., None] * gradient[start:end]).to(query.dtype)
            grouped = _group_heads(decayed.transpose(0, 1), query.shape[1])
            wanted[slot] = _ungroup_heads(_product(query.permute(1, 2, 0), grouped), wanted.shape[1])
            begun.append(grouped)
        return wanted, begun

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        (before,) = kept
        leaving_places, waiting_places = self.passing
        products = states.index_select(0, leaving_places) * before.index_select(0, waiting_places)
        dqueries, ddecays = [tensors[3][:0]], [tensors[4][:0]]
        rows = zip(self.spans, begun, before, *self._rows(tensors), strict=True)
        for (start, end), grouped, state, query, decay in rows:
            ddecays.append(decay.exp() * (gradient[start:end] * _read(query, state)).sum(-1))
            keys = _group_heads(state, query.shape[1]).to(query.dtype).transpose(1, 2)
            dqueries.append(_product(grouped, keys).transpose(0, 1).to(query.dtype))
        return [gradient, states, products.sum((2, 3), keepdim=True), torch.cat(dqueries), torch.cat(ddecays)]

    def _rows(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns C and the decays of each segment with a past."""
        sizes = [end - start for start, end in self.spans]
        return tensors[3].split(sizes), tensors[4].split(sizes)


def _read(query: Tensor, state: Tensor) -> Tensor:
    """Returns `C_t S`, `[t, h, dv]` in float32, for C `[t, g, dk]` and S `[h, dk, dv]`."""
    keys = _group_heads(state, query.shape[1]).to(query.dtype)
    return _ungroup_heads(_product(query.transpose(0, 1), keys), state.shape[0]).transpose(0, 1)


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """Puts heads that share a key side by side: `[h, n, dv]` becomes `[g, n, h / g * dv]`."""
    return x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)


def _ungroup_heads(x: Tensor, heads: int) -> Tensor:
    """Undoes `_group_heads`."""
    return x.unflatten(2, (heads // x.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Computes a batched product in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _prepared(inputs: StateSpace, groups: list[int], scale: float) -> StateSpace:
    """Scales C, and expands groups unless each is shared by equally many consecutive heads, as the package requires."""
    B, C = inputs.B, inputs.C  # noqa: N806
    heads_per_group, rest = divmod(inputs.x.shape[1], B.shape[1])
    if rest or groups != [head // heads_per_group for head in range(inputs.x.shape[1])]:
        # The gradient of indexing would be a zero-filled copy of all groups for each index; that of unbind is not.
        B, C = (torch.stack([keys[group] for group in groups], 1) for keys in (B.unbind(1), C.unbind(1)))  # noqa: N806
    return inputs._replace(B=B, C=C if scale == 1 else C * scale)


def _numbers(lengths: IntArray, device: torch.device) -> Tensor:
    """Returns `seq_idx`, `[1, T]`; it begins with 0, since the package gives the initial state to document 0."""
    lengths = lengths[lengths > 0]
    return on_device(np.repeat(np.arange(lengths.size), lengths), device)[None]


def _calls(call: LinearCall) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """Returns the rows of the segments with a past, and `seq_idx` of each call.

    A call ends with a segment that passes a state on, or with the last segment.
    """
    assert call.segments is not None
    past, future = call.segments.past, call.segments.future
    starts, lengths = call.packing.cu_seqlens[:-1], call.packing.lengths
    spans = list(zip(starts[past].tolist(), (starts + lengths)[past].tolist(), strict=True))
    calls = np.split(lengths, np.flatnonzero(future) + 1)
    return spans, [_numbers(part, call.device) for part in calls if part.size]
