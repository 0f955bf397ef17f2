"""`Selection`: computes attention of queries that choose among the keys that they see, in blocks of queries.

An indexer of `H` heads (DeepSeek-V3.2's) scores the keys that a query sees, and the query attends to the best:

    I_k = sum over H of w_H relu(q_H . k)        C = the topk keys of the largest I, the earlier of equal ones
    P = softmax of the scores over C             out = P V

The indexer learns from the attention it chose for, by `KL(T || softmax I)` over C or over all keys that a query sees,
where T is the mean of P over heads, as a constant.

Shapes: `n` queries of a block, `c` keys that any of them sees, `K` chosen keys, `g` key/value heads, `r` query heads of
each, `d` and `v` features of a key and a value, `H` and `D` heads and features of the indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.exchange.device import on_device
from megatron_cp.executor.arguments import accumulation_dtype
from megatron_cp.layout.bands import ranges_seen
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.softmax.kernels.reference import cut_to_blocks

# Index scores are products of this many queries and keys, filled up with zeros where there are fewer: a score then has
# the same bits in every layout and number of ranks, and so has the choice.
_ROWS, _COLUMNS = 64, 256
_MAX_GATHERED = 1 << 22  # elements of gathered keys in memory at once
_SMALLEST = 1e-10  # of a probability's logarithm and of a sum of probabilities, as in Megatron's loss


@dataclass(frozen=True)
class SelectionCall:
    """The arguments of a selection that forward and backward share.

    Attributes:
        step: the plan's attention.
        scale: scores are multiplied by it.
        relu: True for index scores with relu.
        loss: "sparse" for a divergence over chosen keys, "dense" over all that the mask shows; None for none.
    """

    step: Attend
    scale: float
    relu: bool
    loss: str | None


@dataclass(frozen=True)
class _Rows:
    """Keys `[s, g, d]`, values `[s, g, v]` and index keys `[s, D]` of the rows that arrived."""

    keys: Tensor
    values: Tensor
    index: Tensor


@dataclass(frozen=True)
class _Picks:
    """Keys `[n, K]` of some queries, `rows` of q: rows of keys, of which `valid` ones count."""

    rows: slice
    keys: Tensor
    valid: Tensor


class Selection:
    """Computes a rank's tiles for queries that choose; see `TileWork`.

    Args:
        call: the arguments that both directions share.
        index_q: `[t, H, D]` queries of the indexer, or None where the caller has chosen.
        weights: `[t, H]` the weights of its heads, or None.
        given: `[t, topk]` places of keys in the stream, -1 for none: the caller's choice, and in backward that of
            forward; None for the indexer's.
        chosen: `[t, topk]`, filled with -1; forward writes the choice, each key once.
        divergence: `[t]`, zero; forward writes the loss of each query.
        divergence_gradient: `[t]` or None, for backward.

    Attributes:
        index_gradients: gradients of `index_q` and `weights`, after a backward that had a gradient of the loss.
    """

    unrounded_partials = True

    def __init__(
        self, call: SelectionCall, index_q: Tensor | None, weights: Tensor | None, given: Tensor | None, *,
        chosen: Tensor | None = None, divergence: Tensor | None = None, divergence_gradient: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.call, self.index_q, self.weights, self.given = call, index_q, weights, given
        self.chosen, self.divergence, self.divergence_gradient = chosen, divergence, divergence_gradient
        self.index_gradients: tuple[Tensor, Tensor] | None = None

    def forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, chunk: HeadChunk
    ) -> None:
        """Chooses, and writes the output of all queries."""
        assert self.chosen is not None
        out.zero_()
        lse.fill_(-torch.inf)
        rows = self._split(k, v)
        for block in _blocks(tiles, q.device):
            columns, valid = self._choose(block, rows) if self.given is None else self._look_up(block)
            places = block.places[columns].masked_fill(~valid, -1).to(self.chosen.dtype)
            self.chosen[block.rows, : places.shape[1]] = places
            for picks in self._picks(block, columns, valid, rows):
                scores = self._scores(q, picks, rows)
                values = rows.values[picks.keys].to(scores.dtype)
                part_lse = scores.logsumexp(-1)
                weights = _exp(scores, part_lse)
                lse[:, picks.rows] = part_lse.flatten(1).T.to(lse.dtype)
                out[picks.rows] = torch.einsum("ngrk,nkgv->ngrv", weights, values).flatten(1, 2).to(out.dtype)
                if self.call.loss == "sparse":
                    self._diverge(picks, weights, rows)
            if self.call.loss == "dense":
                for picks in self._all_keys(block, rows):
                    scores = self._scores(q, picks, rows)
                    self._diverge(picks, _exp(scores, scores.logsumexp(-1)), rows)

    def backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
        lse: Tensor, dlse: Tensor | None, tiles: Tiles, chunk: HeadChunk,
    ) -> None:  # fmt: skip
        """Writes the gradients of queries, keys and values, and of index keys beside the values."""
        dq.zero_()
        rows, dtype = self._split(k, v), accumulation_dtype(q.dtype)
        sums = _Rows(*(torch.zeros_like(x, dtype=dtype) for x in (rows.keys, rows.values, rows.index)))
        if self.divergence_gradient is not None:
            assert self.index_q is not None
            assert self.weights is not None
            self.index_gradients = torch.zeros_like(self.index_q), torch.zeros_like(self.weights)
        groups = rows.keys.shape[1]
        for block in _blocks(tiles, q.device):
            for picks in self._picks(block, *self._look_up(block), rows):
                scores = self._scores(q, picks, rows)
                queries, dhead = (x[picks.rows].unflatten(1, (groups, -1)).to(dtype) for x in (q, dout))
                keys, values = (x[picks.keys].to(dtype) for x in (rows.keys, rows.values))
                weights = _exp(scores, lse[:, picks.rows].T.unflatten(1, (groups, -1)).to(dtype))
                row_sums = (dhead * out[picks.rows].unflatten(1, (groups, -1)).to(dtype)).sum(-1, keepdim=True)
                dscores = torch.einsum("ngrv,nkgv->ngrk", dhead, values).sub_(row_sums).mul_(weights)
                dscores *= self.call.scale
                dq[picks.rows] = torch.einsum("ngrk,nkgd->ngrd", dscores, keys).flatten(1, 2).to(dq.dtype)
                _add(sums.keys, picks, torch.einsum("ngrk,ngrd->nkgd", dscores, queries))
                _add(sums.values, picks, torch.einsum("ngrk,ngrv->nkgv", weights, dhead))
                if self.divergence_gradient is not None and self.call.loss == "sparse":
                    self._diverge_backward(picks, weights, rows, sums.index)
            if self.divergence_gradient is not None and self.call.loss == "dense":
                for picks in self._all_keys(block, rows):
                    scores = self._scores(q, picks, rows)
                    self._diverge_backward(picks, _exp(scores, scores.logsumexp(-1)), rows, sums.index)
        self._join(sums, dk, dv)

    # -- rows as they travel -------------------------------------------------------------------------------------------

    def _split(self, k: Tensor, v: Tensor) -> _Rows:
        """Returns keys, values and index keys of rows `[s, 1, features]` as they travel."""
        step = self.call.step
        assert step.selection is not None
        k, v, size = k.squeeze(1), v.squeeze(1), step.selection.head_dim
        values, index = v[:, : v.shape[1] - size], v[:, v.shape[1] - size :]
        if step.latent is not None:  # a key is the latent, then the shared key
            return _Rows(torch.cat([values, k], 1).unsqueeze(1), values.unsqueeze(1), index)
        heads = step.selection.kv_heads
        return _Rows(k.unflatten(1, (heads, -1)), values.unflatten(1, (heads, -1)), index)

    def _join(self, sums: _Rows, dk: Tensor, dv: Tensor) -> None:
        """Writes gradients into rows as they travel, the adjoint of `_split`."""
        dkeys, dvalues = sums.keys.flatten(1), sums.values.flatten(1)
        if self.call.step.latent is not None:
            size = dvalues.shape[1]
            dvalues = dvalues.add_(dkeys[:, :size])
            dkeys = dkeys[:, size:]
        dk.copy_(dkeys.unsqueeze(1))
        dv.copy_(torch.cat([dvalues, sums.index], 1).unsqueeze(1))

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _choose(self, block: _Block, rows: _Rows) -> tuple[Tensor, Tensor]:
        """Returns `[n, K]` columns of the block, ascending, and those that are chosen keys rather than fillers."""
        assert self.call.step.selection is not None
        scores = self._index_scores_of_all(block, rows).masked_fill_(~block.visible, -torch.inf)
        return first_of_largest(scores, block.visible, self.call.step.selection.topk)

    def _index_scores_of_all(self, block: _Block, rows: _Rows) -> Tensor:
        assert self.index_q is not None
        assert self.weights is not None
        dtype, count = accumulation_dtype(rows.index.dtype), len(block.visible)
        queries, weights = (
            pad(x[block.rows].to(dtype), (0, 0) * (x.ndim - 1) + (0, _ROWS - count))
            for x in (self.index_q, self.weights)
        )
        keys = rows.index[block.columns].to(dtype)
        keys = pad(keys, (0, 0, 0, -len(keys) % _COLUMNS))
        tiles = []
        for part in keys.split(_COLUMNS):
            products = (queries.flatten(0, 1) @ part.T).unflatten(0, queries.shape[:2])
            tiles.append(((products.relu_() if self.call.relu else products) * weights.unsqueeze(-1)).sum(1))
        found: Tensor = torch.cat(tiles, 1)[:count, : len(block.columns)].nan_to_num_(torch.inf, torch.inf, -torch.inf)
        return found

    def _look_up(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Returns what `_choose` does, for a choice that is made; keys that the mask hides are left out."""
        assert self.given is not None
        places = self.given[block.rows].to(block.places.dtype).sort(-1).values
        columns = torch.searchsorted(block.places, places).clamp_(max=len(block.places) - 1)
        valid = (block.places[columns] == places) & block.visible.gather(1, columns)
        valid[:, 1:] &= places[:, 1:] != places[:, :-1]
        return columns.where(valid, 0), valid

    def _picks(self, block: _Block, columns: Tensor, valid: Tensor, rows: _Rows) -> Iterator[_Picks]:
        """Yields parts of a block whose gathered keys are few enough."""
        size = max(_MAX_GATHERED // max(columns.shape[1] * rows.keys[0].numel(), 1), 1)
        for first in range(0, len(columns), size):
            part = slice(first, min(first + size, len(columns)))
            queries = slice(block.rows.start + part.start, block.rows.start + part.stop)
            yield _Picks(queries, block.columns[columns[part]], valid[part])

    def _all_keys(self, block: _Block, rows: _Rows) -> Iterator[_Picks]:
        columns = torch.arange(len(block.columns), device=block.columns.device).expand_as(block.visible)
        return self._picks(block, columns, block.visible, rows)

    # -- scores and the indexer's loss ---------------------------------------------------------------------------------

    def _scores(self, q: Tensor, picks: _Picks, rows: _Rows) -> Tensor:
        """Returns `[n, g, r, K]` scores, -inf where no key is meant."""
        dtype = accumulation_dtype(q.dtype)
        keys = rows.keys[picks.keys].to(dtype)
        queries = q[picks.rows].unflatten(1, (keys.shape[2], -1)).to(dtype)
        scores = torch.einsum("ngrd,nkgd->ngrk", queries, keys).mul_(self.call.scale)
        return scores.masked_fill_(~picks.valid[:, None, None], -torch.inf)

    def _index_scores(self, picks: _Picks, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Returns index scores `[n, K]`, products with each head `[n, H, K]`, and the index keys `[n, K, D]`."""
        assert self.index_q is not None
        assert self.weights is not None
        dtype = accumulation_dtype(rows.index.dtype)
        keys = rows.index[picks.keys].to(dtype)
        products = torch.einsum("nhd,nkd->nhk", self.index_q[picks.rows].to(dtype), keys)
        if self.call.relu:
            products = products.relu_()
        scores = torch.einsum("nhk,nh->nk", products, self.weights[picks.rows].to(dtype))
        return scores.masked_fill_(~picks.valid, -torch.inf), products, keys

    def _diverge(self, picks: _Picks, weights: Tensor, rows: _Rows) -> None:
        assert self.divergence is not None
        target = _mean_of_heads(weights)
        logits = self._index_scores(picks, rows)[0].log_softmax(-1).masked_fill_(~picks.valid, 0)
        terms = target * (target.clamp_min(_SMALLEST).log() - logits)
        self.divergence[picks.rows] = terms.sum(-1).to(self.divergence.dtype)

    def _diverge_backward(self, picks: _Picks, weights: Tensor, rows: _Rows, dindex: Tensor) -> None:
        assert self.index_q is not None
        assert self.weights is not None
        assert self.divergence_gradient is not None
        assert self.index_gradients is not None
        scores, products, keys = self._index_scores(picks, rows)
        dscores = scores.softmax(-1).masked_fill_(~picks.valid, 0) - _mean_of_heads(weights)
        dscores *= self.divergence_gradient[picks.rows].to(dscores.dtype).unsqueeze(-1)
        dproducts = dscores.unsqueeze(1) * self.weights[picks.rows].to(dscores.dtype).unsqueeze(-1)
        if self.call.relu:
            dproducts *= products > 0
        dindex_q, dweights = self.index_gradients
        dindex_q[picks.rows] = torch.einsum("nhk,nkd->nhd", dproducts, keys).to(dindex_q.dtype)
        dweights[picks.rows] = torch.einsum("nk,nhk->nh", dscores, products).to(dweights.dtype)
        queries = self.index_q[picks.rows].to(dscores.dtype)
        _add(dindex, picks, torch.einsum("nhk,nhd->nkd", dproducts, queries))


def first_of_largest(scores: Tensor, visible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Chooses the largest scores of each row, and of equal ones the first.

    Args:
        scores: `[n, c]`, -inf where not visible.
        visible: `[n, c]`.
        count: the number to choose; fewer where fewer are visible.

    Returns:
        `[n, min(count, c)]` columns, ascending, and True for those that are chosen. The others come last and are 0.
    """
    size, count = scores.shape[1], min(count, scores.shape[1])
    least = scores.topk(count).values[:, -1:]
    above = scores > least
    level = (scores == least) & visible
    chosen = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    numbers = torch.arange(size, device=scores.device)
    columns = numbers.where(chosen, size).topk(count, largest=False, sorted=True).values
    valid = columns < size
    return columns.where(valid, 0), valid


@dataclass(frozen=True)
class _Block:
    """At most `_ROWS` queries that see the same bands.

    Attributes:
        rows: rows of q.
        columns: `[c]` rows of keys, in the order of the stream.
        places: `[c]` their places in the stream.
        visible: `[n, c]`.
    """

    rows: slice
    columns: Tensor
    places: Tensor
    visible: Tensor


def _blocks(tiles: Tiles, device: torch.device) -> Iterator[_Block]:
    places = tiles.memo(("places", device), lambda: on_device(tiles.k_tokens, device, torch.int64))
    rises = bool((np.diff(tiles.k_tokens) > 0).all())
    for bands in tiles.memo("selection", lambda: cut_to_blocks(tiles.bands, _ROWS)):
        first, last = bands[0, :2].tolist()
        ranges = zip(*(edges.tolist() for edges in ranges_seen(bands)), strict=True)
        columns = torch.cat([torch.arange(*each, device=device) for each in ranges])
        ahead = columns - torch.arange(first, last, device=device).unsqueeze(1)
        visible = torch.zeros_like(ahead, dtype=torch.bool)
        for k_start, k_end, lo, hi in bands[:, 2:].tolist():
            visible |= (columns >= k_start) & (columns < k_end) & (ahead >= lo) & (ahead <= hi)
        own = places[columns]
        if not rises:
            own, order = own.sort()
            columns, visible = columns[order], visible[:, order]
        yield _Block(slice(first, last), columns, own, visible)


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns the weights of a softmax, zero for queries that have no key."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


def _mean_of_heads(weights: Tensor) -> Tensor:
    """Returns `[n, K]` the distribution that the indexer learns from."""
    total = weights.sum((1, 2))
    return total / total.sum(-1, keepdim=True).clamp_min(_SMALLEST)


def _add(total: Tensor, picks: _Picks, gradients: Tensor) -> None:
    """Adds gradients of picked rows to the rows; those of fillers are zero."""
    total.index_add_(0, picks.keys.flatten(), gradients.flatten(0, 1))
