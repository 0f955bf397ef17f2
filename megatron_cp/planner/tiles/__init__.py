"""Assigns the tiles of a mask to ranks, so that the busiest rank sends and receives the least.

Queries travel too. `tiles_of` cuts a mask into tiles, `solve` gives each to a rank under a cap on a rank's work, and
`bands_by_rank` turns an answer into bands of the mask. `problem` is the model, `cuts` makes the tiles, `fast` is the
search without a solver, by the moves of `anneal`, `exact` the one with a solver, and `bounds` finds lower bounds. Numpy
and integers: no torch in here.
"""

from megatron_cp.planner.tiles.cuts import bands_by_rank, tiles_of
from megatron_cp.planner.tiles.problem import TileProblem, TileWeights
from megatron_cp.planner.tiles.solve import Solution, solve

__all__ = ["Solution", "TileProblem", "TileWeights", "bands_by_rank", "solve", "tiles_of"]
