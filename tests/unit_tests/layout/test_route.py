"""Tests of `Route`: what it moves and what it refuses; that every row arrives is in `executor/test_relayout.py`."""

import re

import pytest

from megatron_cp.layout import Layout, Packing, Route
from tests.refusals import rejects

ZIGZAG = Layout.zigzag(Packing([8]), 2)


def test_a_route_moves_only_what_must():
    layout = Layout.zigzag(Packing([7, 1, 13]), 3)
    route = Route.between(layout, layout, 1)
    assert route.send_counts.tolist() == route.recv_counts.tolist() == [0, layout.token_counts[1], 0]
    assert route.send_rows.tolist() == route.recv_rows.tolist()
    route = Route.between(ZIGZAG, Layout.contiguous(Packing([8]), 2), 0)
    assert (route.send_rows.tolist(), route.send_counts.tolist()) == ([0, 1, 2, 3], [2, 2])
    assert (route.recv_rows.tolist(), route.recv_counts.tolist()) == ([0, 1, 2, 3], [2, 2])


OTHER_PACKING, MORE_RANKS = Layout.zigzag(Packing([3, 5]), 2), Layout.zigzag(Packing([8]), 3)


@pytest.mark.parametrize(
    ("target", "rank", "says"),
    [
        (OTHER_PACKING, 0, re.escape(f"target: got {OTHER_PACKING!r}")),
        (MORE_RANKS, 0, re.escape(f"target: got {MORE_RANKS!r}") + ".* over 2 ranks"),
        (ZIGZAG, -1, "rank: got -1; allowed: an integer from 0 to 1"),
        (ZIGZAG, 2, "rank: got 2; allowed: an integer from 0 to 1"),
    ],
)
def test_rejects_layouts_and_ranks_that_do_not_belong_together(target, rank, says):
    rejects(f"^{says}", Route.between, ZIGZAG, target, rank)
