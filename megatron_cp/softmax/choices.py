"""Choices of keys by their scores, alike to the bit in every layout and number of ranks.

Mixture of block attention (MoBA, arXiv 2502.13189) cuts the keys of a document into blocks. A query head scores each
earlier block by the mean of its keys, and attends to the best ones and to its own block up to itself:

    s_b = q . mean of k over b
    C = the own block, and the topk - 1 blocks of the largest s, the earlier of equal ones

Shapes: `n` queries, `c` keys, `m` blocks, `g` key/value heads, `h` query heads, `d` features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp.executor.arguments import accumulation_dtype

# Scores are products of this many queries and keys, filled up with zeros where there are fewer, so that scores and
# choices do not depend on how many there are. Both are multiples of the numbers that libraries compute together: of 256
# keys MKL computes the last four otherwise in float64.
ROWS, COLUMNS = 64, 192


def product_tiles(queries: Tensor, keys: Tensor) -> Iterator[Tensor]:
    """Yields `[ROWS, h, COLUMNS]` products of at most `ROWS` queries `[n, h, d]` with keys `[c, g, d]`, in order."""
    queries = pad(queries, (0, 0, 0, 0, 0, ROWS - len(queries))).unflatten(1, (keys.shape[1], -1))
    of_groups = queries.transpose(0, 1).flatten(1, 2)
    for part in pad(keys, (0, 0, 0, 0, 0, -len(keys) % COLUMNS)).split(COLUMNS):
        products = torch.bmm(of_groups, part.permute(1, 2, 0))
        yield products.unflatten(1, (ROWS, -1)).transpose(0, 1).flatten(1, 2)


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


def best_blocks(queries: Tensor, keys: Tensor, own: Tensor, size: int, topk: int) -> tuple[Tensor, Tensor]:
    """Chooses blocks of keys for each head of at most `ROWS` queries of one document.

    Args:
        queries: `[n, h, d]`.
        keys: `[c, g, d]`, from the document's first on.
        own: `[n]` the block of each query itself.
        size: keys of a block.
        topk: blocks to choose, the own one among them; all where there are fewer.

    Returns:
        `[n, h, min(topk, m)]` numbers of blocks, ascending, and True for those that are chosen. The others come last.
    """
    number, dtype = -(-len(keys) // size), accumulation_dtype(keys.dtype)
    means = _means(keys[: len(keys) // size * size].to(dtype), size).to(keys.dtype).to(dtype)  # rounded as MoBA's
    means = pad(means, (0, 0, 0, 0, 0, number - len(means)))  # the last block may not be whole: it is nobody's past
    scores = torch.cat([*product_tiles(queries.to(dtype), means)], -1)[: len(queries), :, :number]
    limit, blocks, own = torch.finfo(dtype).max, torch.arange(number, device=own.device), own[:, None, None]
    scores = scores.nan_to_num(limit, limit, -limit).masked_fill_(blocks == own, torch.inf)
    visible = (blocks <= own).expand_as(scores)
    scores.masked_fill_(~visible, -torch.inf)
    columns, valid = first_of_largest(scores.flatten(0, 1), visible.flatten(0, 1), topk)
    return columns.unflatten(0, scores.shape[:2]), valid.unflatten(0, scores.shape[:2])


def _means(keys: Tensor, size: int) -> Tensor:
    """Returns `[m, g, d]` means of blocks, added up in pairs: a sum's order depends on the size of a block alone.

    The order in which torch sums over an axis depends on the other axes, and is not promised for any of them.
    """
    sums, left = keys.unflatten(0, (-1, size)), size
    while left > 1:
        sums = pad(sums, (0, 0, 0, 0, 0, left % 2)).unflatten(1, (-1, 2))
        sums = sums[:, :, 0] + sums[:, :, 1]
        left = sums.shape[1]
    return sums[:, 0] / size
