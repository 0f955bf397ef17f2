"""Planned tiles: which rank computes which tile of a mask, so that the busiest sends and receives the least.

Queries travel too. `tiles_of` cuts a mask into tiles, `solve` gives each to a rank under a cap on a rank's work, and
`bands_by_rank` says it in the mask's bands. `problem` is the model, `cuts` the tiles, `fast` the search without a
solver (`starts` and `anneal`). Numpy and integers: no torch in here.
"""

from megatron_cp.planner.tiles.cuts import bands_by_rank, tiles_of
from megatron_cp.planner.tiles.problem import TileProblem, TileWeights
from megatron_cp.planner.tiles.solve import Solution, solve

__all__ = ["Solution", "TileProblem", "TileWeights", "bands_by_rank", "solve", "tiles_of"]
