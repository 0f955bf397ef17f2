"""Compares planned tiles with the other schemes, cell by cell, in the simulator.

Run `python -m tools.tile_cells [--sizes 8:64 64:512]`.

A cell is a mask, documents, heads, tokens in all and ranks on full hosts of one machine. Every scheme is taken in its
best layout, degree and number of head chunks, forward and backward together; ring and zigzag ring are p2p in those
layouts. Tiles are assigned by the fast stage alone, in the degrees that `auto` looks at. The ratio is of the best other
scheme over the best of tiled and a2a+tiled: above 1 tiles win.

`auto` knows before it assigns tiles what they take at least. Where that is no less than the best candidate so far
takes, tiles cannot win: they are not assigned here either, unless asked for with `--all`, and a cell has the bound, as
>= ms.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import megatron_cp as cp
from megatron_cp.plan.plan import Plan, Price
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.choose import milliseconds_for_tiles
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.predict.bound import bounds_of_directions
from megatron_cp.planner.predict.price import priced
from megatron_cp.planner.tiled import bound_of_tiles

MASKS = ("full", "causal", "strided", "global_local", "star", "streaming")
HEAD_DIM = 128
_SHARES = (0.37, 0.05, 0.31, 0.09, 0.18)  # of five documents
TILED = ("tiled", "a2a+tiled")
_RINGS = {"contiguous": "ring", "zigzag": "zigzag ring"}  # p2p, by layout
COLUMNS = ("ring", "zigzag ring", "all_gather", "exact", "a2a", "a2a+p2p", "a2a+all_gather", "a2a+exact")


class Cell(NamedTuple):
    """A cell of the grid."""

    documents: int
    heads: int
    kv_heads: int
    ranks: int
    tokens: int
    mask: str


class Tiles(NamedTuple):
    """The tiles of one scheme in a cell.

    Attributes:
        bound: lower bound in milliseconds, known before tiles are assigned.
        found: predicted milliseconds; None if tiles were not assigned.
        of_schedule: lower bound in milliseconds for the assigned tiles, in any order.
        rounds: rounds of forward and of backward.
        layout: name of the layout.
    """

    bound: float
    found: float | None = None
    of_schedule: float = 0.0
    rounds: tuple[int, int] = (1, 1)
    layout: str = "contiguous"

    @property
    def least(self) -> float:
        """The predicted milliseconds, or their lower bound if tiles were not assigned."""
        return self.bound if self.found is None else self.found


class Found(NamedTuple):
    """The predicted milliseconds of a cell's schemes; `auto` chooses tiles below `enough`."""

    cell: Cell
    others: dict[str, float]
    tiles: dict[str, Tiles]
    enough: float
    seconds: float

    @property
    def ratio(self) -> float:
        """The time of the best other scheme over that of tiles: above 1 if tiles are faster."""
        return min(self.others.values()) / min(each.least for each in self.tiles.values())

    @property
    def is_skipped(self) -> bool:
        """True if `auto` assigns no tiles."""
        return all(each.bound >= self.enough for each in self.tiles.values())

    @property
    def is_taken(self) -> bool:
        """True if `auto` would choose tiles that it has assigned."""
        return any(each.found is not None and each.found < self.enough for each in self.tiles.values())


def packing_of(cell: Cell) -> cp.Packing:
    """Returns a packing of one document, or of five with irregular lengths."""
    if cell.documents == 1:
        return cp.Packing([cell.tokens])
    lengths = [int(share * cell.tokens) | 1 for share in _SHARES[1:]]
    return cp.Packing([cell.tokens - sum(lengths), *lengths])


def plans_of(cell: Cell, layout: cp.Layout, mask: cp.Mask, scheme: str, on: Machine) -> Iterator[Plan]:
    """Yields a scheme's plans in every degree that leaves no rank without heads, and in the chunks that it may take."""
    record = SCHEMES[scheme]
    degrees: list[int | None] = [None]
    if record.is_product:
        degrees = [u for u in (2, 4, 8, 16) if u < cell.ranks and cell.kv_heads % u == 0]
    chunks = (None, 1) if record.takes_chunks and record.chunks_keys and cell.kv_heads > 1 else (None,)
    if record.assigns_tiles:
        host = min(8, cell.ranks // 2) if cell.ranks > 8 else 2
        degrees, chunks = [u for u in degrees if u in (None, host)], (None,)
    for degree, count in itertools.product(degrees, chunks):
        yield cp.plan_attention(
            layout.packing, layout, heads=cell.heads, kv_heads=cell.kv_heads, head_dim=HEAD_DIM, mask=mask,
            scheme=scheme, ulysses_degree=degree, head_chunks=count, hardware=on,
        )  # fmt: skip


def judged(cell: Cell, on: Machine, *, assigns_all: bool) -> Found:
    """Prices all schemes of one cell."""
    began, packing, topology = time.perf_counter(), packing_of(cell), on.topology(cell.ranks)
    mask = cp.Mask.named(packing, cell.mask)
    layouts = {name: getattr(cp.Layout, name)(packing, cell.ranks) for name in ("contiguous", "zigzag")}
    layouts["balanced"] = cp.Layout.balanced(packing, cell.ranks, mask=mask)
    others, alike, candidates = (
        dict.fromkeys(COLUMNS, float("inf")),
        dict[tuple[str, str, int], Plan](),
        list[tuple[Price, Plan]](),
    )
    for name, layout in layouts.items():
        for scheme in ("a2a", "exact", "a2a+exact", "a2a+all_gather", "all_gather", "p2p", "a2a+p2p"):
            column = _RINGS.get(name) if scheme == "p2p" else scheme
            for plan in plans_of(cell, layout, mask, scheme, on) if column else ():
                alike.setdefault((name, scheme.replace("exact", "tiled"), plan.ulysses_degree), plan)
                assert column is not None
                if sum(bounds_of_directions(plan, on, topology, 2)) < others[column]:
                    price = priced(plan, on, topology)
                    others[column] = min(others[column], price.total)
                    candidates.append((price, plan))
    enough, least = min(map(milliseconds_for_tiles, candidates)), min(others.values())
    tiles = dict[str, Tiles]()
    for scheme, name in itertools.product(TILED, reversed(layouts)):
        for degree in _degrees_of_tiles(cell, scheme):
            made = Tiles(sum(bound_of_tiles(alike[name, scheme, degree], on, topology, 2, float("inf"))), layout=name)
            known = [least, *(each.found for each in tiles.values() if each.found is not None)]
            if made.bound < min(known) or assigns_all:
                (plan,) = plans_of(cell, layouts[name], mask, scheme, on)
                made = _assigned(plan, made, on)
            both = (made, tiles.get(scheme, made))
            tiles[scheme] = min(both, key=lambda each: (each.found is None, each.least))
    return Found(cell, others, tiles, enough, time.perf_counter() - began)


def _degrees_of_tiles(cell: Cell, scheme: str) -> list[int]:
    """Returns the degrees that `auto` considers for tiles: the ranks of a host, or 2."""
    if not SCHEMES[scheme].is_product:
        return [1]
    host = 8 if cell.ranks > 8 else 2
    return [host] if cell.kv_heads % host == 0 else []


def _assigned(plan: Plan, known: Tiles, on: Machine) -> Tiles:
    assert plan.attend is not None
    assert plan.attend.tiled is not None
    tiled, price = plan.attend.tiled, priced(plan, on)
    bound = sum(each.bound for each in tiled.schedules)
    return Tiles(known.bound, price.total, bound, tiled.rounds, known.layout)


def row_of(found: Found) -> str:
    """Returns a line of the table."""
    cell = found.cell
    shown = ["" if np.isinf(found.others[name]) else f"{found.others[name]:.3f}" for name in COLUMNS]
    for name in TILED:
        each = found.tiles.get(name)
        shown.append("" if each is None else f"{each.found:.3f}" if each.found is not None else f">= {each.bound:.3f}")
    played = [each for each in found.tiles.values() if each.found is not None]
    best = min(played, key=lambda each: each.least, default=None)
    schedule = "" if best is None else f"{best.rounds[0]}, {best.rounds[1]}"
    layout = "" if best is None else best.layout
    over = "" if best is None else f"{best.least / best.of_schedule:.2f}"
    sign = "" if found.ratio >= 1 or played else "<= "
    auto = "tiles" if found.is_taken else "skips" if found.is_skipped else "no tiles"
    heads = f"{cell.heads}:{cell.kv_heads}"
    cells = (
        cell.mask, cell.documents, heads, cell.ranks, f"{cell.tokens // 1024}k", *shown, f"{sign}{found.ratio:.2f}",
        layout, schedule, over, auto,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _mean(ratios: list[float]) -> float:
    return float(np.exp(np.log(ratios).mean()))


def summary(rows: list[Found]) -> Iterator[str]:
    """Returns, by mask, heads and ranks, the geometric mean of the ratios and the number of cells that tiles win."""
    yield "| mask | heads | ranks | best other / best tiles, geometric mean | least | most | tiles win |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    groups = defaultdict[tuple[str, int, int], list[float]](list)
    for row in rows:
        groups[row.cell.mask, row.cell.heads, row.cell.ranks].append(row.ratio)
    for (mask, heads, ranks), ratios in sorted(groups.items(), key=lambda pair: (MASKS.index(pair[0][0]), pair[0])):
        wins = sum(ratio > 1 for ratio in ratios)
        shown = f"{_mean(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} | {wins} of {len(ratios)}"
        yield f"| {mask} | {heads} | {ranks} | {shown} |"
    won = [row.ratio for row in rows if row.ratio > 1]
    yield ""
    yield f"Tiles win {len(won)} of {len(rows)} cells, there by a geometric mean of {_mean(won) if won else 1:.2f}."
    skipped = [row for row in rows if row.is_skipped]
    known = [row for row in skipped if any(each.found is not None for each in row.tiles.values())]
    wrong = sum(row.is_taken for row in known)
    below = sum(each.found < each.bound for row in rows for each in row.tiles.values() if each.found is not None)
    yield (
        f"auto takes tiles in {sum(row.is_taken for row in rows)} cells. Before it assigns any, it skips "
        f"{len(skipped)}. In {len(known)} of these tiles were assigned here all the same: it would have taken them in "
        f"{wrong}. Ways of tiles that were predicted to take less than the bound known before: {below}."
    )


def main() -> None:
    """Prints every cell, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpu", default="h100")
    sizes = [f"{ranks}:{tokens}" for ranks in (8, 16, 32, 64) for tokens in (64, 128, 256, 512)]
    parser.add_argument("--sizes", nargs="*", default=sizes, help="ranks:tokens, these in 1024")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no other cell is begun")
    parser.add_argument("--heads", nargs="*", default=["1:1", "32:32"], help="query heads:key/value heads")
    parser.add_argument("--documents", type=int, nargs="*", default=[1, 5], choices=[1, 5])
    parser.add_argument("--masks", nargs="*", default=list(MASKS), choices=MASKS)
    parser.add_argument("--all", action="store_true", help="assign tiles where they cannot win too")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    print(f"{machine(args.gpu).describe()}\n")
    head = (
        "mask",
        "docs",
        "heads",
        "ranks",
        "tokens",
        *COLUMNS,
        *TILED,
        "ratio",
        "tiles' layout",
        "rounds",
        "over its bound",
        "auto",
    )
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    rows, began = [], time.perf_counter()
    cells = list(itertools.product(args.sizes, args.heads, args.documents, args.masks))
    for size, heads, documents, mask in cells:
        if time.perf_counter() - began > 60 * args.minutes:
            break
        (ranks, tokens), (of_queries, of_keys) = (map(int, each.split(":")) for each in (size, heads))
        cell = Cell(documents, of_queries, of_keys, ranks, tokens * 1024, mask)
        rows.append(judged(cell, machine(args.gpu), assigns_all=args.all))
        print(row_of(rows[-1]), flush=True)
    print()
    print("\n".join(summary(rows)))
    print(f"\n{len(rows)} of {len(cells)} cells in {sum(row.seconds for row in rows):.0f} seconds")


if __name__ == "__main__":
    main()
