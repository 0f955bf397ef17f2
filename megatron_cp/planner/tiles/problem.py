"""`TileProblem`: the assignment of a mask's tiles to ranks, as arrays, and the bytes that ranks send for an answer.

The stream of queries and the stream of keys are cut into *chunks* of one owner each. A *tile* is a chunk of queries (a
row) and a chunk of keys (a column) with visible pairs between them. An answer gives every tile to one rank. A rank that
computes tiles of a row that it does not own receives the row once and sends a result back; columns work the same way.

    in     foreign rows * row_in + foreign columns * col_in
           + own rows, once for each other rank that has tiles of them, * row_back, + own columns so counted * col_back
    out    the same with the two ends of each transfer exchanged
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, as_number, checked_integer
from megatron_cp.layout.array_types import IntArray
from megatron_cp.layout.memo import frozen
from megatron_cp.layout.packing import host_array, is_integral

MOST_TILES = 1 << 16  # tiles of a problem: full attention on 256 ranks
_IMBALANCE = 1.05  # the default of the busiest rank's work over the mean
_MOST_BYTES = 1 << 53  # below, sums of costs are exact in integers and floats of 64 bits


@dataclass(frozen=True)
class TileWeights:
    """Bytes that one token of a row, or of a column, takes on its way to a rank that does not own it, and back.

    Attributes:
        row_in, row_back: the inputs of a query that a tile needs, and its results.
        col_in, col_back: the same for a key.

    Example:
        >>> TileWeights.forward(heads=2, kv_heads=1, head_dim=64, item_size=2)
        TileWeights(row_in=256, row_back=520, col_in=256, col_back=0)
    """

    row_in: int
    row_back: int
    col_in: int
    col_back: int

    def __post_init__(self) -> None:
        for name in ("row_in", "row_back", "col_in", "col_back"):
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), 0, 2**40))

    @classmethod
    def forward(
        cls, *, heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, item_size: int = 2
    ) -> TileWeights:
        """Returns forward's weights: queries, keys and values go out; outputs and log-sum-exps return in at least fp32.

        Args:
            heads, kv_heads: heads of queries, and of keys.
            head_dim, value_head_dim: elements of a head of queries and keys, and of values; None for the same.
            item_size: bytes of an element.
        """
        heads, kv_heads, size, value_size, item = _checked_shape(heads, kv_heads, head_dim, value_head_dim, item_size)
        back = heads * (value_size + 1) * max(item, 4)
        return cls(heads * size * item, back, kv_heads * (size + value_size) * item, 0)

    @classmethod
    def backward(
        cls, *, heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, item_size: int = 2
    ) -> TileWeights:
        """Returns backward's weights.

        Queries, outputs' gradients, log-sum-exps, row sums, keys and values go out; gradients of q, k and v return.

        Args:
            heads, kv_heads: heads of queries, and of keys.
            head_dim, value_head_dim: elements of a head of queries and keys, and of values; None for the same.
            item_size: bytes of an element.
        """
        heads, kv_heads, size, value_size, item = _checked_shape(heads, kv_heads, head_dim, value_head_dim, item_size)
        row = heads * ((size + value_size) * item + 2 * max(item, 4))
        column = kv_heads * (size + value_size) * item
        return cls(row, heads * size * item, column, column)


@dataclass(frozen=True, eq=False)
class AxisChunks:
    """The chunks of one axis of a mask: each has one range of the stream or several, all of one owner.

    Attributes:
        starts: `[ranges]` the start of each range, rising from 0; a range ends at the start of the next.
        total: tokens of the stream.
        chunk_of_range: `[ranges]` the chunk that each range belongs to.
        owners: `[chunks]` the rank that holds each chunk's tokens.
    """

    starts: IntArray
    total: int
    chunk_of_range: IntArray
    owners: IntArray

    @cached_property
    def sizes(self) -> IntArray:
        """`[chunks]` the tokens of each chunk."""
        found = np.zeros(self.owners.size, dtype=np.int64)
        np.add.at(found, self.chunk_of_range, np.diff(self.starts, append=self.total))
        return frozen(found)


class Lines(NamedTuple):
    """The rows or the columns of a problem.

    Attributes:
        line_of_tile: `[tiles]` the row, or column, of each tile.
        owners: `[lines]` the rank that holds each.
        out, back: `[lines]` the bytes of each on its way to a rank, and back.
    """

    line_of_tile: IntArray
    owners: IntArray
    out: IntArray
    back: IntArray


@dataclass(frozen=True, eq=False)
class TileProblem:
    """The tiles of a mask, the owners of their chunks, the bytes of a token, and the most work of one rank.

    `tiles_of` makes one from a mask and layouts; the arrays are not checked, and become read-only.

    Attributes:
        num_ranks: ranks that compute.
        rows, columns: the chunks of queries and of keys.
        tile_rows, tile_columns: `[tiles]` the chunks of each tile, no two tiles with the same pair.
        work: `[tiles]` visible pairs of each, at least 1.
        weights: bytes of a token.
        load_cap: work that one rank may have at most; `default_load_cap` where it is not given.
        hosts: `[num_ranks]` the host of each rank, numbered from 0; None for one host.
        host_cost: the cost of a byte between hosts, in bytes within a host. It counts in the answer's cost, not in the
            bytes that are reported.

    Raises:
        ArgumentError: more than `MOST_TILES` tiles, hosts of other ranks, weights that are too large, or a load cap
            that no answer keeps: below the mean, or below the largest tile.
    """

    num_ranks: int
    rows: AxisChunks
    columns: AxisChunks
    tile_rows: IntArray
    tile_columns: IntArray
    work: IntArray
    weights: TileWeights
    load_cap: int = None  # type: ignore[assignment]  # an integer once the problem is made
    hosts: IntArray | None = None
    host_cost: int = 1

    def __post_init__(self) -> None:
        weights, rows, columns = self.weights, self.rows, self.columns
        if not isinstance(weights, TileWeights):
            raise ArgumentError("weights", weights, "TileWeights, as in TileWeights.forward(heads=8, ...)")
        for array in (self.tile_rows, self.tile_columns, self.work):
            frozen(array)
        if self.work.size > MOST_TILES:
            remedy = "Use fewer ranks for the tiles (a2a+tiled), or a layout with fewer fragments."
            raise ArgumentError("work", f"{self.work.size} tiles", f"at most {MOST_TILES} tiles", remedy)
        if self.hosts is not None:
            object.__setattr__(self, "hosts", _checked_ranks("hosts", self.hosts, self.num_ranks, self.num_ranks))
        object.__setattr__(self, "host_cost", checked_integer("host_cost", self.host_cost, 1, 10**6))
        tokens = rows.total * (weights.row_in + weights.row_back) + columns.total * (weights.col_in + weights.col_back)
        if int(tokens) * self.num_ranks * self.host_cost >= _MOST_BYTES or sum(self.work.tolist()) >= _MOST_BYTES:
            raise ArgumentError("weights", weights, "bytes and pairs of which all ranks have fewer than 2**53 in all")
        object.__setattr__(self, "load_cap", self._checked_cap(self.load_cap))

    # -- what is derived -------------------------------------------------------------------------------------------

    @property
    def num_tiles(self) -> int:
        return int(self.work.size)

    @cached_property
    def total(self) -> int:
        """The work of all tiles."""
        return int(self.work.sum())

    @cached_property
    def pair_cost(self) -> IntArray:
        """`[num_ranks, num_ranks]` the cost of a byte from one rank to another; 0 to itself."""
        if self.hosts is None:
            return frozen(1 - np.eye(self.num_ranks, dtype=np.int64))
        apart = self.hosts[:, None] != self.hosts
        return frozen(np.where(apart, self.host_cost, 1 - np.eye(self.num_ranks, dtype=np.int64)))

    @cached_property
    def line_costs(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The bytes of each row on its way in and back, `[rows]`, and of each column, `[columns]`."""
        weights, rows, columns = self.weights, self.rows.sizes, self.columns.sizes
        costs = (rows * weights.row_in, rows * weights.row_back, columns * weights.col_in, columns * weights.col_back)
        return tuple(map(frozen, costs))  # type: ignore[return-value]

    @cached_property
    def axes(self) -> tuple[Lines, Lines]:
        """The rows and the columns."""
        row_in, row_back, col_in, col_back = self.line_costs
        rows = Lines(self.tile_rows, self.rows.owners, row_in, row_back)
        return rows, Lines(self.tile_columns, self.columns.owners, col_in, col_back)

    def with_weights(self, weights: TileWeights) -> TileProblem:
        """Returns the same tiles with other bytes of a token."""
        return replace(self, weights=weights)

    def single_host(self) -> TileProblem:
        """Returns the same problem with all ranks on one host."""
        return replace(self, hosts=None, host_cost=1)

    def _checked_cap(self, load_cap: int | None) -> int:
        if load_cap is None:
            return default_load_cap(self.work, self.num_ranks)
        load_cap = checked_integer("load_cap", load_cap, 0)
        least = max(-(-self.total // self.num_ranks), int(self.work.max(initial=0)))
        if load_cap < least:
            remedy = f"The mean of {self.num_ranks} ranks and the largest tile must fit under it."
            raise ArgumentError("load_cap", load_cap, f"at least {least}", remedy)
        return load_cap


def default_load_cap(work: IntArray, num_ranks: int, imbalance: float = _IMBALANCE) -> int:
    """Returns `imbalance` times the mean work, or the most work of longest-first assignment where that is more.

    So there is always an answer, and one that the search finds.

    Args:
        work: `[tiles]` visible pairs of each tile.
        num_ranks: the number of ranks that share the work.
        imbalance: the busiest rank's work over the mean, at least 1.

    Raises:
        ArgumentError: an imbalance below 1.
    """
    most = max(num_ranks, _IMBALANCE)  # a single rank has all the work, and the default is always allowed
    if not 1 <= as_number(imbalance) <= most:
        raise ArgumentError("imbalance", imbalance, f"a number from 1 to {most} for {num_ranks} ranks")
    loads = np.bincount(longest_first(work, num_ranks), weights=work, minlength=num_ranks)
    return max(int(float(imbalance) * int(work.sum()) / num_ranks), int(loads.max(initial=0)))


def longest_first(work: IntArray, num_ranks: int) -> IntArray:
    """Assigns each tile, the largest first, to the rank with the least work so far; returns `[tiles]` ranks.

    In rounds of one tile a rank, so that thousands take milliseconds.
    """
    order, loads = np.argsort(-work, kind="stable"), np.zeros(num_ranks, dtype=np.int64)
    ranks = np.empty(work.size, dtype=np.int64)
    for first in range(0, work.size, num_ranks):
        tiles = order[first : first + num_ranks]
        chosen = np.argsort(loads, kind="stable")[: tiles.size]
        ranks[tiles] = chosen
        loads[chosen] += work[tiles]
    return ranks


def volumes(problem: TileProblem, ranks_of_tiles: IntArray, *, weighted: bool = False) -> tuple[IntArray, IntArray]:
    """Counts the bytes that each rank sends and receives for an answer.

    Args:
        problem: the tiles.
        ranks_of_tiles: `[tiles]` the rank that computes each tile.
        weighted: bytes between hosts count `host_cost` times.

    Returns:
        `[num_ranks]` each: bytes sent, bytes received.
    """
    size = problem.num_ranks
    factor = problem.pair_cost if weighted else 1 - np.eye(size, dtype=np.int64)
    sent, received = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for lines, owners, out, back in problem.axes:
        line, rank = np.divmod(np.unique(lines * size + ranks_of_tiles), size)
        owner = owners[line]
        for bytes_of_line, source, target in ((out, owner, rank), (back, rank, owner)):
            moved = bytes_of_line[line] * factor[source, target]
            np.add.at(sent, source, moved)
            np.add.at(received, target, moved)
    return sent, received


def cost(problem: TileProblem, ranks_of_tiles: IntArray) -> int:
    """Returns the quantity to minimise: the most bytes that a rank sends or receives, those between hosts weighted."""
    return max(int(each.max()) for each in volumes(problem, ranks_of_tiles, weighted=True))


def loads(problem: TileProblem, ranks_of_tiles: IntArray) -> IntArray:
    """Returns `[num_ranks]` the work of each rank."""
    found = np.zeros(problem.num_ranks, dtype=np.int64)
    np.add.at(found, ranks_of_tiles, problem.work)
    return found


def check(problem: TileProblem, ranks_of_tiles: IntArray, argument: str = "ranks_of_tiles") -> IntArray:
    """Returns the answer as integers after checking that it fits the problem.

    Raises:
        ArgumentError: another number of tiles, unknown ranks, or a rank with more work than `load_cap`.
    """
    ranks = _checked_ranks(argument, ranks_of_tiles, problem.num_tiles, problem.num_ranks)
    most = int(loads(problem, ranks).max(initial=0))
    if most > problem.load_cap:
        raise ArgumentError(argument, f"a rank with {most} pairs", f"at most load_cap, {problem.load_cap} pairs")
    return ranks


def _checked_ranks(argument: str, values: IntArray, count: int, num_ranks: int) -> IntArray:
    """Returns `count` numbers of ranks, or of hosts, after checking them."""
    given, most = host_array(argument, values), num_ranks - 1
    if given.shape != (count,) or (given.size and not is_integral(given)):
        raise ArgumentError(argument, f"{given.dtype} {given.shape}", f"{count} integers")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= most:
        raise ArgumentError(argument, [int(given.min()), int(given.max())], f"integers from 0 to {most}")
    return frozen(given.astype(np.int64))


def _checked_shape(
    heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None, item_size: int
) -> tuple[int, int, int, int, int]:
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    named = (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("value_head_dim", value_head_dim),
             ("item_size", item_size))  # fmt: skip
    found = [checked_integer(name, value, 1, 2**20) for name, value in named]
    return found[0], found[1], found[2], found[3], found[4]
