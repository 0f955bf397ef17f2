"""Attention as one softmax over all keys, and the keys that sparse attention chooses, differentiated by autograd.

Nothing of the library computes here.
"""

import numpy as np
import torch


def attend(q, k, v, seen, *, scale, softcap=0.0, sink=None, kept=None, dropout=0.0):
    """Returns the output `[queries, ..., heads, v]` and the log-sum-exp `[..., heads, queries]`, -inf where none is.

    Args:
        q: `[queries, ..., heads, d]`.
        k: `[keys, ..., key heads, d]`.
        v: `[keys, ..., key heads, v]`.
        seen: `[..., queries, keys]` True for the keys that a query sees.
        scale: of the products.
        softcap: of the scores; 0 for none.
        sink: `[heads]` a score that has weight and no value, or None.
        kept: `[..., heads, queries, keys]` the weights that dropout keeps, or None for all.
        dropout: the share of the others.
    """
    scores = scores_of(q, k, scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        # -inf would make NaN of 0 * inf in the gradient; so far below the scores it has no weight either.
        sink = sink.clamp(min=-1e3)
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    has_weight = scores > -torch.inf
    weights = softmax_over(has_weight, scores)[..., : len(k)]
    if kept is not None:
        weights = weights * kept / (1 - dropout)
    out = torch.einsum("...hij,j...hd->i...hd", weights, _for_each_head(v, q))
    nothing = ~has_weight.any(-1)
    return out, scores.masked_fill(nothing[..., None], 0).logsumexp(-1).masked_fill(nothing, -torch.inf)


def scores_of(q, k, scale):
    """Returns `[..., heads, queries, keys]`: the products of queries and keys."""
    return scale * torch.einsum("i...hd,j...hd->...hij", q, _for_each_head(k, q))


def _for_each_head(x, q):
    return x.repeat_interleave(q.shape[-2] // x.shape[-2], -2)


def softmax_over(seen, scores):
    """Returns the softmax over the keys that are seen, and zeros where there are none."""
    has_key = seen.any(-1, keepdim=True)  # keeps NaN out of the gradients of rows that see nothing
    return torch.where(has_key, scores.masked_fill(~seen, -torch.inf), 0).softmax(-1) * has_key


def largest(scores, count):
    """Returns True for the `count` largest of the last axis, the first of equal ones."""
    best = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def index_scores(index_q, index_k, index_weights, relu):
    """Returns `[queries, keys]`: the scores by which an indexer chooses keys."""
    products = torch.einsum("ihd,jd->ihj", index_q, index_k)
    return torch.einsum("ihj,ih->ij", products.relu() if relu else products, index_weights)


def divergence(scores, index, among):
    """Returns each query's divergence of an indexer's softmax from the mean of the heads' `[heads, queries, keys]`."""
    target = softmax_over(among, scores).mean(0).detach()
    logits = index.masked_fill(~among, -torch.inf).masked_fill(~among.any(-1, keepdim=True), 0).log_softmax(-1)
    return (target * (target.clamp_min(1e-10).log() - torch.where(among, logits, 0))).sum(-1)


def chosen_blocks(q, k, block, count):
    """Returns `[queries, heads, blocks]`: the own block of one document, and the best earlier ones by their means.

    `k` has as many heads as `q`.
    """
    means = torch.stack([part.mean(0) for part in k.detach().split(block)])
    numbers, own = torch.arange(len(means)), (torch.arange(len(q)) // block)[:, None, None]
    gates = torch.einsum("ihd,bhd->ihb", q.detach(), means).masked_fill(numbers > own, -torch.inf)
    return largest(gates.masked_fill(numbers == own, torch.inf), count) & (numbers <= own)


def causal_in_blocks(chosen, block, length):
    """Returns `[heads, queries, keys]`: the keys of chosen blocks up to a query's own place."""
    in_block = chosen.repeat_interleave(block, -1)[..., :length].transpose(0, 1)
    return in_block & torch.ones(length, length, dtype=torch.bool).tril()


def kept_by_dropout(places, keys, head, seed, dropout):
    """Returns `[queries, keys]`, True for weights that stay: SplitMix64 of seed, then of head, of query and of key."""
    queries, keys = places.astype(np.uint64), keys.astype(np.uint64)
    with np.errstate(over="ignore"):
        stream = np.uint64(seed)
        for counter in (np.uint64(head), queries[:, None], keys):
            stream = stream + counter * np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                stream = (stream ^ (stream >> np.uint64(shift))) * np.uint64(factor)
            stream = stream ^ (stream >> np.uint64(31))
        return stream.view(np.int64) >= int(dropout * 2**64) - 2**63
