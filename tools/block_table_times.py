"""Measures the time that planned tiles take for block tables that change with each batch.

Run `python -m tools.block_table_times`. A table says which blocks of keys each block of queries sees: itself, and the
best earlier ones by a random score, which favours near blocks and the first block of a document. Times are those of one
`plan_attention`, as a loader calls it: it cuts and assigns tiles, forward and backward, and counts the messages of all
ranks. The table is made before.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import time
import warnings

import numpy as np
from numpy.typing import NDArray

import megatron_cp as cp
from megatron_cp.errors import ArgumentError

TOKENS = 65_536
DOCUMENTS = {1: [TOKENS], 5: [30_000, 1, 20_535, 5_000, 10_000]}


def top_k(packing: cp.Packing, block: int, k: int, seed: int, near: float = 0.5) -> NDArray[np.bool_]:
    """`[blocks, blocks]` for each block of queries its own and the `k - 1` best others before it in its document.

    Args:
        packing: the documents.
        block: tokens of a block.
        k: blocks that a block of queries sees at most.
        seed: of the scores.
        near: how much more a block's distance counts than chance; 0 for chance alone.
    """
    count = -(-packing.total // block)
    random = np.random.default_rng(seed)
    rows, columns = np.indices((count, count))
    first = packing.cu_seqlens[packing.documents_of(np.minimum(rows[:, 0] * block, packing.total - 1))] // block
    scores = random.random((count, count)) + near / (1 + rows - columns).clip(1) + near * (columns == first[:, None])
    scores[(columns > rows) | (columns < first[:, None])] = -1
    scores[np.arange(count), np.arange(count)] = 3
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    table = np.zeros((count, count), dtype=bool)
    np.put_along_axis(table, order, True, axis=1)
    return table & (scores >= 0)


def timed(packing: cp.Packing, mask: cp.Mask, scheme: str, size: int) -> tuple[float, cp.Plan]:
    """Seconds of one core for one plan, and the plan. The layout is a new one, which remembers nothing."""
    layout = cp.Layout.contiguous(packing, size)
    began = time.process_time()
    plan = cp.plan_attention(packing, layout, heads=2, kv_heads=2, head_dim=128, mask=mask, scheme=scheme)
    for forward in (True, False):
        plan.bytes_sent(2, forward=forward)
    return time.process_time() - began, plan


def row(documents: int, block: int, k: int, size: int, scheme: str, batches: int) -> str:
    """Returns a line of the table: the median and the longest time of some batches, and the quality of the plans."""
    packing = cp.Packing(DOCUMENTS[documents])
    seconds, shares, bands = [], [], 0
    for batch in range(batches):
        mask = cp.Mask.from_blocks(packing, top_k(packing, block, k, seed=batch), block, causal=True)
        bands = max(bands, len(mask.bands))
        try:
            taken, plan = timed(packing, mask, scheme, size)
        except ArgumentError as error:
            return f"| {documents} | {block} | {k} | {size} | {scheme} | {bands:,} | refused: {error.given} | | | | |"
        exact = cp.plan_attention(
            packing, cp.Layout.contiguous(packing, size), heads=2, kv_heads=2, head_dim=128, mask=mask,
            scheme=scheme.replace("tiled", "exact"),
        )  # fmt: skip
        most = [sum(max(each.bytes_sent(2, forward=forward)) for forward in (True, False)) for each in (plan, exact)]
        seconds.append(taken)
        shares.append((most[0] / most[1], plan.work_imbalance, exact.work_imbalance))
    sent, even, uneven = np.median(shares, axis=0)
    return (
        f"| {documents} | {block} | {k} | {size} | {scheme} | {bands:,} | {np.median(seconds):.2f} | "
        f"{max(seconds):.2f} | {sent:.2f} | {even:.2f} / {uneven:.2f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Time plans of block tables that change with each batch.")
    parser.add_argument("--batches", type=int, default=3, help="tables of each kind (default: 3)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 512, 256, 128])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {TOKENS:,} tokens, contiguous layout\n")
    print("| documents | block | k | cp | scheme | runs | s, median | s, longest | bytes to exact | work |")
    print("|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|")
    for documents, block, k, size in itertools.product(DOCUMENTS, args.blocks, args.k, args.sizes):
        for scheme in ("tiled", "a2a+tiled"):
            print(row(documents, block, k, size, scheme, args.batches), flush=True)


if __name__ == "__main__":
    main()
