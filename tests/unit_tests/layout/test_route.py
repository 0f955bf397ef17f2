"""Tests of `Route`: what it moves and what it refuses; that every row arrives is in `executor/test_gather.py`."""

from megatron_cp.layout import Layout, Packing, Route

ZIGZAG = Layout.zigzag(Packing([8]), 2)


def test_a_route_moves_only_what_must():
    layout = Layout.zigzag(Packing([7, 1, 13]), 3)
    route = Route.between(layout, layout, 1)
    assert route.send_counts.tolist() == route.recv_counts.tolist() == [0, layout.token_counts[1], 0]
    assert route.send_rows.tolist() == route.recv_rows.tolist()
    route = Route.between(ZIGZAG, Layout.contiguous(Packing([8]), 2), 0)
    assert (route.send_rows.tolist(), route.send_counts.tolist()) == ([0, 1, 2, 3], [2, 2])
    assert (route.recv_rows.tolist(), route.recv_counts.tolist()) == ([0, 1, 2, 3], [2, 2])
