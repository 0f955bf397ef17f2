"""mamba_ssm's Triton kernels of the Mamba-2 recurrence on CUDA (package mamba-ssm).

Its operation takes a state in for the first document of a row only, and gives out that of the last only. Chunkwise we
call it once up to the end of each segment that leaves a state, always from zero, and add what the state before a
segment contributes when it is there, `exp(sum_{i <= t} dt_i A) C_t S`: the recurrence is linear in the state, so
nothing is computed twice, and backward knows what a segment wants of the state before it without a pass over it.

Its states are `[h, dv, dk]`, ours transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.scan import LocalScan
from megatron_cp.extras import install
from megatron_cp.layout.packing import IntArray
from megatron_cp.linear.kernels.base import Inputs, LinearCall, RuleKernel, ScanWork, StateSpace
from megatron_cp.linear.kernels.common.installed import import_failure, installed_version

OLDEST = (2, 2)  # 2.2.4, 2.2.6, 2.3.0 and 2.3.2 were run, all in Triton's interpreter


class MambaSsmRule(RuleKernel):
    """`mamba_chunk_scan_combined`.

    Chunkwise, with one call for each segment whose document goes on and one for what follows. Few pieces of documents
    a rank are therefore fast, as in a contiguous layout, and two of each document, as in zigzag, are not.

    Args:
        chunk_size: tokens that are multiplied as one matrix, a power of 2 from 16; 256 is the default of its layer.
    """

    name = "mamba_ssm"
    package = "mamba-ssm"
    devices = ("cuda",)
    kinds = ("mamba",)

    def __init__(self, chunk_size: int = 256) -> None:
        self.chunk_size = chunk_size

    def refusal(self, call: LinearCall) -> str | None:
        installed = installed_version(self.package)
        if installed is None or installed < OLDEST:
            what = "not installed" if installed is None else f"older than version {OLDEST[0]}.{OLDEST[1]}"
            return f"mamba-ssm is {what}; {install('mamba')}"
        if call.device.type != "cuda":
            return f"runs on CUDA, the tensors are on {call.device.type}; use chunked or reference"
        if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"has no {call.dtype}; use chunked or reference"
        failure = import_failure("mamba_ssm.ops.triton.ssd_combined")
        return None if failure is None else f"mamba-ssm cannot be imported ({failure}); {install('mamba')}"

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
        leaving = int(call.segments.future.sum())  # each ends a call, and after the last one there may be another
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
        """Documents from zero: outputs `[T, h, dv]` and the state after the last document, `[1, h, dk, dv]`."""
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, dt, A, B, C = inputs  # noqa: N806
        out, state = mamba_chunk_scan_combined(
            x[None], dt[None], A, B[None], C[None], self.chunk_size, seq_idx=documents, return_final_states=True
        )
        return out.squeeze(0), state.transpose(2, 3)


class _Contributions(LocalScan):
    """What the states before segments contribute to outputs that were computed without them.

    Of the outputs `[T, h, dv]`, E, M, and of the waiting segments' tokens C `[.., g, dk]` and the decays since the
    beginning of the segment, in logarithms, `[.., h]`. Products are of C's type, as in the package, sums of float32.

    Args:
        spans: the rows of the waiting segments.
        call: whose segments.
    """

    def __init__(self, spans: list[tuple[int, int]], call: LinearCall) -> None:
        assert call.segments is not None
        self.spans, past, future = spans, call.segments.past, call.segments.future
        # Those with a past and a future, among those with a future and among those with a past.
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
            by_group = _by_group(decayed.transpose(0, 1), query.shape[1])
            wanted[slot] = _by_head(_product(query.permute(1, 2, 0), by_group), wanted.shape[1])
            begun.append(by_group)
        return wanted, begun

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        (before,) = kept
        among_leaving, among_waiting = self.passing
        products = states.index_select(0, among_leaving) * before.index_select(0, among_waiting)
        dqueries, ddecays = [tensors[3][:0]], [tensors[4][:0]]
        rows = zip(self.spans, begun, before, *self._rows(tensors), strict=True)
        for (start, end), by_group, state, query, decay in rows:
            ddecays.append(decay.exp() * (gradient[start:end] * _read(query, state)).sum(-1))
            keys = _by_group(state, query.shape[1]).to(query.dtype).transpose(1, 2)
            dqueries.append(_product(by_group, keys).transpose(0, 1).to(query.dtype))
        return [gradient, states, products.sum((2, 3), keepdim=True), torch.cat(dqueries), torch.cat(ddecays)]

    def _rows(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """C and the decays of each waiting segment."""
        sizes = [end - start for start, end in self.spans]
        return tensors[3].split(sizes), tensors[4].split(sizes)


def _read(query: Tensor, state: Tensor) -> Tensor:
    """`C_t S`, `[t, h, dv]` in float32, by C `[t, g, dk]` and S `[h, dk, dv]`."""
    keys = _by_group(state, query.shape[1]).to(query.dtype)
    return _by_head(_product(query.transpose(0, 1), keys), state.shape[0]).transpose(0, 1)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`[h, n, dv]` to `[g, n, h / g * dv]`: heads that share a key, side by side."""
    return x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """The way back."""
    return x.unflatten(2, (heads // x.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _prepared(inputs: StateSpace, groups: list[int], scale: float) -> StateSpace:
    """The inputs with groups that the package can share, each read by equally many consecutive heads, and scaled C."""
    B, C = inputs.B, inputs.C  # noqa: N806
    heads_per_group, rest = divmod(inputs.x.shape[1], B.shape[1])
    if rest or groups != [head // heads_per_group for head in range(inputs.x.shape[1])]:
        # Unbound, because the gradient of indexing is a zero-filled copy of all.
        B, C = (torch.stack([keys[group] for group in groups], 1) for keys in (B.unbind(1), C.unbind(1)))  # noqa: N806
    return inputs._replace(B=B, C=C if scale == 1 else C * scale)


def _numbers(lengths: IntArray, device: torch.device) -> Tensor:
    """`seq_idx` `[1, T]`, from 0: with states, the package takes the first document of a row to be number 0."""
    lengths = lengths[lengths > 0]
    return on_device(np.repeat(np.arange(lengths.size), lengths), device)[None]


def _calls(call: LinearCall) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The rows of the waiting segments, and for each call, up to the end of each that leaves a state, `seq_idx`."""
    assert call.segments is not None
    past, future = call.segments.past, call.segments.future
    starts, lengths = call.packing.cu_seqlens[:-1], call.packing.lengths
    spans = list(zip(starts[past].tolist(), (starts + lengths)[past].tolist(), strict=True))
    calls = np.split(lengths, np.flatnonzero(future) + 1)
    return spans, [_numbers(part, call.device) for part in calls if part.size]
