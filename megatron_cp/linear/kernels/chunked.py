"""The recurrences in chunks of `CHUNK` tokens by matrix products, in plain torch: the CPU default.

Within a chunk, with G_i the sum of the log decays up to token i and S the state before it (arXiv 2412.06464, sec. 3.3):

    (I + A) U = beta (V - exp(G) K S)           A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i
    o_i = scale (exp(G_i) S^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) u_j)
    S_next = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

KDA has a decay for each feature, so that exp(G_i - G_j) is inside the products over features. In Gated DeltaNet-2 beta
has features too: it multiplies those of k_i and of the K that reads S, and not V. Mamba-2 has no delta, so
that U = dt X. The terms that do not depend on S are computed for all chunks at once. All three are then one recurrence,

    U = updates - reads S       o = queries S + attention U       S_next = carry S + keys U

whose states `_ChunkScan` computes step by step, and whose outputs and gradients are again products for all chunks at
once.

A head's bits do not depend on the other heads of a rank, except with one feature a head, where torch turns the products
of a single head, but not those of several, into products with vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.executor.no_compile import no_compile_backward
from megatron_cp.executor.scan import LocalScan
from megatron_cp.linear.kernels.base import Inputs, LinearCall, RuleKernel, ScanWork, StateSpace
from megatron_cp.linear.kernels.common.chunks import Parts, PieceClass, TokenChunks
from megatron_cp.linear.kernels.common.decayed import decayed_products
from megatron_cp.linear.kernels.common.products import product
from megatron_cp.linear.reductions import expand_to_tokens

CACHE_LINE = 64  # bytes


class ChunkedRule(RuleKernel):
    """The equations above, for all chunks at once except for the recurrence of the state."""

    name = "chunked"
    package = "torch"
    kinds = ("gdn", "kda", "gdn2", "mamba")
    serves_graphs = True

    def refusal(self, call: LinearCall) -> str | None:
        return None

    def rule(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> Tensor:
        inputs, size = _padded(inputs)
        if call.tables is not None:
            return _whole_documents(inputs, groups, scale, call.tables["chunks"])[..., :size].to(call.dtype)
        parts = Parts.from_call(call)
        *short, (rest, chunks) = _by_parts(inputs, parts)
        found = [_short_documents(own, groups, scale, of_part) for own, of_part in short]
        if chunks.num_chunks or not found:
            found.append(_whole_documents(rest, groups, scale, chunks))
        return parts.join(found)[..., :size].to(call.dtype)

    def work(self, inputs: Inputs, groups: list[int], scale: float, call: LinearCall) -> ScanWork:
        if call.streams:
            assert call.tables is not None
            chunks: TokenChunks = call.tables["chunks"]
            terms = list(_prepared(inputs, groups, scale, chunks))
            return ScanWork(terms, _ChunkScan(chunks), lambda out: chunks.join(out).to(call.dtype))
        parts = Parts.from_call(call)
        *short, (rest, chunks) = _by_parts(inputs, parts)
        found = [_short_documents(own, groups, scale, of_part) for own, of_part in short]
        tensors = list(_prepared(rest, groups, scale, chunks))
        return ScanWork(tensors, _ChunkScan(chunks), lambda out: parts.join([*found, chunks.join(out)]).to(call.dtype))


def _by_parts(inputs: Inputs, parts: Parts) -> list[tuple[Inputs, TokenChunks]]:
    moved = {name: parts.in_order(x) for name, x in inputs._asdict().items() if name != "A"}
    inputs = inputs._replace(**moved)
    if len(parts.chunks) == 1:
        return [(inputs, parts.chunks[0])]
    return [(inputs.piece(*span), chunks) for span, chunks in zip(parts.spans, parts.chunks, strict=True)]


def _whole_documents(inputs: Inputs, groups: list[int], scale: float, chunks: TokenChunks) -> Tensor:
    return chunks.join(_WholeDocuments.apply(_ChunkScan(chunks), *_prepared(inputs, groups, scale, chunks)))


def _short_documents(inputs: Inputs, groups: list[int], scale: float, chunks: TokenChunks) -> Tensor:
    """Computes documents of one chunk each: the state before it is zero, and nobody needs the one after it."""
    inputs, size = _padded(inputs)
    terms = _prepared(_with_whole_keys(inputs), groups, scale, chunks)
    return chunks.join(product(terms.attention, terms.updates))[..., :size]


def _with_whole_keys(inputs: Inputs) -> Inputs:
    """Pads the features of the keys to whole cache lines too, so that the matrices of narrow chunks begin at one."""
    spare = -inputs.keys.shape[-1] % (CACHE_LINE // accumulation_dtype(inputs.values.dtype).itemsize)
    if not spare:
        return inputs
    if isinstance(inputs, StateSpace):
        return inputs._replace(B=F.pad(inputs.B, (0, spare)), C=F.pad(inputs.C, (0, spare)))
    g, beta = (F.pad(x, (0, spare)) if x.ndim == 3 else x for x in (inputs.g, inputs.beta))
    return inputs._replace(q=F.pad(inputs.q, (0, spare)), k=F.pad(inputs.k, (0, spare)), g=g, beta=beta)


def _padded(inputs: Inputs) -> tuple[Inputs, int]:
    """Pads the features of the values to whole cache lines. Returns the inputs and the number of features before.

    The bits of a product on the CPU depend on the alignment of its matrices, and would depend on the other heads of a
    rank without the padding.
    """
    field = "x" if isinstance(inputs, StateSpace) else "v"
    values: Tensor = getattr(inputs, field)
    size = values.shape[-1]
    spare = -size % (CACHE_LINE // accumulation_dtype(values.dtype).itemsize)
    return (inputs._replace(**{field: F.pad(values, (0, spare))}) if spare else inputs), size


class _Prepared(NamedTuple):
    """The terms of the recurrence that do not depend on the state, for n chunks of C tokens.

        updates      (I + A)^-1 (beta V)                `[n, h, C, dv]`
        reads        (I + A)^-1 (beta exp(G) K)         `[n, h, C, dk]`, without columns in a rule without a delta
        attention    scale exp(G_i - G_j) (Q K^T)       `[n, h, C, C]`
        queries      scale exp(G) Q                     `[n, h, C, dk]`
        keys         exp(G_C - G) K, transposed         `[n, h, dk, C]`
        carry        exp(G_C)                           `[n, h, 1 or dk, 1]`

    In `_prepared`, `overlap` and `weights` are exp(G_i - G_j) times K K^T and Q K^T, and `grown` is exp(G).
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


def _prepared(inputs: Inputs, groups: list[int], scale: float, chunks: TokenChunks) -> _Prepared:
    acc_dtype = accumulation_dtype(inputs.values.dtype)
    if isinstance(inputs, StateSpace):
        return _state_space(inputs, groups, scale, chunks, acc_dtype)
    has_erase = inputs.beta.ndim == 3
    beta = inputs.beta if has_erase else inputs.beta[..., None]
    q, k, v, beta = (chunks.split(x.to(acc_dtype)) for x in (inputs.q, inputs.k, inputs.v, beta))
    q, k = (_expand_groups(x, groups) for x in (q, k))
    per_feature = inputs.g.ndim == 3
    each = chunks.split(inputs.g.to(acc_dtype) if per_feature else inputs.g.to(acc_dtype)[..., None])
    g = each.cumsum(2)  # G
    erase = beta * k if has_erase else None
    if per_feature:
        overlap, weights = decayed_products(q, k, g, erase)
    else:
        decay = _decay(g)
        overlap, weights = (decay * product(x, k.transpose(2, 3)) for x in (k, q))
    grown = g.exp()
    if erase is None:
        right, lower = [beta * v, beta * grown * k], beta * overlap
    else:
        right, lower = [v, grown * erase], overlap
    updates, reads = _Solved.apply(lower.tril(-1), torch.cat(right, -1)).split([v.shape[-1], k.shape[-1]], -1)
    return _Prepared(
        updates=updates,
        reads=reads,
        attention=scale * weights,
        queries=scale * grown * q,
        keys=(_suffix_sums(each).exp() * k).transpose(2, 3),
        carry=g[:, :, -1:].exp().transpose(2, 3),
    )


def _state_space(
    inputs: StateSpace, groups: list[int], scale: float, chunks: TokenChunks, acc_dtype: torch.dtype
) -> _Prepared:
    dt = inputs.dt.to(acc_dtype)
    each = chunks.split((dt * expand_to_tokens(inputs.A.to(acc_dtype), len(dt)))[..., None])
    g = each.cumsum(2)
    b, c = (chunks.split(x.to(acc_dtype)) for x in (inputs.B, inputs.C))
    weights = _expand_groups(product(c, b.transpose(2, 3)), groups)
    b, c = (_expand_groups(x, groups) for x in (b, c))
    return _Prepared(
        updates=chunks.split(inputs.x.to(acc_dtype) * dt[..., None]),
        reads=b[..., :0],
        attention=scale * (_decay(g) * weights),
        queries=scale * g.exp() * c,
        keys=(_suffix_sums(each).exp() * b).transpose(2, 3),
        carry=g[:, :, -1:].exp(),
    )


def _expand_groups(x: Tensor, groups: list[int]) -> Tensor:
    """Expands `[n, g, ...]` to `[n, h, ...]`."""
    if groups == list(range(x.shape[1])):
        return x
    return torch.cat([x[:, group : group + 1] for group in groups], 1)


# A token's own decay is 1 for any g. If it were computed as exp(G_i - G_i), the gradient of g would be a difference of
# large numbers: noise where a strong decay makes the true gradient small, most of it in the gradient of A_log.


def _decay(g: Tensor) -> Tensor:
    """Returns `exp(G_i - G_j)` for j <= i, else 0, as `[n, h, C, C]` from `[n, h, C, 1]`."""
    size = g.shape[2]
    not_earlier = torch.ones(size, size, dtype=torch.bool, device=g.device).triu()
    # Masked before exp: above the diagonal G_i - G_j is positive and could overflow.
    earlier = (g - g.transpose(2, 3)).masked_fill(not_earlier, -torch.inf).exp()
    return earlier + torch.eye(size, dtype=g.dtype, device=g.device)


def _suffix_sums(each: Tensor) -> Tensor:
    """Returns the sum of the decays after each token of a chunk, G_C - G_i, without a difference."""
    return F.pad(each[:, :, 1:].flip(2).cumsum(2).flip(2), (0, 0, 0, 1))


class _Solved(torch.autograd.Function):
    """`(I + A)^-1 B` for a strictly lower triangular A. It saves the inverse, so that backward is two products."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, right: Tensor) -> Tensor:
        unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True)
        solved = inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inverse, solved = ctx.saved_tensors
        d_right = inverse.transpose(2, 3) @ gradients[0]
        return -(d_right @ solved.transpose(2, 3)), d_right


class _WholeDocuments(torch.autograd.Function):
    """A scan whose pieces are whole documents."""

    @staticmethod
    def forward(ctx: Any, local: _ChunkScan, *tensors: Tensor) -> Tensor:
        states, _, begun = local.leave(tensors)
        out, kept = local.finish(tensors, local.meanwhile(tensors, begun), states[:0])
        ctx.local, ctx.count = local, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    @no_compile_backward
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], list(saved[ctx.count :])
        wanted, begun = ctx.local.leave_backward(tensors, kept, gradients[0])
        begun = ctx.local.meanwhile_backward(tensors, kept, begun, gradients[0])
        return None, *ctx.local.finish_backward(tensors, kept, begun, gradients[0], wanted[:0])


class _StateGradients(NamedTuple):
    """The gradients of the state after each chunk, and in a rule with a delta their contribution to that of U."""

    states: Tensor
    through_keys: Tensor | None


class _ChunkScan(LocalScan):
    """The recurrences of the states, of the segments' maps, and of the states' gradients."""

    def __init__(self, chunks: TokenChunks) -> None:
        self.chunks = chunks

    # -- forward -----------------------------------------------------------------------------------------------------

    def leave(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        terms, chunks = _Prepared(*tensors), self.chunks
        states = terms.updates.new_empty(*terms.keys.shape[:3], terms.updates.shape[-1])
        updates = torch.empty_like(terms.updates) if terms.has_delta else terms.updates
        self._walk(terms, chunks.single, None, states, updates)
        first = self._walk(terms, chunks.first, None, states, updates)
        middle, transitions = self._maps(terms, chunks.middle)
        constants = _join_classes([(chunks.first, first), (chunks.middle, middle)])
        return constants, _join_classes([(chunks.middle, transitions)]), (states, updates)

    def meanwhile(self, tensors: Sequence[Tensor], begun: Any) -> Any:
        terms, (states, updates) = _Prepared(*tensors), begun
        out = torch.empty_like(terms.updates)
        self._outputs(terms, slice(0, self.chunks.num_known), states, updates, out)
        return states, updates, out

    def finish(self, tensors: Sequence[Tensor], begun: Any, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        terms, chunks = _Prepared(*tensors), self.chunks
        all_states, updates, out = begun
        for pieces, given in _split_by_class(states, chunks.middle, chunks.last):
            self._walk(terms, pieces, given, all_states, updates)
        self._outputs(terms, slice(chunks.num_known, None), all_states, updates, out)
        return out, [all_states, updates]

    def _walk(
        self, terms: _Prepared, pieces: PieceClass, given: Tensor | None, states: Tensor | None, updates: Tensor
    ) -> Tensor:
        """Writes the state before each chunk to `states`, unless None, and in a rule with a delta U to `updates`.

        Returns:
            The state after each piece.
        """
        shape = len(pieces.pieces), *terms.keys.shape[1:3], terms.updates.shape[-1]
        state = terms.updates.new_zeros(shape) if given is None else given.clone()
        for start, active in pieces.steps:
            now, here = slice(start, start + active), state[:active]
            self._begin(start, here)
            if states is not None:
                states[now] = here
            if terms.has_delta:
                torch.sub(terms.updates[now], terms.reads[now] @ here, out=updates[now])
            torch.add(terms.carry[now] * here, terms.keys[now] @ updates[now], out=here)
        return state

    def _maps(self, terms: _Prepared, pieces: PieceClass) -> tuple[Tensor, Tensor]:
        """Returns E and M of each piece."""
        heads, dk, dv = terms.keys.shape[1], terms.keys.shape[2], terms.updates.shape[-1]
        if not terms.has_delta:
            kept = terms.carry.new_ones(len(pieces.pieces), *terms.carry.shape[1:])
            for start, active in pieces.steps:
                self._begin(start, kept[:active])
                kept[:active] *= terms.carry[start : start + active]
            return self._walk(terms, pieces, None, None, terms.updates), kept
        # One recurrence computes both E, from a state of zero, and M, from the unit matrix without updates.
        padded = terms.updates.new_zeros(len(pieces.pieces), heads, dk, dv + dk)
        padded[..., dv:] = torch.eye(dk, dtype=padded.dtype, device=padded.device)
        for start, active in pieces.steps:
            now, here = slice(start, start + active), padded[:active]
            self._begin(start, here)
            update = terms.reads[now] @ here
            update.neg_()[..., :dv] += terms.updates[now]
            torch.add(terms.carry[now] * here, terms.keys[now] @ update, out=here)
        return padded[..., :dv], padded[..., dv:]

    def _outputs(self, terms: _Prepared, chunks: slice, states: Tensor, updates: Tensor, out: Tensor) -> None:
        """Writes the outputs of chunks whose states are known."""
        torch.add(terms.queries[chunks] @ states[chunks], terms.attention[chunks] @ updates[chunks], out=out[chunks])

    # -- backward ----------------------------------------------------------------------------------------------------

    def leave_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], gradient: Tensor) -> tuple[Tensor, Any]:
        terms, chunks = _Prepared(*tensors), self.chunks
        d_updates = terms.attention.transpose(2, 3) @ gradient  # by the chunk's outputs; the state adds to it later
        wanted = terms.queries.transpose(2, 3) @ gradient
        if terms.has_delta:
            wanted -= terms.reads.transpose(2, 3) @ d_updates
        after = _StateGradients(torch.empty_like(kept[0]), torch.empty_like(d_updates) if terms.has_delta else None)
        self._walk_back(terms, chunks.single, None, wanted, after)
        last = self._walk_back(terms, chunks.last, None, wanted, after)
        middle = self._walk_back(terms, chunks.middle, None, wanted, None)
        before = _join_classes([(chunks.middle, middle), (chunks.last, last)])
        return before, (d_updates, wanted, after)

    def meanwhile_backward(self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor) -> Any:
        before, updates = kept
        return *begun, gradient @ updates.transpose(2, 3), gradient @ before.transpose(2, 3)

    def finish_backward(
        self, tensors: Sequence[Tensor], kept: list[Tensor], begun: Any, gradient: Tensor, states: Tensor
    ) -> list[Tensor]:
        terms, chunks = _Prepared(*tensors), self.chunks
        before, updates = kept
        d_updates, wanted, after, d_attention, d_queries = begun
        for pieces, given in _split_by_class(states, chunks.first, chunks.middle):
            self._walk_back(terms, pieces, given, wanted, after)
        after, through_keys = after
        d_updates = d_updates + (terms.keys.transpose(2, 3) @ after if through_keys is None else through_keys)
        d_reads = -(d_updates @ before.transpose(2, 3)) if terms.has_delta else torch.zeros_like(terms.reads)
        d_carry = (after * before).sum(-1, keepdim=True)
        if terms.carry.shape[2] == 1:
            d_carry = d_carry.sum(2, keepdim=True)
        return [d_updates, d_reads, d_attention, d_queries, after @ updates.transpose(2, 3), d_carry]

    def _walk_back(
        self, terms: _Prepared, pieces: PieceClass, given: Tensor | None, wanted: Tensor, after: _StateGradients | None
    ) -> Tensor:
        """Writes the gradients of the states to `after`.

        Args:
            given: the gradients of the states after the pieces; None for zero.
            wanted: the gradients of the states before the chunks, by the chunks' own outputs.
            after: the gradients of the states after the chunks; None to write none.

        Returns:
            The gradient of the state before each piece.
        """
        state = wanted.new_zeros(len(pieces.pieces), *wanted.shape[1:]) if given is None else given.clone()
        for start, active in reversed(pieces.steps):
            now, here = slice(start, start + active), state[:active]
            if after is not None:
                after.states[now] = here
            before = wanted[now] + terms.carry[now] * here
            if terms.has_delta:
                through_keys = terms.keys[now].transpose(2, 3) @ here
                if after is not None and after.through_keys is not None:
                    after.through_keys[now] = through_keys
                before -= terms.reads[now].transpose(2, 3) @ through_keys
            here.copy_(before)
            self._begin(start, here)
        return state

    def _begin(self, chunk: int, state: Tensor) -> None:
        """Resets the state, its map or its gradient at the first chunk of a piece where pieces follow each other."""
        if self.chunks.begins is not None:
            state.masked_fill_(self.chunks.begins[chunk], 0)


def _join_classes(classes: list[tuple[PieceClass, Tensor]]) -> Tensor:
    """Puts values for the pieces of several classes into the order of the rows."""
    found = {piece: value for members, values in classes for piece, value in zip(members.pieces, values, strict=True)}
    # An index made of a list would make the host wait for the device.
    return torch.stack([found[piece] for piece in sorted(found)]) if found else classes[0][1]


def _split_by_class(values: Tensor, *classes: PieceClass) -> list[tuple[PieceClass, Tensor]]:
    """Undoes `_join_classes`: returns, for each class, the values of its pieces."""
    pieces = sorted(piece for members in classes for piece in members.pieces)
    own = dict(zip(pieces, values, strict=True))
    return [
        (members, torch.stack([own[piece] for piece in members.pieces]) if members.pieces else values[:0])
        for members in classes
    ]
