"""`TileAssignment` as a value: what ranks compare before they use a plan."""

import numpy as np

from megatron_cp.plan.tile_assignment import TileAssignment

BANDS = np.array([[0, 4, 0, 4, -9, 0], [4, 8, 0, 4, -9, 9]])


def test_the_rank_of_a_band_is_part_of_the_value():
    """The same bands, one more of them on the first rank."""
    each, first = (TileAssignment(BANDS.copy(), np.array(offsets)) for offsets in ([0, 1, 2], [0, 2, 2]))
    assert each != first
    assert each.digest != first.digest
    same = TileAssignment(BANDS.copy(), np.array([0, 1, 2]))
    assert (each, each.digest, hash(each)) == (same, same.digest, hash(same))
