"""The recurrences in chunks of `CHUNK` tokens, with matrix products: the CPU default, in plain torch.

Within a chunk, with G_i the sum of the log decays up to token i and S the state before it (arXiv 2412.06464, sec. 3.3):

    (I + A) U = beta (V - exp(G) K S)           A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    o_i = scale (exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) u_j)
    S_next = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

KDA has a decay for each feature, so that exp(G_i - G_j) stands inside the products over features; Mamba-2 has no delta,
so that U = dt X. With everything that does not need S made for all chunks at once, all three are one recurrence,

    U = updates - reads S       o = queries S + attention U       S_next = carry S + keys U

whose states `_ChunkScan` walks, and whose outputs and gradients are again products for all chunks at once.

A head's bits do not depend on the heads beside it, except with one feature a head, where torch turns the products of
a single head, but not those of several, into products with vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.executor.opaque import opaque_backward
from megatron_cp.executor.scan import LocalScan
from megatron_cp.linear.kernels.base import Inputs, LinearCall, RuleKernel, ScanWork, StateSpace
from megatron_cp.linear.kernels.common.chunks import CHUNK, Chunks, PieceClass
from megatron_cp.linear.kernels.common.decayed import decayed_products
from megatron_cp.linear.kernels.common.products import product
from megatron_cp.linear.reductions import for_each_token

CACHE_LINE = 64  # bytes


class ChunkedRule(RuleKernel):
    """The equations above, for all chunks at once but for the walk of the state."""

    name = "chunked"
    package = "torch"
    kinds = ("gdn", "kda", "mamba")
    serves_graphs = True

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        chunks, inputs, size = Chunks.of(call), *_padded(inputs)
        out = chunks.join(_Alone.apply(_ChunkScan(chunks), *_prepared(inputs, groups, scale, chunks)))
        return out[..., :size].to(call.dtype)

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        chunks = Chunks.of(call)
        tensors = list(_prepared(inputs, groups, scale, chunks))
        return ScanWork(tensors, _ChunkScan(chunks), lambda out: chunks.join(out).to(call.dtype))


def _padded(inputs: Inputs) -> tuple[Inputs, int]:
    """The inputs with values of as many features as fill cache lines, and how many they had.

    The bits of a product on the CPU depend on where its matrices begin, and so on the heads beside them otherwise.
    """
    field = "x" if isinstance(inputs, StateSpace) else "v"
    values: Tensor = getattr(inputs, field)
    size = values.shape[-1]
    spare = -size % (CACHE_LINE // torch.promote_types(values.dtype, torch.float32).itemsize)
    return (inputs._replace(**{field: F.pad(values, (0, spare))}) if spare else inputs), size


class _Prepared(NamedTuple):
    """All that a chunk contributes, whatever the state before it. `reads` has no column where there is no delta.

    updates `[n, h, C, dv]`, reads and queries `[n, h, C, dk]`, attention `[n, h, C, C]`, keys `[n, h, dk, C]`, carry
    `[n, h, 1 or dk, 1]`.
    """

    updates: Tensor
    reads: Tensor
    attention: Tensor
    queries: Tensor
    keys: Tensor
    carry: Tensor

    @property
    def has_delta(self) -> bool:
        return self.reads.shape[-1] > 0


def _prepared(inputs: Inputs, groups: list[int], scale: float, chunks: Chunks) -> _Prepared:
    acc_dtype = torch.promote_types(inputs.values.dtype, torch.float32)
    if isinstance(inputs, StateSpace):
        return _state_space(inputs, groups, scale, chunks, acc_dtype)
    q, k, v, beta = (chunks.split(x.to(acc_dtype)) for x in (inputs.q, inputs.k, inputs.v, inputs.beta[..., None]))
    q, k = (_for_heads(x, groups) for x in (q, k))
    by_feature = inputs.g.ndim == 3
    each = chunks.split(inputs.g.to(acc_dtype) if by_feature else inputs.g.to(acc_dtype)[..., None])
    g = each.cumsum(2)  # G
    if by_feature:
        overlap, weights = decayed_products(q, k, g)
    else:
        decay = _decay(g)
        overlap, weights = (decay * product(x, k.transpose(2, 3)) for x in (k, q))
    grown = g.exp()
    right = torch.cat([beta * v, beta * grown * k], -1)
    updates, reads = _Solved.apply((beta * overlap).tril(-1), right).split([v.shape[-1], k.shape[-1]], -1)
    return _Prepared(
        updates=updates,
        reads=reads,
        attention=scale * weights,
        queries=scale * grown * q,
        keys=(_following(each).exp() * k).transpose(2, 3),
        carry=g[:, :, -1:].exp().transpose(2, 3),
    )


def _state_space(
    inputs: StateSpace, groups: list[int], scale: float, chunks: Chunks, acc_dtype: torch.dtype
) -> _Prepared:
    dt = inputs.dt.to(acc_dtype)
    each = chunks.split((dt * for_each_token(inputs.A.to(acc_dtype), len(dt)))[..., None])
    g = each.cumsum(2)
    b, c = (chunks.split(x.to(acc_dtype)) for x in (inputs.B, inputs.C))
    weights = _for_heads(product(c, b.transpose(2, 3)), groups)
    b, c = (_for_heads(x, groups) for x in (b, c))
    return _Prepared(
        updates=chunks.split(inputs.x.to(acc_dtype) * dt[..., None]),
        reads=b[..., :0],
        attention=scale * (_decay(g) * weights),
        queries=scale * g.exp() * c,
        keys=(_following(each).exp() * b).transpose(2, 3),
        carry=g[:, :, -1:].exp(),
    )


def _for_heads(x: Tensor, groups: list[int]) -> Tensor:
    """`[n, g, ...]` to one entry a head."""
    if groups == list(range(x.shape[1])):
        return x
    return torch.cat([x[:, group : group + 1] for group in groups], 1)


# A token's own decay is 1 whatever g is. Were it written as exp(G_i - G_i), the gradient of g would be a difference of
# large numbers: noise, where a strong decay makes the true gradient small, and most of it in the gradient of A_log.


def _decay(g: Tensor) -> Tensor:
    """`exp(G_i - G_j)` for j <= i, else 0; `[n, h, C, C]` from `[n, h, C, 1]`."""
    not_earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu()
    # Masked before exp: above the diagonal G_i - G_j is positive and could overflow.
    earlier = (g - g.transpose(2, 3)).masked_fill(not_earlier, -torch.inf).exp()
    return earlier + torch.eye(CHUNK, dtype=g.dtype, device=g.device)


def _following(each: Tensor) -> Tensor:
    """The sum of the decays after each token of a chunk, G_C - G_i, without a difference."""
    return F.pad(each[:, :, 1:].flip(2).cumsum(2).flip(2), (0, 0, 0, 1))


class _Solved(torch.autograd.Function):
    """`(I + A)^-1 B`, A strictly lower triangular; the inverse is kept, so that backward is two products."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, right: Tensor) -> Tensor:
        unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True)
        solved = inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inverse, solved = ctx.saved_tensors
        d_right = inverse.transpose(2, 3) @ gradients[0]
        return -(d_right @ solved.transpose(2, 3)), d_right


class _Alone(torch.autograd.Function):
    """A scan whose pieces are whole documents."""

    @staticmethod
    def forward(ctx: Any, local: _ChunkScan, *tensors: Tensor) -> Tensor:
        states, _, begun = local.leave(tensors)
        out, kept = local.finish(tensors, local.meanwhile(tensors, begun), states[:0])
        ctx.local, ctx.count = local, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    @opaque_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], list(saved[ctx.count :])
        wanted, begun = ctx.local.leave_backward(tensors, kept, gradients[0])
        begun = ctx.local.meanwhile_backward(tensors, kept, begun, gradients[0])
        return None, *ctx.local.finish_backward(tensors, kept, begun, gradients[0], wanted[:0])


class _After(NamedTuple):
    """The gradients of the state after each chunk, and, where the walk has made them, what they say of U."""

    states: Tensor
    through_keys: Tensor | None


class _ChunkScan(LocalScan):
    """The walk of the states, of the maps, and of the states' gradients."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks

    # -- forward -----------------------------------------------------------------------------------------------------

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        at, chunks = _Prepared(*tensors), self.chunks
        states = at.updates.new_empty(*at.keys.shape[:3], at.updates.shape[-1])
        updates = torch.empty_like(at.updates) if at.has_delta else at.updates
        self._walk(at, chunks.single, None, states, updates)
        first = self._walk(at, chunks.first, None, states, updates)
        middle, transitions = self._maps(at, chunks.middle)
        constants = _in_row_order([(chunks.first, first), (chunks.middle, middle)])
        return constants, _in_row_order([(chunks.middle, transitions)]), (states, updates)

    def meanwhile(self, tensors: Sequence[Tensor], begun: Any) -> Any:
        at, (states, updates) = _Prepared(*tensors), begun
        out = torch.empty_like(at.updates)
        self._outputs(at, slice(0, self.chunks.num_known), states, updates, out)
        return states, updates, out

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        at, chunks = _Prepared(*tensors), self.chunks
        all_states, updates, out = begun
        for pieces, given in _of_classes(states, chunks.middle, chunks.last):
            self._walk(at, pieces, given, all_states, updates)
        self._outputs(at, slice(chunks.num_known, None), all_states, updates, out)
        return out, [all_states, updates]

    def _walk(self, at: _Prepared, pieces: PieceClass, given: Tensor | None, states: Tensor, updates: Tensor) -> Tensor:
        """Writes the state before each chunk to `states` and, with a delta, U to `updates`.

        Returns the state after each piece.
        """
        _, heads, dk, dv = states.shape
        state = states.new_zeros(len(pieces.pieces), heads, dk, dv) if given is None else given.clone()
        for start, active in pieces.steps:
            now, here = slice(start, start + active), state[:active]
            self._begin(start, here)
            states[now] = here
            if at.has_delta:
                torch.sub(at.updates[now], at.reads[now] @ here, out=updates[now])
            torch.add(at.carry[now] * here, at.keys[now] @ updates[now], out=here)
        return state

    def _maps(self, at: _Prepared, pieces: PieceClass) -> tuple[Tensor, Tensor]:
        """E and M of each piece."""
        heads, dk, dv = at.keys.shape[1], at.keys.shape[2], at.updates.shape[-1]
        if not at.has_delta:
            return self._walk_ends(at, pieces), self._carried(at, pieces)
        # One walk of the state that starts at zero and of the unit matrix that no update is added to.
        padded = at.updates.new_zeros(len(pieces.pieces), heads, dk, dv + dk)
        padded[..., dv:] = torch.eye(dk, dtype=padded.dtype, device=padded.device)
        for start, active in pieces.steps:
            now, here = slice(start, start + active), padded[:active]
            update = at.reads[now] @ here
            update.neg_()[..., :dv] += at.updates[now]
            torch.add(at.carry[now] * here, at.keys[now] @ update, out=here)
        return padded[..., :dv], padded[..., dv:]

    def _walk_ends(self, at: _Prepared, pieces: PieceClass) -> Tensor:
        state = at.updates.new_zeros(len(pieces.pieces), at.keys.shape[1], at.keys.shape[2], at.updates.shape[-1])
        for start, active in pieces.steps:
            now, here = slice(start, start + active), state[:active]
            torch.add(at.carry[now] * here, at.keys[now] @ at.updates[now], out=here)
        return state

    def _carried(self, at: _Prepared, pieces: PieceClass) -> Tensor:
        kept = at.carry.new_ones(len(pieces.pieces), *at.carry.shape[1:])
        for start, active in pieces.steps:
            kept[:active] *= at.carry[start : start + active]
        return kept

    def _outputs(self, at: _Prepared, chunks: slice, states: Tensor, updates: Tensor, out: Tensor) -> None:
        """`o` of some chunks whose states are known."""
        torch.add(at.queries[chunks] @ states[chunks], at.attention[chunks] @ updates[chunks], out=out[chunks])

    # -- backward ----------------------------------------------------------------------------------------------------

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        at, chunks = _Prepared(*tensors), self.chunks
        d_updates = at.attention.transpose(2, 3) @ gradient  # from the own outputs; the state's share comes later
        wanted = at.queries.transpose(2, 3) @ gradient
        if at.has_delta:
            wanted -= at.reads.transpose(2, 3) @ d_updates
        after = _After(torch.empty_like(kept[0]), torch.empty_like(d_updates) if at.has_delta else None)
        self._walk_back(at, chunks.single, None, wanted, after)
        last = self._walk_back(at, chunks.last, None, wanted, after)
        middle = self._walk_back(at, chunks.middle, None, wanted, None)
        before = _in_row_order([(chunks.middle, middle), (chunks.last, last)])
        return before, (d_updates, wanted, after)

    def meanwhile_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor) -> Any:
        before, updates = kept
        return *begun, gradient @ updates.transpose(2, 3), gradient @ before.transpose(2, 3)

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        at, chunks = _Prepared(*tensors), self.chunks
        before, updates = kept
        d_updates, wanted, after, d_attention, d_queries = begun
        for pieces, given in _of_classes(states, chunks.first, chunks.middle):
            self._walk_back(at, pieces, given, wanted, after)
        after, through_keys = after
        d_updates = d_updates + (at.keys.transpose(2, 3) @ after if through_keys is None else through_keys)
        d_reads = -(d_updates @ before.transpose(2, 3)) if at.has_delta else torch.zeros_like(at.reads)
        d_carry = (after * before).sum(-1, keepdim=True)
        if at.carry.shape[2] == 1:
            d_carry = d_carry.sum(2, keepdim=True)
        return [
            d_updates,
            d_reads,
            d_attention,
            d_queries,
            after @ updates.transpose(2, 3),
            d_carry,
        ]

    def _walk_back(
        self, at: _Prepared, pieces: PieceClass, given: Tensor | None, wanted: Tensor, after: _After | None
    ) -> Tensor:
        """Writes to `after`; returns the gradient of the state before each piece.

        `given` is that of the states after the pieces, `wanted` what each chunk's outputs want of the state before it.
        """
        state = wanted.new_zeros(len(pieces.pieces), *wanted.shape[1:]) if given is None else given.clone()
        for start, active in reversed(pieces.steps):
            now, here = slice(start, start + active), state[:active]
            if after is not None:
                after.states[now] = here
            before = wanted[now] + at.carry[now] * here
            if at.has_delta:
                through_keys = at.keys[now].transpose(2, 3) @ here
                if after is not None and after.through_keys is not None:
                    after.through_keys[now] = through_keys
                before -= at.reads[now].transpose(2, 3) @ through_keys
            here.copy_(before)
            self._begin(start, here)
        return state

    def _begin(self, chunk: int, state: Tensor) -> None:
        """Where pieces are walked through one after another, forgets the one before, or its gradient."""
        if self.chunks.begins is not None:
            state.masked_fill_(self.chunks.begins[chunk], 0)


def _in_row_order(classes: list[tuple[PieceClass, Tensor]]) -> Tensor:
    """What belongs to the pieces of several classes, in the order of the rows."""
    found = {piece: value for members, values in classes for piece, value in zip(members.pieces, values, strict=True)}
    # Stacked, because an index made of a list would make the host wait for the device.
    return torch.stack([found[piece] for piece in sorted(found)]) if found else classes[0][1]


def _of_classes(values: Tensor, *classes: PieceClass) -> list[tuple[PieceClass, Tensor]]:
    """The inverse: from the order of the rows to that of each class."""
    pieces = sorted(piece for members in classes for piece in members.pieces)
    own = dict(zip(pieces, values, strict=True))
    return [
        (members, torch.stack([own[piece] for piece in members.pieces]) if members.pieces else values[:0])
        for members in classes
    ]
