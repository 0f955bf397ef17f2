"""Lower bounds on the bytes of the busiest rank, and on time, for any answer. docs/tiles.md has the argument in words.

An *option* (q, p) of a rank is to have tiles of q foreign rows and p foreign columns. It bounds from above the work of
the rank, and from below the bytes that it receives and sends. The bound is the least z for which there are options that
cost no rank more than z and all n ranks together no more than n * z each way, and whose work, at most the load cap for
a rank, adds up to all of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from megatron_cp.errors import ArgumentError, as_number
from megatron_cp.layout.array_types import IntArray
from megatron_cp.planner.tiles.problem import AxisChunks, TileProblem

_DENSE, _SPARSE = 24, 24  # numbers of foreign lines that are told apart: all up to the first, and so many in all
_PRICES = 60  # prices of work that are tried


def lower_bound(problem: TileProblem) -> int:
    """Returns a lower bound on the bytes that the busiest rank sends or receives, in any answer to the problem.

    Bytes between hosts are weighted. The bound is the larger one of two: ranks as they are, and each host as one rank.
    """
    found = _bound(problem, problem.load_cap)
    if problem.hosts is not None and problem.hosts.max(initial=0) > 0:
        hosts = np.unique(problem.hosts, return_inverse=True)[1]
        if (np.bincount(hosts) == np.bincount(hosts)[0]).all():
            members = int(np.bincount(hosts)[0])
            between = _bound(_host_problem(problem, hosts), problem.load_cap * members)
            found = max(found, -(-between * problem.host_cost // members))
    return found


def lower_bound_of_seconds(
    problem: TileProblem, *, pairs_per_second: float, bytes_per_second: float
) -> dict[str, float]:
    """Returns lower bounds on the seconds of any answer: of work, and of transfers. The larger one bounds the answer.

    Args:
        problem: the tiles, on one host or with bytes between hosts weighted.
        pairs_per_second: the rate of attention on a rank.
        bytes_per_second: the rate at which a rank sends, and at the same time receives, within a host.

    Raises:
        ArgumentError: rates that are not positive numbers.
    """
    for name, rate in (("pairs_per_second", pairs_per_second), ("bytes_per_second", bytes_per_second)):
        if not 0 < as_number(rate) < math.inf:
            raise ArgumentError(name, rate, "a positive number")
    share = max(problem.total / problem.num_ranks, float(problem.work.max(initial=0)))
    return {"work": share / pairs_per_second, "transfers": lower_bound(problem) / bytes_per_second}


def _host_problem(problem: TileProblem, hosts: IntArray) -> TileProblem:
    """Returns the problem with each host as one rank: a line that a host needs is sent to it at least once."""
    rows, columns = (
        AxisChunks(chunks.starts, chunks.total, chunks.chunk_of_range, hosts[chunks.owners])
        for chunks in (problem.rows, problem.columns)
    )
    return TileProblem(
        int(hosts.max()) + 1, rows, columns, problem.tile_rows, problem.tile_columns, problem.work, problem.weights,
        load_cap=problem.load_cap * int(np.bincount(hosts)[0]),
    )  # fmt: skip


class _Options(NamedTuple):
    """The options of all ranks, each array `[ranks, options]`.

    Attributes:
        work: the most work of the option.
        received, sent: the fewest bytes that the rank receives and sends.
        moved: bytes of the option's foreign lines, both ways.
    """

    work: IntArray
    received: IntArray
    sent: IntArray
    moved: IntArray


def _bound(problem: TileProblem, cap: int) -> int:
    if problem.num_tiles == 0 or problem.num_ranks == 1:
        return 0
    returned, fetched = _owner_bytes(problem, cap)
    options = _all_options(problem, returned, fetched, cap)
    unit = max(int(np.gcd.reduce(np.concatenate(problem.line_costs))), 1)
    low, high = 0, -(-int(problem.num_ranks * max(sum(each.sum() for each in problem.line_costs), 1)) // unit)
    high *= problem.host_cost
    while low < high:
        middle = (low + high) // 2
        if _is_possible(options, middle * unit, problem.total, problem.num_ranks):
            high = middle
        else:
            low = middle + 1
    return low * unit


def _is_possible(options: _Options, most: int, total: int, ranks: int) -> bool:
    """Tells whether every rank may have an option of at most `most` bytes; True where that is not refuted."""
    allowed = (options.received <= most) & (options.sent <= most)
    work = np.where(allowed, options.work, -1)
    if (work.max(axis=1) < 0).any() or int(work.max(axis=1).sum()) < total:
        return False
    # At any price of work, let every rank take the option with the least bytes minus the price of its work. The sum of
    # these, plus the price of all work, is a lower bound on the bytes of any choice that has all of the work.
    moved = np.where(allowed, options.moved, np.inf)
    low, high = 0.0, float(options.moved.max()) + 1.0
    for _ in range(_PRICES):
        price = (low + high) / 2
        costs = moved - price * options.work
        chosen = costs.argmin(axis=1)[:, None]
        least = float(costs.min(axis=1).sum()) + price * total
        if least > ranks * most + 1e-9 * (ranks * most + price * total):  # rounded floats must not refute
            return False
        done = int(np.take_along_axis(options.work, chosen, axis=1).sum())
        if done == total:
            return True  # these are the cheapest
        low, high = (price, high) if done < total else (low, price)
    return True


def _owner_bytes(problem: TileProblem, cap: int) -> tuple[IntArray, IntArray]:
    """Returns `[ranks]` the fewest bytes that each receives, and sends, as the owner of lines that others must have.

    A line with more work than the cap goes to several ranks, at most one of which is the owner. A rank can keep lines
    of an axis to itself up to the cap's work; any other line that it owns goes to at least one other rank.
    """
    size = problem.num_ranks
    received, sent = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for lines, owners, out, back in problem.axes:
        work = np.zeros(owners.size, dtype=np.int64)
        np.add.at(work, lines, problem.work)
        others = np.maximum(-(-work // max(cap, 1)) - 1, 0)
        for into, cost in ((sent, out), (received, back)):
            np.add.at(into, owners, others * cost)
            for rank in range(size):
                own = (owners == rank) & (work > 0) & (others == 0)
                into[rank] += _excess_cost(work[own], cost[own], cap)
    return received, sent


def _excess_cost(work: IntArray, cost: IntArray, cap: int) -> int:
    """Returns a lower bound on the cost of the lines that exceed the cap: sums the cheapest ones, the last in part."""
    too_much = int(work.sum()) - cap
    if too_much <= 0:
        return 0
    order = np.argsort(cost / work, kind="stable")
    work, cost = work[order], cost[order]
    before = np.cumsum(work) - work
    part = np.clip(too_much - before, 0, work)
    # At most one line counts in part; Python's integers do not overflow.
    return sum(-(-int(c) * int(p) // int(w)) if p < w else int(c) for c, p, w in zip(cost, part, work, strict=True))


def _all_options(problem: TileProblem, received: IntArray, sent: IntArray, cap: int) -> _Options:
    """Returns the options of every rank, including what it receives and sends as an owner."""
    table = np.zeros((problem.rows.owners.size, problem.columns.owners.size), dtype=np.int64)
    table[problem.tile_rows, problem.tile_columns] = problem.work
    found = []
    for rank in range(problem.num_ranks):
        work, own_received, own_sent = _options(problem, table, rank)
        # Every byte is received once: all ranks together receive the bytes of their foreign lines, both ways.
        moved = own_received + own_sent
        found.append((np.minimum(work, cap), own_received + received[rank], own_sent + sent[rank], moved))
    most = max(each[0].size for each in found)
    padded = [[np.pad(array, (0, most - array.size), mode="edge") for array in each] for each in found]
    work, received, sent, moved = (np.stack(arrays) for arrays in zip(*padded, strict=True))
    return _Options(work, received, sent, moved)


def _options(problem: TileProblem, table: IntArray, rank: int) -> tuple[IntArray, IntArray, IntArray]:
    """Returns a rank's most work, and fewest bytes received and sent, for each option (q, p) as a flat array."""
    own_rows, own_columns = problem.rows.owners == rank, problem.columns.owners == rank
    rows, columns = _counts(int((~own_rows).sum())), _counts(int((~own_columns).sum()))
    # Two limits on the same work: by the tiles of rows, and by the tiles of columns.
    work = np.minimum(
        _work_of_counts(table, own_rows, own_columns, rows, columns),
        _work_of_counts(table.T, own_columns, own_rows, columns, rows).T,
    )
    costs = problem.line_costs
    received, sent = (
        _least(row_costs, problem, problem.rows, rank, rows)[:, None]
        + _least(column_costs, problem, problem.columns, rank, columns)
        for row_costs, column_costs in ((costs[0], costs[2]), (costs[1], costs[3]))
    )
    return work.ravel(), received.ravel(), sent.ravel()


def _counts(foreign: int) -> IntArray:
    """Returns numbers of foreign lines to tell apart: all up to 24, above that some, which stand for those below."""
    return np.unique(np.append(np.arange(min(foreign, _DENSE) + 1), np.linspace(0, foreign, _SPARSE).astype(np.int64)))


def _least(costs: IntArray, problem: TileProblem, chunks: AxisChunks, rank: int, counts: IntArray) -> IntArray:
    """Returns `[counts]` the cost of the cheapest foreign lines, as few as each count may stand for."""
    foreign = chunks.owners != rank
    weighted = np.sort((costs * problem.pair_cost[chunks.owners, rank])[foreign])
    return np.append(0, np.cumsum(weighted))[np.append(0, counts[:-1] + 1)]


def _work_of_counts(
    table: IntArray, own_rows: IntArray, own_columns: IntArray, rows: IntArray, columns: IntArray
) -> IntArray:
    """Returns `[rows, columns]` the most work with so many foreign rows and columns.

    A row counts its tiles in own columns and its largest tiles in foreign ones; of foreign rows the best ones count.
    """
    foreign = -np.sort(-table[:, ~own_columns], axis=1)
    reach = np.concatenate([np.zeros((len(table), 1), dtype=np.int64), np.cumsum(foreign, axis=1)], axis=1)
    reach = reach[:, columns] + table[:, own_columns].sum(axis=1)[:, None]
    best = -np.sort(-reach[~own_rows], axis=0)
    best = np.concatenate([np.zeros((1, columns.size), dtype=np.int64), np.cumsum(best, axis=0)])
    return best[rows] + reach[own_rows].sum(axis=0)
