"""The rules over segments by the internal functions of flash-linear-attention, and the tables that these need.

The internal functions compute a segment's map at less cost than the public operations: E and M are recurrences of the
states without outputs, over the segments that pass a state on only.

Shapes: fla has a leading axis of 1, `[1, T, h, d]`; there are `n` segments in chunks of `CHUNK` tokens.
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

CHUNK = 64  # tokens; the default of all functions of fla that are called here


# -- where pieces of documents start and end -------------------------------------------------------------------------


def documents(call: LinearCall) -> dict[str, Tensor]:
    """Returns fla's arguments for documents; those on the host let it count chunks without waiting for the device."""
    host = torch.device("cpu")
    return {"cu_seqlens": _offsets(call.packing, call.device), "cu_seqlens_cpu": _offsets(call.packing, host)}


def _offsets(packing: Packing, device: torch.device) -> Tensor:
    """Returns `cu_seqlens` without empty documents, the same tensor for a packing, since fla caches by identity."""
    return packing.memo(("fla offsets", device), lambda: on_device(np.unique(packing.cu_seqlens), device))


@dataclass(frozen=True)
class _SelectedSegments:
    """A selection of n of a rank's segments, end to end in the order of the rows, for fla's internal functions.

    Attributes:
        places: `[n]`, the numbers of the segments among all.
        runs: the ranges of rows to put end to end.
        tables: `cu_seqlens` `[n + 1]`, and `chunk_indices` `[chunks, 2]`, the segment of each chunk and its number
            there.
        chunk_offsets: `[n + 1]`, the number of chunks before each segment.
    """

    count: int
    places: Tensor
    runs: list[tuple[int, int]]
    tables: dict[str, Tensor]
    chunk_offsets: Tensor

    @property
    def state_tables(self) -> dict[str, Tensor]:
        """Arguments of functions that compute states."""
        return {**self.tables, "chunk_offsets": self.chunk_offsets}

    def rows(self, x: Tensor) -> Tensor:
        """Selects the segments' rows of `[1, T, ...]`, without a copy if they are one range."""
        parts = [x[:, start:end] for start, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def spread(self, states: Tensor, count: int) -> Tensor | None:
        """Expands states `[n, ...]` to `[count, ...]` of all segments, zero for the others; None if n is 0."""
        if len(states) in (0, count):
            return states if len(states) else None
        return states.new_zeros(count, *states.shape[1:]).index_copy_(0, self.places, states)


def _selected(call: LinearCall, chosen: BoolArray) -> _SelectedSegments:
    key = ("fla selection", chosen.tobytes())
    return call.segments_table(key, lambda: _select(call, np.flatnonzero(chosen)))


def _select(call: LinearCall, numbers: np.ndarray) -> _SelectedSegments:
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
    return _SelectedSegments(
        numbers.size,
        on_device(numbers, call.device, torch.int64),
        runs,
        {name: on_device(table, call.device) for name, table in tables.items()},
        on_device(chunk_offsets, call.device),
    )


def conv_states(history: Tensor, call: LinearCall) -> Tensor:
    """Converts the history `[n, width - 1, c]` of segments with a past to fla's cache of all segments, `[N, c, width]`.

    The cache ends with the inputs before a segment, and its first position is never read.
    """
    assert call.segments is not None
    states = torch.nn.functional.pad(history.transpose(1, 2), (1, 0))
    past = call.segments.past
    if past.all():
        return states
    places = call.segments_table("fla waiting", lambda: on_device(np.flatnonzero(past), call.device, torch.int64))
    return states.new_zeros(past.size, *states.shape[1:]).index_copy(0, places, states)


# -- the rules in pieces ---------------------------------------------------------------------------------------------


class _ChunkTerms(NamedTuple):
    """The terms of each chunk that do not depend on the state, with which a rule is a recurrence over chunks.

    The recurrence is `S' = decay S + k^T (u - w S)`, and outputs are linear in q and S.

    Attributes:
        q, k: `[1, T, h or g, dk]`; q in backward only.
        w, u: `[1, T, h, dk]` and `[1, T, h, dv]`
        decay: log decays summed within chunks, by fla's name: `g` `[1, T, h]` or `gk` `[1, T, h, dk]`.
        kept: the decays and the chunks' matrices, from which backward computes the rest again.
    """

    q: Tensor | None
    k: Tensor
    w: Tensor
    u: Tensor
    decay: dict[str, Tensor]
    kept: list[Tensor]


class _BegunBackward(NamedTuple):
    """The results of backward up to the arrival of the states' gradients."""

    chunks: _ChunkTerms
    do: Tensor
    h: Tensor
    v_new: Tensor
    dv: Tensor
    dmatrix: Tensor | None


class DeltaScan(LocalScan):
    """The recurrence over chunks, which both rules share; subclasses compute the terms of chunks.

    A segment's E is the last state of the recurrence from zero; its M is that from the unit matrix without values. As
    in fla itself, w and u are computed again in backward.
    """

    def __init__(self, scale: float, call: LinearCall) -> None:
        assert call.segments is not None
        past, future = call.segments.past, call.segments.future
        self.scale = scale
        self.all = _selected(call, np.ones_like(past))
        self.waiting, self.leaving = _selected(call, past), _selected(call, future)
        self.passing = _selected(call, past & future)

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        chunks = self._chunk_terms(tensors)
        heads, dk = chunks.w.shape[2:]
        unit = torch.eye(dk, device=chunks.w.device).repeat(self.passing.count, heads, 1, 1)
        silent = chunks._replace(u=torch.zeros_like(chunks.w) if self.passing.count else chunks.w)
        return self._final_states(self.leaving, chunks, None), self._final_states(self.passing, silent, unit), chunks

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        h, v_new = self._states(begun, states)
        return self._outputs(tensors, begun, h, v_new).squeeze(0), [*begun.kept, states]

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

        *kept, states = kept
        chunks = self._recompute_chunk_terms(tensors, kept)
        do = gradient.contiguous()[None]
        h, v_new = self._states(chunks, states)
        dv, dmatrix = self._chunk_gradients(tensors, chunks, do, v_new)
        begun = _BegunBackward(chunks, do, h, v_new, dv, dmatrix)
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

    def _final_states(self, pieces: _SelectedSegments, chunks: _ChunkTerms, states: Tensor | None) -> Tensor:
        """Returns the states `[n, h, dk, dv]` after segments, starting from `states` or zero; dv is that of u."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        heads, dk, dv = chunks.w.shape[2], chunks.w.shape[3], chunks.u.shape[3]
        if not pieces.count:
            return chunks.w.new_empty(0, heads, dk, dv, dtype=torch.float32)
        k, w, u = (pieces.rows(x) for x in (chunks.k, chunks.w, chunks.u))
        decay = {name: pieces.rows(x) for name, x in chunks.decay.items()}
        after: Tensor = chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, **decay, initial_state=states, output_final_state=True, save_new_value=False,
            **pieces.state_tables,
        )[2]  # fmt: skip
        return after

    def _states(self, chunks: _ChunkTerms, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the state before each chunk, `[1, chunks, h, dk, dv]`, and `u - w S`.

        `states` are those before the segments with a past.
        """
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        before = self.waiting.spread(states, self.all.count)
        h, v_new, _ = chunk_gated_delta_rule_fwd_h(
            k=chunks.k, w=chunks.w, u=chunks.u, **chunks.decay, initial_state=before, **self.all.state_tables
        )
        return h, v_new

    def _backward_arguments(self, pieces: _SelectedSegments, begun: _BegunBackward) -> dict[str, Any]:
        chunks = begun.chunks
        assert chunks.q is not None
        rows = {"q": chunks.q, "k": chunks.k, "w": chunks.w, "do": begun.do, "dv": begun.dv, **chunks.decay}
        return {"scale": self.scale, **{name: pieces.rows(x) for name, x in rows.items()}}

    @abstractmethod
    def _chunk_terms(self, tensors: Sequence[Tensor]) -> _ChunkTerms:
        """Computes the terms of chunks in forward."""

    @abstractmethod
    def _recompute_chunk_terms(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _ChunkTerms:
        """Computes the terms of chunks in backward from `kept`."""

    @abstractmethod
    def _outputs(self, tensors: Sequence[Tensor], chunks: _ChunkTerms, h: Tensor, v_new: Tensor) -> Tensor:
        """Returns the outputs, `[1, T, h, dv]`."""

    @abstractmethod
    def _chunk_gradients(
        self, tensors: Sequence[Tensor], chunks: _ChunkTerms, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the gradient of v_new by the outputs of its chunk, and that of the chunks' matrices if saved."""

    @abstractmethod
    def _gradients(self, tensors: Sequence[Tensor], begun: _BegunBackward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        """Returns the gradients of the inputs, given those of the states after each chunk and of v_new."""

    def _summed_gradient(self, dg: Tensor) -> Tensor:
        """Returns the gradient of the decays, given that of their sums."""
        from fla.ops.utils import chunk_local_cumsum

        summed: Tensor = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **self.all.tables)
        return summed


class GdnScan(DeltaScan):
    """The scan of Gated DeltaNet, which has one decay a head."""

    def _chunk_terms(self, tensors: Sequence[Tensor]) -> _ChunkTerms:
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        _, k, v, g, beta = (x[None] for x in tensors)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.all.tables)
        w, u, matrix = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **self.all.tables)
        return _ChunkTerms(None, k, w, u, {"g": g}, [g, matrix])

    def _recompute_chunk_terms(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _ChunkTerms:
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        q, k, v, _, beta = (x[None] for x in tensors)
        g, matrix = kept
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=matrix, g=g, **self.all.tables)
        return _ChunkTerms(q, k, w, u, {"g": g}, kept)

    def _outputs(self, tensors: Sequence[Tensor], chunks: _ChunkTerms, h: Tensor, v_new: Tensor) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        out: Tensor = chunk_fwd_o(
            q=tensors[0][None], k=chunks.k, v=v_new, h=h, g=chunks.decay["g"], scale=self.scale, **self.all.tables
        )
        return out

    def _chunk_gradients(
        self, tensors: Sequence[Tensor], chunks: _ChunkTerms, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local

        g = chunks.decay["g"]
        dv = chunk_bwd_dv_local(q=chunks.q, k=chunks.k, g=g, do=do, scale=self.scale, **self.all.tables)
        return dv, None

    def _gradients(self, tensors: Sequence[Tensor], begun: _BegunBackward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd

        chunks, tables = begun.chunks, self.all.tables
        g, matrix = chunks.kept
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=chunks.q, k=chunks.k, v=begun.v_new, w=chunks.w, g=g, h=begun.h, dv=dv, do=begun.do, dh=dh,
            scale=self.scale, **tables,
        )  # fmt: skip
        v, beta = tensors[2][None], tensors[4][None]
        dk2, dv, dbeta, dg2 = prepare_wy_repr_bwd(k=chunks.k, v=v, beta=beta, g=g, A=matrix, dw=dw, du=dv, **tables)
        return [dq, dk.add_(dk2), dv, self._summed_gradient(dg.add_(dg2)), dbeta]


class KdaScan(DeltaScan):
    """The scan of KDA, which has one decay a feature of the key. Its states are computed from decayed q and k."""

    def _chunk_terms(self, tensors: Sequence[Tensor]) -> _ChunkTerms:
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        q, k, v, g, beta = (x[None] for x in tensors)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.all.tables)
        w, u, _, decayed_k, scores, matrix = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=g, beta=beta, scale=self.scale, **self.all.tables
        )
        return _ChunkTerms(None, decayed_k, w, u, {"gk": g}, [g, scores, matrix])

    def _recompute_chunk_terms(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _ChunkTerms:
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        q, k, v, _, beta = (x[None] for x in tensors)
        g, _, matrix = kept
        w, u, decayed_q, decayed_k = recompute_w_u_fwd(q=q, k=k, v=v, beta=beta, A=matrix, gk=g, **self.all.tables)
        return _ChunkTerms(decayed_q, decayed_k, w, u, {"gk": g}, kept)

    def _outputs(self, tensors: Sequence[Tensor], chunks: _ChunkTerms, h: Tensor, v_new: Tensor) -> Tensor:
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

        g, scores, _ = chunks.kept
        out: Tensor = chunk_gla_fwd_o_gk(
            q=tensors[0][None], v=v_new, g=g, A=scores, h=h, scale=self.scale, **self.all.tables
        )
        return out

    def _chunk_gradients(
        self, tensors: Sequence[Tensor], chunks: _ChunkTerms, do: Tensor, v_new: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv

        q, k = (x[None] for x in tensors[:2])
        dscores, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new, do=do, A=chunks.kept[1], scale=self.scale, **self.all.tables)
        return dv, dscores

    def _gradients(self, tensors: Sequence[Tensor], begun: _BegunBackward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra

        q, k, v, _, beta = (x[None] for x in tensors)
        g, _, matrix = begun.chunks.kept
        dq, dk, dv, dbeta, dg, dmatrix = chunk_kda_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=begun.v_new, g=g, beta=beta, A=matrix, h=begun.h, do=begun.do, dh=dh, dv=dv,
            scale=self.scale, **self.all.tables,
        )  # fmt: skip
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(
            q=q, k=k, g=g, beta=beta, dAqk=begun.dmatrix, dAkk=dmatrix, dq=dq, dk=dk, db=dbeta, dg=dg, **self.all.tables
        )
        # These are the gradients of every head; those of heads that share a key head are added.
        dq, dk = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dq, dk))
        return [dq, dk, dv, self._summed_gradient(dg), dbeta]


class Gdn2Scan(KdaScan):
    """The scan of Gated DeltaNet-2: KDA's, with a gate for each feature of the key in place of a write strength."""

    def _chunk_terms(self, tensors: Sequence[Tensor]) -> _ChunkTerms:
        from fla.ops.gdn2.chunk_intra import chunk_gdn2_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        q, k, v, g, b = (x[None] for x in tensors)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **self.all.tables)
        w, u, _, decayed_k, scores, matrix = chunk_gdn2_fwd_intra(
            q=q, k=k, v=v, gk=g, b=b, w_gate=torch.ones_like(v), scale=self.scale, **self.all.tables
        )
        return _ChunkTerms(None, decayed_k, w, u, {"gk": g}, [g, scores, matrix])

    def _recompute_chunk_terms(self, tensors: Sequence[Tensor], kept: list[Tensor]) -> _ChunkTerms:
        from fla.ops.gdn2.wy_fast import recompute_w_u_fwd_gdn2

        q, k, v, _, b = (x[None] for x in tensors)
        g, _, matrix = kept
        w, u, decayed_q, decayed_k = recompute_w_u_fwd_gdn2(
            k=k, v=v, b=b, w_gate=torch.ones_like(v), A=matrix, q=q, gk=g, **self.all.tables
        )
        return _ChunkTerms(decayed_q, decayed_k, w, u, {"gk": g}, kept)

    def _gradients(self, tensors: Sequence[Tensor], begun: _BegunBackward, dh: Tensor, dv: Tensor) -> list[Tensor]:
        from fla.ops.gdn2.chunk_bwd import chunk_gdn2_bwd_wy_dqkg_fused
        from fla.ops.gdn2.chunk_intra import chunk_gdn2_bwd_intra

        q, k, v, _, b = (x[None] for x in tensors)
        g, _, matrix = begun.chunks.kept
        dq, dk, dv, db, _, dg, dmatrix = chunk_gdn2_bwd_wy_dqkg_fused(
            q=q, k=k, v=v, v_new=begun.v_new, g=g, b=b, w_gate=torch.ones_like(v), A=matrix, h=begun.h, do=begun.do,
            dh=dh, dv=dv, scale=self.scale, **self.all.tables,
        )  # fmt: skip
        dq, dk, db, dg = chunk_gdn2_bwd_intra(
            q=q, k=k, g=g, b=b, dAqk=begun.dmatrix, dAkk=dmatrix, dq=dq, dk=dk, db=db, dg=dg, **self.all.tables
        )
        return [dq, dk, dv, self._summed_gradient(dg), db]
