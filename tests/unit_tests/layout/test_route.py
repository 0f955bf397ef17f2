"""`Route`: rows from one layout to another, with all ranks simulated in this process."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing, Route

ragged = settings(max_examples=100)
LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 5, 13, 97]) | st.integers(0, 200), min_size=1, max_size=6)
CP_SIZES = st.integers(1, 9) | st.sampled_from([17, 61])


@st.composite
def layouts_of(draw, packing, cp_size):
    """Draws any layout: one of the named ones, or pieces of the stream assigned to ranks at will."""
    align = draw(st.sampled_from([1, 1, 4]))
    named = draw(st.sampled_from([Layout.contiguous, Layout.zigzag, None]))
    if named:
        return named(packing, cp_size, align=align)
    cuts = sorted(draw(st.sets(st.integers(0, packing.total), max_size=9)) | {0, packing.total})
    fragments = [[] for _ in range(cp_size)]
    for piece in draw(st.permutations(list(itertools.pairwise(cuts)))):
        fragments[draw(st.integers(0, cp_size - 1))].append(piece)
    return Layout.from_fragments(packing, fragments, align=align)


@st.composite
def pairs_of_layouts(draw):
    packing, cp_size = Packing(draw(LENGTHS)), draw(CP_SIZES)
    return draw(layouts_of(packing, cp_size)), draw(layouts_of(packing, cp_size))


def held_rows(layout):
    """Returns each rank's tokens, and -1 in its pad rows."""
    return [layout.shard(np.arange(layout.packing.total), rank, pad_value=-1) for rank in range(layout.cp_size)]


def delivered(rows, send_rows, send_counts):
    """Returns each rank's received rows, if every rank sends `rows[rank][send_rows[rank]]`, cut by `send_counts`."""
    pieces = [
        np.split(local[index], np.cumsum(counts)[:-1])
        for local, index, counts in zip(rows, send_rows, send_counts, strict=True)
    ]
    return [np.concatenate(column) for column in zip(*pieces, strict=True)]


def placed(received, rows, sizes):
    """Returns each rank's rows with received values in place, and -1 elsewhere."""
    local = [np.full(size, -1) for size in sizes]
    for target, index, values in zip(local, rows, received, strict=True):
        target[index] = values
    return local


@ragged
@given(layouts=pairs_of_layouts().filter(lambda pair: pair[0].packing.total))
def test_every_row_reaches_its_place_and_comes_back(layouts):
    source, target = layouts
    routes = [Route.between(source, target, rank) for rank in range(source.cp_size)]
    send_rows, recv_rows = [route.send_rows for route in routes], [route.recv_rows for route in routes]
    send_counts, recv_counts = [route.send_counts for route in routes], [route.recv_counts for route in routes]

    there = placed(delivered(held_rows(source), send_rows, send_counts), recv_rows, target.row_counts)
    back = placed(delivered(held_rows(target), recv_rows, recv_counts), send_rows, source.row_counts)
    for moved, expected in ((there, held_rows(target)), (back, held_rows(source))):
        np.testing.assert_array_equal(np.concatenate(moved), np.concatenate(expected))


@ragged
@given(layouts=pairs_of_layouts())
def test_both_ends_of_a_route_agree_on_its_counts(layouts):
    source, target = layouts
    routes = [Route.between(source, target, rank) for rank in range(source.cp_size)]
    sent = np.stack([route.send_counts for route in routes])
    np.testing.assert_array_equal(sent, np.stack([route.recv_counts for route in routes]).T)
    np.testing.assert_array_equal(sent.sum(axis=1), source.token_counts)
    np.testing.assert_array_equal(sent.sum(axis=0), target.token_counts)


def test_a_route_moves_only_what_must():
    layout = Layout.zigzag(Packing([7, 1, 13]), 3)
    route = Route.between(layout, layout, 1)
    assert route.send_counts.tolist() == route.recv_counts.tolist() == [0, layout.token_counts[1], 0]
    assert route.send_rows.tolist() == route.recv_rows.tolist()
    route = Route.between(Layout.zigzag(Packing([8]), 2), Layout.contiguous(Packing([8]), 2), 0)
    assert (route.send_rows.tolist(), route.send_counts.tolist()) == ([0, 1, 2, 3], [2, 2])
    assert (route.recv_rows.tolist(), route.recv_counts.tolist()) == ([0, 1, 2, 3], [2, 2])


def test_rejects_another_packing_and_another_number_of_ranks():
    source, target = Layout.zigzag(Packing([8]), 2), Layout.zigzag(Packing([3, 5]), 2)
    with pytest.raises(ArgumentError, match=re.escape(f"target: got {target!r}")) as refusal:
        Route.between(source, target, 0)
    assert refusal.value.argument == "target"
    source, target = Layout.zigzag(Packing([8]), 2), Layout.zigzag(Packing([8]), 3)
    with pytest.raises(ArgumentError, match=re.escape(f"target: got {target!r}") + ".* over 2 ranks") as refusal:
        Route.between(source, target, 0)
    assert refusal.value.argument == "target"


@pytest.mark.parametrize("rank", [-1, 2])
def test_rejects_a_rank_outside_the_group(rank):
    layout = Layout.zigzag(Packing([8]), 2)
    with pytest.raises(ArgumentError, match=f"rank: got {rank}; allowed: an integer from 0 to 1") as refusal:
        Route.between(layout, layout, rank)
    assert refusal.value.argument == "rank"
