"""The rules over segments by the pieces of flash-linear-attention's kernels, and where it is told that those lie.

A segment's map costs less by the pieces: E and M are passes over the states alone, without outputs, and only over the
segments that leave one.

Shapes: fla has a leading axis of 1, `[1, T, h, d]`; `n` pieces of documents, in chunks of `CHUNK` tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.scan import LocalScan
from megatron_cp.layout import Packing
from megatron_cp.layout.segments import BoolArray
from megatron_cp.linear.kernels.base import LinearCall

CHUNK = 64  # tokens; fla's default for all that is called here


# -- where pieces of documents start and end -------------------------------------------------------------------------


def documents(call: LinearCall) -> dict[str, Tensor]:
    """As fla's operations ask; on the host too, where they count chunks without waiting for the device."""
    host = torch.device("cpu")
    return {"cu_seqlens": _offsets(call.packing, call.device), "cu_seqlens_cpu": _offsets(call.packing, host)}


def _offsets(packing: Packing, device: torch.device) -> Tensor:
    """`cu_seqlens` without empty documents. Always the same tensor for a packing: fla caches by tensor identity."""
    return packing.memo(("fla offsets", device), lambda: on_device(np.unique(packing.cu_seqlens), device))


@dataclass(frozen=True)
class _Pieces:
    """Some of a rank's segments laid end to end, in the order of the rows, as fla's pieces of operations ask.

    Attributes:
        count: n.
        places: `[n]` which of the segments they are.
        runs: the ranges of rows to lay end to end.
        tables: `cu_seqlens` `[n + 1]`, and `chunk_indices` `[chunks, 2]`: of which of these each chunk is which chunk.
        chunk_offsets: `[n + 1]` chunks before each.
    """

    count: int
    places: Tensor
    runs: list[tuple[int, int]]
    tables: dict[str, Tensor]
    chunk_offsets: Tensor

    @property
    def state_tables(self) -> dict[str, Tensor]:
        """What passes over states ask for."""
        return {**self.tables, "chunk_offsets": self.chunk_offsets}

    def rows(self, x: Tensor) -> Tensor:
        """`[1, T, ...]` to `[1, tokens of these, ...]`, without a copy if they are neighbours."""
        parts = [x[:, start:end] for start, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def spread(self, states: Tensor, count: int) -> Tensor | None:
        """States `[n, ...]` of these to `[count, ...]` of all segments, zero for others; None for none."""
        if len(states) in (0, count):
            return states if len(states) else None
        return states.new_zeros(count, *states.shape[1:]).index_copy_(0, self.places, states)


def _pieces(call: LinearCall, chosen: BoolArray) -> _Pieces:
    key = ("fla pieces", chosen.tobytes())
    return call.segments_table(key, lambda: _make_pieces(call, np.flatnonzero(chosen)))


def _make_pieces(call: LinearCall, numbers: np.ndarray) -> _Pieces:
    starts, lengths = call.packing.cu_seqlens[numbers], call.packing.lengths[numbers]
    chunks = -(-lengths // CHUNK)
    segment = np.repeat(np.arange(numbers.size), chunks)
    chunk_offsets = np.append(0, np.cumsum(chunks))
    runs: list[tuple[int, int]] = []
    for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    tables = {
        "cu_seqlens": np.append(0, np.cumsum(lengths)),
        "chunk_indices": np.stack([segment, np.arange(segment.size) - chunk_offsets[segment]], 1),
    }
    return _Pieces(
        numbers.size,
        on_device(numbers, call.device, torch.int64),
        runs,
        {name: on_device(table, call.device) for name, table in tables.items()},
        on_device(chunk_offsets, call.device),
    )


def conv_states(history: Tensor, call: LinearCall) -> Tensor:
    """`[n, width - 1, c]` of the waiting segments as fla's cache of all pieces, `[N, c, width]`.

    The cache ends with the inputs before a piece, and the first of its places is never read.
    """
    assert call.segments is not None
    states = torch.nn.functional.pad(history.transpose(1, 2), (1, 0))
    past = call.segments.past
    if past.all():
        return states
    places = call.segments_table("fla waiting", lambda: on_device(np.flatnonzero(past), call.device, torch.int64))
    return states.new_zeros(past.size, *states.shape[1:]).index_copy(0, places, states)


# -- the rules in pieces ---------------------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """What is made of each chunk by itself, after which a rule is a recurrence over chunks.

    `S' = decay S + k^T (u - w S)`, and outputs are linear in q and S.

    Attributes:
        q, k: `[1, T, h or g, dk]`; q in backward only.
        w, u: `[1, T, h, dk]` and `[1, T, h, dv]`
        decay: summed within chunks, by fla's name: `g` `[1, T, h]` or `gk` `[1, T, h, dk]`.
        kept: the decay and the matrices of chunks, of which backward makes the rest again.
    """

    q: Tensor | None
    k: Tensor
    w: Tensor
    u: Tensor
    decay: dict[str, Tensor]
    kept: list[Tensor]


class _Backward(NamedTuple):
    """What backward has computed when it learns the gradients of the states."""

    chunks: _Chunks
    do: Tensor
    h: Tensor
    v_new: Tensor
    dv: Tensor
    dmatrix: Tensor | None


class DeltaScan(LocalScan):
    """The recurrence over chunks of both rules; what is within chunks, each has of its own.

    A segment's E is the state that a pass from zero ends with; its M is the same of the unit matrix without values.
    As in fla itself, w and u are computed again in backward.
    """

    def __init__(self, scale: float, call: LinearCall) -> None:
        assert call.segments is not None
        past, future = call.segments.past, call.segments.future
        self.scale = scale
        self.all = _pieces(call, np.ones_like(past))
        self.waiting, self.leaving = _pieces(call, past), _pieces(call, future)
        self.passing = _pieces(call, past & future)

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        chunks = self._within(tensors)
        heads, dk = chunks.w.shape[2:]
        unit = torch.eye(dk, device=chunks.w.device).repeat(self.passing.count, heads, 1, 1)
        silent = chunks._replace(u=torch.zeros_like(chunks.w) if self.passing.count else chunks.w)
        return self._after(self.leaving, chunks, None), self._after(self.passing, silent, unit), chunks

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        h, v_new = self._states(begun, states)
        return self._outputs(tensors, begun, h, v_new).squeeze(0), [*begun.kept, states]

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

        *kept, states = kept
        chunks = self._within_again(tensors, kept)
        do = gradient.contiguous()[None]
        h, v_new = self._states(chunks, states)
        dv, dmatrix = self._gradient_within(tensors, chunks, do, v_new)
        begun = _Backward(chunks, do, h, v_new, dv, dmatrix)
        wanted = torch.empty_like(states)
        if self.waiting.count:
            _, wanted, _ = chunk_gated_delta_rule_bwd_dhu(
                **self._backward_arguments(self.waiting, begun), h0=wanted, **self.waiting.state_tables
            )
        return wanted, begun

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

        after = self.leaving.spread(states, self.all.count)
        dh, _, dv = chunk_gated_delta_rule_bwd_dhu(
            **self._backward_arguments(self.all, begun), dht=after, **self.all.state_tables
        )
        found = self._gradients(tensors, begun, dh, dv)
        return [gradient.squeeze(0).to(x.dtype) for gradient, x in zip(found, tensors, strict=True)]

    def _after(self, pieces: _Pieces, chunks: _Chunks, states: Tensor | None) -> Tensor:
        """The states `[n, h, dk, dv]` after some segments, from `states` or zero; dv that of u."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        heads, dk, dv = chunks.w.shape[2], chunks.w.shape[3], chunks.u.shape[3]
        if not pieces.count:
            return chunks.w.new_empty(0, heads, dk, dv, dtype=torch.float32)
        k, w, u = (pieces.rows(x) for x in (chunks.k, chunks.w, chunks.u))
        decay = {name: pieces.rows(x) for name, x in chunks.decay.items()}
        after: Tensor = chunk_gated_delta_rule_fwd_h(
            k=k,
            w=w,
            u=u,
            **decay,
            initial_state=states,
            output_final_state=True,
            save_new_value=False,
            **pieces.state_tables,
        )[2]
        return after

    def _states(self, chunks: _Chunks, states: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk, `[1, chunks, h, dk, dv]`, and `u - w S`; `states` of the waiting segments."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        before = self.waiting.spread(states, self.all.count)
        h, v_new, _ = chunk_gated_delta_rule_fwd_h(
            k=chunks.k, w=chunks.w, u=chunks.u, **chunks.decay, initial_state=before, **self.all.state_tables
        )
        return h, v_new

    def _backward_arguments(self, pieces: _Pieces, begun: _Backward) -> dict[str, Any]:
        chunks = begun.chunks
        assert chunks.q is not None
        rows = {"q": chunks.q, "k": chunks.k, "w": chunks.w, "do": begun.do, "dv": begun.dv, **chunks.decay}
        return {"scale": self.scale, **{name: pieces.rows(x) for name, x in rows.items()}}

    @abstractmethod
    def _within(self, tensors: Sequence[Tensor]) -> _Chunks:
        """Forward, within chunks."""

    @abstractmethod
    def _within_again(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _Chunks:
        """The same in backward, of what was kept."""

    @abstractmethod
    def _outputs(self, tensors: Sequence[Tensor], chunks: _Chunks, h: Tensor, v_new: Tensor) -> Tensor:
        """`[1, T, h, dv]`"""

    @abstractmethod
    def _gradient_within(
        self, tensors: Sequence[Tensor], chunks: _Chunks, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Of v_new by the outputs of its chunk alone, and of the chunks' matrices if they were kept."""

    @abstractmethod
    def _gradients(self, tensors: Sequence[Tensor], begun: _Backward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        """Of the inputs, by the gradients of the states after each chunk and of v_new."""

    def _summed_gradient(self, dg: Tensor) -> Tensor:
        """The gradient of decays by that of their sums."""
        from fla.ops.utils import chunk_local_cumsum

        summed: Tensor = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **self.all.tables)
        return summed


class GdnScan(DeltaScan):
    """Gated DeltaNet: one decay a head."""

    def _within(self, tensors: Sequence[Tensor]) -> _Chunks:
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        _, k, v, g, beta = (x[None] for x in tensors)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.all.tables)
        w, u, matrix = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **self.all.tables)
        return _Chunks(None, k, w, u, {"g": g}, [g, matrix])

    def _within_again(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _Chunks:
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        q, k, v, _, beta = (x[None] for x in tensors)
        g, matrix = kept
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=matrix, g=g, **self.all.tables)
        return _Chunks(q, k, w, u, {"g": g}, kept)

    def _outputs(self, tensors: Sequence[Tensor], chunks: _Chunks, h: Tensor, v_new: Tensor) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        out: Tensor = chunk_fwd_o(
            q=tensors[0][None], k=chunks.k, v=v_new, h=h, g=chunks.decay["g"], scale=self.scale, **self.all.tables
        )
        return out

    def _gradient_within(
        self, tensors: Sequence[Tensor], chunks: _Chunks, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local

        g = chunks.decay["g"]
        dv = chunk_bwd_dv_local(q=chunks.q, k=chunks.k, g=g, do=do, scale=self.scale, **self.all.tables)
        return dv, None

    def _gradients(self, tensors: Sequence[Tensor], begun: _Backward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd

        chunks, tables = begun.chunks, self.all.tables
        g, matrix = chunks.kept
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=chunks.q,
            k=chunks.k,
            v=begun.v_new,
            w=chunks.w,
            g=g,
            h=begun.h,
            dv=dv,
            do=begun.do,
            dh=dh,
            scale=self.scale,
            **tables,
        )
        v, beta = tensors[2][None], tensors[4][None]
        dk2, dv, dbeta, dg2 = prepare_wy_repr_bwd(k=chunks.k, v=v, beta=beta, g=g, A=matrix, dw=dw, du=dv, **tables)
        return [dq, dk.add_(dk2), dv, self._summed_gradient(dg.add_(dg2)), dbeta]


class KdaScan(DeltaScan):
    """KDA: one decay a feature of the key. Its passes over states read q and k with the decays in them."""

    def _within(self, tensors: Sequence[Tensor]) -> _Chunks:
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        q, k, v, g, beta = (x[None] for x in tensors)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.all.tables)
        w, u, _, decayed_k, scores, matrix = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=g, beta=beta, scale=self.scale, **self.all.tables
        )
        return _Chunks(None, decayed_k, w, u, {"gk": g}, [g, scores, matrix])

    def _within_again(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _Chunks:
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        q, k, v, _, beta = (x[None] for x in tensors)
        g, _, matrix = kept
        w, u, decayed_q, decayed_k = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=matrix, gk=g, **self.all.tables)
        return _Chunks(decayed_q, decayed_k, w, u, {"gk": g}, kept)

    def _outputs(self, tensors: Sequence[Tensor], chunks: _Chunks, h: Tensor, v_new: Tensor) -> Tensor:
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

        g, scores, _ = chunks.kept
        out: Tensor = chunk_gla_fwd_o_gk(
            q=tensors[0][None], v=v_new, g=g, A=scores, h=h, scale=self.scale, **self.all.tables
        )
        return out

    def _gradient_within(
        self, tensors: Sequence[Tensor], chunks: _Chunks, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv

        q, k = (x[None] for x in tensors[:2])
        dscores, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=chunks.kept[1], scale=self.scale, **self.all.tables)
        return dv, dscores

    def _gradients(self, tensors: Sequence[Tensor], begun: _Backward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra

        q, k, v, _, beta = (x[None] for x in tensors)
        g, _, matrix = begun.chunks.kept
        dq, dk, dv, dbeta, dg, dmatrix = chunk_kda_bwd_wy_dqkg_fused(
            q=q,
            k=k,
            v=v,
            v_new=begun.v_new,
            g=g,
            beta=beta,
            A=matrix,
            h=begun.h,
            do=begun.do,
            dh=dh,
            dv=dv,
            scale=self.scale,
            **self.all.tables,
        )
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(
            q=q,
            k=k,
            g=g,
            beta=beta,
            dAqk=begun.dmatrix,
            dAkk=dmatrix,
            dq=dq,
            dk=dk,
            db=dbeta,
            dg=dg,
            **self.all.tables,
        )
        # Of every head; heads that share a key head add up.
        dq, dk = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dq, dk))
        return [dq, dk, dv, self._summed_gradient(dg), dbeta]
