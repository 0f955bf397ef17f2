"""`SelectionWork`: computes attention of queries that choose among the keys that they see, in blocks of queries.

An indexer of `H` heads (DeepSeek-V3.2's) scores the keys that a query sees, and the query attends to the best:

    I_k = sum over H of w_H relu(q_H . k)        C = the topk keys of the largest I, the earlier of equal ones
    P = softmax of the scores over C             out = P V

The indexer learns from the attention it chose for, by `KL(T || softmax I)` over C or over all keys that a query sees,
where T is the mean of P over heads, as a constant. Or each query head chooses blocks of keys; see `best_blocks`.

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
from megatron_cp.executor.attend import Queries, QueryGradients
from megatron_cp.executor.transfers import Keys
from megatron_cp.layout.bands import ranges_seen
from megatron_cp.layout.packing import IntArray, Packing
from megatron_cp.layout.tiles import Tiles
from megatron_cp.plan.attention import Attend
from megatron_cp.plan.head_chunks import HeadChunk
from megatron_cp.softmax.choices import ROWS, best_blocks, first_of_largest, product_tiles
from megatron_cp.softmax.kernels.reference import cut_to_blocks

_MAX_GATHERED = 1 << 22  # elements of gathered keys in memory at once
_MAX_SCORES = 1 << 24  # scores in memory at once, of queries that share their keys
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
class _ArrivedKeys:
    """Keys `[s, g, d]`, values `[s, g, v]` and index keys `[s, D]`, as they arrived."""

    keys: Tensor
    values: Tensor
    index: Tensor


@dataclass(frozen=True)
class _Picks:
    """Keys of some queries.

    Attributes:
        rows: the queries, rows of q.
        keys: `[n, K]` rows of keys, or `[1, K]` if these queries have the same.
        valid: `[n, 1, 1, K]` the keys that count, or `[n, g, r, K]` if each head has its own.
    """

    rows: slice
    keys: Tensor
    valid: Tensor


class SelectionWork:
    """Computes a rank's tiles for queries that choose; see `TileWork`.

    Args:
        call: the arguments that both directions share.
        index_q: `[t, H, D]` queries of the indexer, or None where the caller has chosen.
        weights: `[t, H]` the weights of its heads, or None.
        given: `[t, topk]` places of keys in the stream, -1 for none: the caller's choice, and in backward that of
            forward; None for the indexer's. Of blocks `[t, h, topk]`, the places of their first keys.
        chosen: of the same shape, filled with -1; forward writes the choice, each key or block once.
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

    def forward(self, rows: Queries, keys: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Chooses, and writes the output of all queries."""
        assert self.chosen is not None
        q, out, lse = rows
        out.zero_()
        lse.fill_(-torch.inf)
        arrived = self._split(*keys)
        for block in self._blocks(tiles, q.device):
            columns, valid = self._choose(block, arrived, q) if self.given is None else self._look_up(block)
            places = block.places[columns].masked_fill(~valid, -1).to(self.chosen.dtype)
            self.chosen[block.rows, ..., : places.shape[-1]] = places
            for picks in self._picks(block, columns, valid, arrived):
                scores = self._scores(q, picks, arrived)
                values = arrived.values[picks.keys].to(scores.dtype)
                part_lse = scores.logsumexp(-1)
                weights = _exp(scores, part_lse)
                lse[:, picks.rows] = part_lse.flatten(1).T.to(lse.dtype)
                out[picks.rows] = torch.einsum("ngrk,nkgv->ngrv", weights, values).flatten(1, 2).to(out.dtype)
                if self.call.loss == "sparse":
                    self._diverge(picks, weights, arrived)
            if self.call.loss == "dense":
                for picks in self._all_keys(block, q):
                    scores = self._scores(q, picks, arrived)
                    self._diverge(picks, _exp(scores, scores.logsumexp(-1)), arrived)

    def backward(self, rows: QueryGradients, keys: Keys, gradients: Keys, tiles: Tiles, chunk: HeadChunk) -> None:
        """Writes the gradients of queries, keys and values, and of index keys beside the values."""
        dq, dout, q, out, lse, dlse = rows
        dq.zero_()
        arrived, dtype = self._split(*keys), accumulation_dtype(q.dtype)
        sums = _ArrivedKeys(*(torch.zeros_like(x, dtype=dtype) for x in (arrived.keys, arrived.values, arrived.index)))
        if self.divergence_gradient is not None:
            assert self.index_q is not None
            assert self.weights is not None
            self.index_gradients = torch.zeros_like(self.index_q), torch.zeros_like(self.weights)
        groups = arrived.keys.shape[1]
        for block in self._blocks(tiles, q.device):
            for picks in self._picks(block, *self._look_up(block), arrived):
                scores = self._scores(q, picks, arrived)
                queries, dhead = (x[picks.rows].unflatten(1, (groups, -1)).to(dtype) for x in (q, dout))
                own_keys, values = (x[picks.keys].to(dtype) for x in (arrived.keys, arrived.values))
                weights = _exp(scores, lse[:, picks.rows].T.unflatten(1, (groups, -1)).to(dtype))
                row_sums = (dhead * out[picks.rows].unflatten(1, (groups, -1)).to(dtype)).sum(-1, keepdim=True)
                if dlse is not None:
                    row_sums -= dlse[:, picks.rows].T.unflatten(1, (groups, -1)).unsqueeze(-1)
                dscores = torch.einsum("ngrv,nkgv->ngrk", dhead, values).sub_(row_sums).mul_(weights)
                dscores *= self.call.scale
                dq[picks.rows] = torch.einsum("ngrk,nkgd->ngrd", dscores, own_keys).flatten(1, 2).to(dq.dtype)
                _add(sums.keys, picks, dscores, queries)
                _add(sums.values, picks, weights, dhead)
                if self.divergence_gradient is not None and self.call.loss == "sparse":
                    self._diverge_backward(picks, weights, arrived, sums.index)
            if self.divergence_gradient is not None and self.call.loss == "dense":
                for picks in self._all_keys(block, q):
                    scores = self._scores(q, picks, arrived)
                    self._diverge_backward(picks, _exp(scores, scores.logsumexp(-1)), arrived, sums.index)
        self._join(sums, *gradients)

    # -- rows as they travel -------------------------------------------------------------------------------------------

    def _split(self, k: Tensor, v: Tensor) -> _ArrivedKeys:
        """Returns keys, values and index keys of rows `[s, 1, features]` as they travel."""
        step = self.call.step
        assert step.selection is not None
        k, v, size = k.squeeze(1), v.squeeze(1), step.selection.head_dim
        values, index = v[:, : v.shape[1] - size], v[:, v.shape[1] - size :]
        if step.latent is not None:  # a key is the latent, then the shared key
            return _ArrivedKeys(torch.cat([values, k], 1).unsqueeze(1), values.unsqueeze(1), index)
        heads = step.selection.kv_heads
        return _ArrivedKeys(k.unflatten(1, (heads, -1)), values.unflatten(1, (heads, -1)), index)

    def _join(self, sums: _ArrivedKeys, dk: Tensor, dv: Tensor) -> None:
        """Writes gradients into rows as they travel, the adjoint of `_split`."""
        dkeys, dvalues = sums.keys.flatten(1), sums.values.flatten(1)
        if self.call.step.latent is not None:
            size = dvalues.shape[1]
            dvalues = dvalues.add_(dkeys[:, :size])
            dkeys = dkeys[:, size:]
        dk.copy_(dkeys.unsqueeze(1))
        dv.copy_(torch.cat([dvalues, sums.index], 1).unsqueeze(1))

    def _blocks(self, tiles: Tiles, device: torch.device) -> Iterator[_QueryBlock]:
        step = self.call.step
        assert step.selection is not None
        return _blocks(tiles, device, step.mask.packing, of_one_path=step.selection.block > 0)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _choose(self, block: _QueryBlock, arrived: _ArrivedKeys, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `[n, K]` columns, ascending, and those that are chosen keys rather than fillers.

        Of blocks of keys it returns `[n, h, K]` columns of their first keys.
        """
        assert self.call.step.selection is not None
        topk, size = self.call.step.selection.topk, self._size_in(block)
        if size:
            own = (block.visible.sum(-1) - 1) // size
            numbers, valid = best_blocks(q[block.rows], arrived.keys[block.columns], own, size, topk)
            return numbers * size, valid
        scores = self._index_scores_of_all(block, arrived).masked_fill_(~block.visible, -torch.inf)
        return first_of_largest(scores, block.visible, topk)

    def _index_scores_of_all(self, block: _QueryBlock, arrived: _ArrivedKeys) -> Tensor:
        assert self.index_q is not None
        assert self.weights is not None
        dtype, count = accumulation_dtype(arrived.index.dtype), len(block.visible)
        weights = pad(self.weights[block.rows].to(dtype), (0, 0, 0, ROWS - count)).unsqueeze(-1)
        queries, keys = self.index_q[block.rows].to(dtype), arrived.index[block.columns].to(dtype).unsqueeze(1)
        products = (x.relu_() if self.call.relu else x for x in product_tiles(queries, keys))
        tiles = [(x * weights).sum(1) for x in products]
        found: Tensor = torch.cat(tiles, 1)[:count, : len(block.columns)].nan_to_num_(torch.inf, torch.inf, -torch.inf)
        return found

    def _size_in(self, block: _QueryBlock) -> int:
        """Returns the keys of a block of keys, at most those that there are; 0 where keys are chosen."""
        assert self.call.step.selection is not None
        return min(self.call.step.selection.block, len(block.columns))

    def _look_up(self, block: _QueryBlock) -> tuple[Tensor, Tensor]:
        """Returns what `_choose` does, for a choice that is made; keys that the mask hides are left out."""
        assert self.given is not None
        places = self.given[block.rows].to(block.places.dtype).sort(-1).values
        columns = torch.searchsorted(block.places, places).clamp_(max=len(block.places) - 1)
        valid = (block.places[columns] == places) & block.visible.gather(1, columns.flatten(1)).view_as(columns)
        valid[..., 1:] &= places[..., 1:] != places[..., :-1]
        if size := self._size_in(block):
            valid &= columns % size == 0
        if columns.shape[-1] > (most := len(block.places)):  # a short document has no more keys to choose
            columns = columns.where(valid, most).sort(-1).values[..., :most]
            valid = columns < most
        return columns.where(valid, 0), valid

    def _picks(self, block: _QueryBlock, columns: Tensor, valid: Tensor, arrived: _ArrivedKeys) -> Iterator[_Picks]:
        """Yields parts of a block whose keys, or whose scores where queries share keys, are few enough."""
        groups = arrived.keys.shape[1]
        if size := self._size_in(block):
            # Heads choose apart, so that gathered keys would be more numbers than the scores of all keys.
            for part, queries in block.parts(_MAX_SCORES // (columns.shape[1] * len(block.columns))):
                seen = _keys_of_blocks(columns[part] // size, valid[part], size, block.visible[part])
                yield _Picks(queries, block.columns.unsqueeze(0), seen.unflatten(1, (groups, -1)))
            return
        for part, queries in block.parts(_MAX_GATHERED // max(columns.shape[1] * arrived.keys[0].numel(), 1)):
            yield _Picks(queries, block.columns[columns[part]], valid[part, None, None])

    def _all_keys(self, block: _QueryBlock, q: Tensor) -> Iterator[_Picks]:
        for part, queries in block.parts(_MAX_SCORES // (q.shape[1] * len(block.columns))):
            yield _Picks(queries, block.columns.unsqueeze(0), block.visible[part, None, None])

    # -- scores and the indexer's loss ---------------------------------------------------------------------------------

    def _scores(self, q: Tensor, picks: _Picks, arrived: _ArrivedKeys) -> Tensor:
        """Returns `[n, g, r, K]` scores, -inf where no key is meant."""
        dtype = accumulation_dtype(q.dtype)
        keys = arrived.keys[picks.keys].to(dtype)
        queries = q[picks.rows].unflatten(1, (keys.shape[2], -1)).to(dtype)
        scores = torch.einsum("ngrd,nkgd->ngrk", queries, keys).mul_(self.call.scale)
        return scores.masked_fill_(~picks.valid, -torch.inf)

    def _index_scores(self, picks: _Picks, arrived: _ArrivedKeys) -> tuple[Tensor, Tensor]:
        """Returns index scores `[n, K]`, and products with each head `[n, H, K]`."""
        assert self.index_q is not None
        assert self.weights is not None
        dtype = accumulation_dtype(arrived.index.dtype)
        keys = arrived.index[picks.keys].to(dtype)
        products = torch.einsum("nhd,nkd->nhk", self.index_q[picks.rows].to(dtype), keys)
        if self.call.relu:
            products = products.relu_()
        scores = torch.einsum("nhk,nh->nk", products, self.weights[picks.rows].to(dtype))
        return scores.masked_fill_(~picks.valid[:, 0, 0], -torch.inf), products

    def _diverge(self, picks: _Picks, weights: Tensor, arrived: _ArrivedKeys) -> None:
        assert self.divergence is not None
        target = _mean_of_heads(weights)
        logits = self._index_scores(picks, arrived)[0].log_softmax(-1).masked_fill_(~picks.valid[:, 0, 0], 0)
        terms = target * (target.clamp_min(_SMALLEST).log() - logits)
        self.divergence[picks.rows] = terms.sum(-1).to(self.divergence.dtype)

    def _diverge_backward(self, picks: _Picks, weights: Tensor, arrived: _ArrivedKeys, dindex: Tensor) -> None:
        assert self.index_q is not None
        assert self.weights is not None
        assert self.divergence_gradient is not None
        assert self.index_gradients is not None
        scores, products = self._index_scores(picks, arrived)
        dscores = scores.softmax(-1).masked_fill_(~picks.valid[:, 0, 0], 0) - _mean_of_heads(weights)
        dscores *= self.divergence_gradient[picks.rows].to(dscores.dtype).unsqueeze(-1)
        dproducts = dscores.unsqueeze(1) * self.weights[picks.rows].to(dscores.dtype).unsqueeze(-1)
        if self.call.relu:
            dproducts *= products > 0
        dindex_q, dweights = self.index_gradients
        keys = arrived.index[picks.keys].to(dscores.dtype)
        dindex_q[picks.rows] = torch.einsum("nhk,nkd->nhd", dproducts, keys).to(dindex_q.dtype)
        dweights[picks.rows] = torch.einsum("nk,nhk->nh", dscores, products).to(dweights.dtype)
        queries = self.index_q[picks.rows].to(dscores.dtype)
        _add(dindex.unsqueeze(1), picks, dproducts.unsqueeze(1), queries.unsqueeze(1))


@dataclass(frozen=True)
class _QueryBlock:
    """At most `ROWS` queries that follow one another.

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

    def parts(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Yields parts of the block of `count` queries, or of one: rows of the block, and of q."""
        start, size = self.rows.start, self.rows.stop - self.rows.start
        for first in range(0, size, max(count, 1)):
            last = min(first + max(count, 1), size)
            yield slice(first, last), slice(start + first, start + last)


def _blocks(tiles: Tiles, device: torch.device, packing: Packing, *, of_one_path: bool) -> Iterator[_QueryBlock]:
    """Yields the queries that see a key, in blocks of one document's, or of one path of a document that branches.

    A block's queries share columns, of which each may see some only, and a number that is not finite passes from the
    others to it. With `of_one_path` each block sees its document's keys from the first on.
    """
    places = tiles.memo(("places", device), lambda: on_device(tiles.k_tokens, device, torch.int64))
    rises = tiles.memo("keys rise", lambda: bool((np.diff(tiles.k_tokens) > 0).all()))
    for bands in tiles.memo(("selection", of_one_path), lambda: _cut(tiles, packing, of_one_path=of_one_path)):
        first, last = int(bands[:, 0].min()), int(bands[:, 1].max())
        ranges = zip(*(edges.tolist() for edges in ranges_seen(bands)), strict=True)
        columns = torch.cat([torch.arange(*each, device=device) for each in ranges])
        ahead = columns - torch.arange(first, last, device=device).unsqueeze(1)
        visible = torch.zeros_like(ahead, dtype=torch.bool)
        for q_start, q_end, k_start, k_end, lo, hi in bands.tolist():
            rows = slice(q_start - first, q_end - first)
            visible[rows] |= (columns >= k_start) & (columns < k_end) & (ahead[rows] >= lo) & (ahead[rows] <= hi)
        own = places[columns]
        if not rises:
            own, order = own.sort()
            columns, visible = columns[order], visible[:, order]
        yield _QueryBlock(slice(first, last), columns, own, visible)


def _cut(tiles: Tiles, packing: Packing, *, of_one_path: bool) -> list[IntArray]:
    blocks = cut_to_blocks(tiles.bands, ROWS)
    if of_one_path:
        return blocks
    paths = np.searchsorted(packing.barriers, tiles.q_tokens, side="right")
    # Keys that stand for several tokens are seen by a few queries more for each: a band of its own.
    joined: list[list[IntArray]] = []
    start = end = k_start = k_end = -1
    for block in blocks:
        (first, last), (k_first, k_last) = block[0, :2].tolist(), (int(block[:, 2].min()), int(block[:, 3].max()))
        fits = first == end and last - start <= ROWS and k_first < k_end and k_start < k_last
        if fits and paths[first] == paths[start]:
            joined[-1].append(block)
            k_start, k_end = min(k_start, k_first), max(k_end, k_last)
        else:
            joined.append([block])
            start, k_start, k_end = first, k_first, k_last
        end = last
    return [np.concatenate(blocks) for blocks in joined]


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns the weights of a softmax, zero for queries that have no key."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


def _mean_of_heads(weights: Tensor) -> Tensor:
    """Returns `[n, K]` the distribution that the indexer learns from."""
    total = weights.sum((1, 2))
    return total / total.sum(-1, keepdim=True).clamp_min(_SMALLEST)


def _keys_of_blocks(numbers: Tensor, valid: Tensor, size: int, visible: Tensor) -> Tensor:
    """Returns `[n, h, c]` the keys of chosen blocks `[n, h, K]` among those that are visible `[n, c]`."""
    count = -(-visible.shape[1] // size)
    chosen = torch.zeros(*numbers.shape[:2], count + 1, dtype=torch.bool, device=numbers.device)
    chosen = chosen.scatter_(-1, numbers.where(valid, count), value=True)[..., :count]
    return chosen.repeat_interleave(size, -1)[..., : visible.shape[1]] & visible.unsqueeze(1)


def _add(total: Tensor, picks: _Picks, weights: Tensor, vectors: Tensor) -> None:
    """Adds products of weights `[n, g, r, K]`, zero for fillers, and vectors `[n, g, r, d]` to rows `[s, g, d]`."""
    rows = "kgd" if len(picks.keys) == 1 else "nkgd"
    found = torch.einsum(f"ngrk,ngrd->{rows}", weights, vectors)
    total.index_add_(0, picks.keys.flatten(), found.reshape(-1, *total.shape[1:]))
