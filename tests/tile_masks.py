"""The masks of UltraAttn (SC'25) in its own terms: tables of blocks, contiguous owners, load caps, units of volume."""

import numpy as np

import megatron_cp as cp
from megatron_cp.planner.tiles import TileProblem, TileWeights, tiles_of
from megatron_cp.planner.tiles.problem import AxisChunks

MASKS = ("full", "causal", "strided", "global_local", "star", "streaming")
UNITS = {"forward": TileWeights(1, 1, 2, 0), "backward": TileWeights(2, 1, 2, 2)}
_FULL, _HALF = 2, 1  # work of a block, and of one on the diagonal of a causal mask
_BLOCKS = {"full": 8, "causal": 8, "strided": 16, "global_local": 16, "star": 8, "streaming": 8}
# In whole blocks, `ceil(W / 8)` with what UltraAttn adds for causal and streaming masks, half a block.
_LOAD_CAPS = {"full": 8.0, "causal": 4.5, "strided": 7.0, "global_local": 6.0, "star": 3.0, "streaming": 3.5}


def one_token_each(owners):
    """Chunks of one token each."""
    return AxisChunks(np.arange(len(owners)), len(owners), np.arange(len(owners)), np.asarray(owners))


def table_problem(table, row_owners, column_owners, num_ranks, weights, load_cap=None):
    """A problem with the work of a table, and chunks of one token: a byte of `weights` is then the unit of volume."""
    rows, columns = np.nonzero(table)
    chunks = one_token_each(row_owners), one_token_each(column_owners)
    return TileProblem(num_ranks, *chunks, rows, columns, table[rows, columns], weights, load_cap=load_cap)


def block_table(name):
    """`[blocks, blocks]` work of each block: 2 of a whole one, 1 of half of one."""
    count = _BLOCKS[name]
    packing = cp.Packing([4 * count])
    mask = cp.Mask.named(packing, name)
    problem = tiles_of(mask, cp.Layout.contiguous(packing, count), weights=UNITS["forward"], load_cap=mask.area)
    table = np.zeros((count, count), dtype=np.int64)
    blocks = (problem.rows.owners[problem.tile_rows], problem.columns.owners[problem.tile_columns])
    np.add.at(table, blocks, problem.work)
    return np.where(table == 16, _FULL, np.where(table > 0, _HALF, 0))


def block_problem(name, weights):
    """A mask of UltraAttn's on 8 ranks, in its blocks and under its load cap."""
    table = block_table(name)
    owners = np.arange(len(table)) * 8 // len(table)
    return table_problem(table, owners, owners, 8, weights, load_cap=round(_LOAD_CAPS[name] * _FULL))
