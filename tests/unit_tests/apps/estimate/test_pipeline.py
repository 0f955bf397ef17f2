"""A pipeline's schedule against the closed form of its waits, and the microbatches that a stage holds."""

import numpy as np
import pytest

from megatron_cp.apps.estimate.pipeline import walk_pipeline


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"), [(1, 1, 3), (2, 1, 1), (4, 1, 8), (4, 1, 50), (4, 2, 8), (2, 3, 40)]
)
def test_equal_stages_wait_as_the_closed_form_says(stages, chunks, microbatches):
    """(p - 1) / (v m) of the ideal time: Megatron-LM's paper, equation 2 and section 2.2."""
    seconds = np.ones((2, stages * chunks)) * [[1.0], [2.0]]
    ideal = 3.0 * microbatches * chunks
    walk = walk_pipeline(seconds, stages, microbatches, 0.0)
    assert walk.seconds == pytest.approx(ideal * (1 + (stages - 1) / (chunks * microbatches)))
    if chunks == 1:
        assert walk.held == tuple(min(stages - stage, microbatches) for stage in range(stages))


def test_the_slowest_stage_sets_the_pace_and_hops_add_up():
    seconds = np.array([[1.0, 1.0, 2.0], [2.0, 2.0, 4.0]])
    first = walk_pipeline(seconds, 3, 1, 0.5).seconds
    assert first == pytest.approx(12 + 4 * 0.5)
    assert walk_pipeline(seconds, 3, 31, 0.0).seconds == pytest.approx(12 + 30 * 6)
