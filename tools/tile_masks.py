"""Measures the quality of planned tiles on the masks of UltraAttn (SC'25): `python -m tools.tile_masks [--seconds 60]`.

First in UltraAttn's own terms: its tables of blocks, contiguous owners, its load caps, and its units of volume (a chunk
of queries is 1, of keys and values 2; in backward queries and outputs' gradients are 2). Its stored optima are not
here, so CP-SAT finds them again. Its program gives every diagonal block to its owner, which is not asked for here.
Then in bytes, with free cut points and 1.05 of the mean work, on 8 ranks and on 64 ranks of 8 hosts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import megatron_cp as cp
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.tiles import TileProblem, TileWeights, solve, tiles_of
from megatron_cp.planner.tiles.problem import cost

MASKS = ("full", "causal", "strided", "global_local", "star", "streaming")
UNITS = {"forward": TileWeights(1, 1, 2, 0), "backward": TileWeights(2, 1, 2, 2)}
_FULL, _HALF = 2, 1  # work of a block, and of one on the diagonal of a causal mask
_BLOCKS = {"full": 8, "causal": 8, "strided": 16, "global_local": 16, "star": 8, "streaming": 8}
# In whole blocks, `ceil(W / 8)` with what UltraAttn adds for causal and streaming masks, half a block.
_LOAD_CAPS = {"full": 8.0, "causal": 4.5, "strided": 7.0, "global_local": 6.0, "star": 3.0, "streaming": 3.5}
TOKENS, HOST_COST = 8192, 8


def block_table(name: str) -> IntArray:
    """`[blocks, blocks]` work of each block: 2 of a whole one, 1 of half of one."""
    count = _BLOCKS[name]
    packing = cp.Packing([4 * count])
    mask = cp.Mask.named(packing, name)
    problem = tiles_of(mask, cp.Layout.contiguous(packing, count), weights=UNITS["forward"], load_cap=mask.area)
    table = np.zeros((count, count), dtype=np.int64)
    blocks = (problem.rows.owners[problem.tile_rows], problem.columns.owners[problem.tile_columns])
    np.add.at(table, blocks, problem.work)
    return np.where(table == 16, _FULL, np.where(table > 0, _HALF, 0))


def block_problem(name: str, weights: TileWeights) -> TileProblem:
    """A mask of UltraAttn's on 8 ranks, in its blocks and under its load cap."""
    table = block_table(name)
    owners = np.arange(len(table)) * 8 // len(table)
    return TileProblem.from_table(table, owners, owners, 8, weights, load_cap=round(_LOAD_CAPS[name] * _FULL))


def _row(name: str, way: str, problem: TileProblem, seconds: float) -> str:
    """Returns a line of the table: the cost, the bound and the time of both stages."""
    began = time.perf_counter()
    quick = solve(problem)
    fast_seconds = time.perf_counter() - began
    fast = cost(problem, quick.ranks)
    found = solve(problem, search_seconds=seconds) if seconds and not quick.optimal else quick
    exact = cost(problem, found.ranks)
    proven = "proven" if found.optimal else "not proven"
    return (
        f"| {name} | {way} | {problem.num_tiles} | {fast:,} | {fast_seconds:.2f} | {exact:,} | {proven} | "
        f"{quick.bound:,} | {found.bound:,} | {found.seconds:.1f} | {fast / exact:.3f} | {fast / found.bound:.3f} |"
    )


_HEAD = (
    "| mask | direction | tiles | fast | s | exact | | bound | with solver | s | fast / exact | fast / best bound |\n"
    "|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|"
)


def _large(name: str, way: str, weights: TileWeights) -> str:
    """Returns a line of the table of 64 ranks: every layout, and other solvers on the problem of the best one."""
    packing, found, at_query_owners = cp.Packing([8 * TOKENS]), [], []
    mask = cp.Mask.named(packing, name)
    layouts = {
        "contiguous": cp.Layout.contiguous(packing, 64),
        "zigzag": cp.Layout.zigzag(packing, 64),
        "balanced": cp.Layout.balanced(packing, 64, mask=mask),
    }
    for layout in layouts.values():
        problem = tiles_of(mask, layout, weights=weights, hosts=np.arange(64) // 8, host_cost=HOST_COST)
        solution = solve(problem)
        found.append((cost(problem, solution.ranks), solution.bound, solution.seconds, problem.num_tiles))
        at_query_owners.append(cost(problem, problem.rows.owners[problem.tile_rows]))
    best = min(range(3), key=lambda number: found[number][0])
    fast, bound, seconds, tiles = found[best]
    all_keys = packing.total // 64 * (weights.col_in + weights.col_back) * (7 + 56 * HOST_COST)
    shown = " | ".join(f"{each[0]:,}" for each in found)
    return (
        f"| {name} | {way} | {shown} | {list(layouts)[best]} | {tiles} | {bound:,} | {fast / bound:.2f} | "
        f"{min(at_query_owners) / fast:.2f} | {all_keys / fast:.2f} | {seconds:.1f} |"
    )


def main() -> None:
    """Prints three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the exact stage, for each problem (60)")
    parser.add_argument("--masks", default=",".join(MASKS), help="those to print")
    options = parser.parse_args()
    masks = options.masks.split(",")
    print(f"\n### UltraAttn's blocks and units, 8 ranks\n\n{_HEAD}")
    for name in masks:
        for way, weights in UNITS.items():
            print(_row(name, way, block_problem(name, weights), options.seconds), flush=True)
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 128}
    in_bytes = {"forward": TileWeights.forward(**shape), "backward": TileWeights.backward(**shape)}
    print(f"\n### Bytes of one head of 128, {TOKENS:,} tokens, free cut points, 1.05 of the mean, 8 ranks\n\n{_HEAD}")
    packing = cp.Packing([TOKENS])
    for name in masks:
        for way, weights in in_bytes.items():
            problem = tiles_of(cp.Mask.named(packing, name), cp.Layout.contiguous(packing, 8), weights=weights)
            print(_row(name, way, problem, options.seconds), flush=True)
    print(f"\n### {8 * TOKENS:,} tokens, 64 ranks on 8 hosts, a byte between hosts counts {HOST_COST} times\n")
    print(
        "| mask | direction | contiguous | zigzag | balanced | best | tiles | its bound | fast / bound | exact / fast |"
        " all_gather / fast | s |"
    )
    print("|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|")
    for name in masks:
        for way, weights in in_bytes.items():
            print(_large(name, way, weights), flush=True)


if __name__ == "__main__":
    main()
