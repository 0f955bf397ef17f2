"""`Segments`: pieces of documents and who waits for whom, against loops over tokens and pairs of segments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.segments import Segments
from megatron_cp.planner.layouts import layout_by_name

ragged = settings(max_examples=150)


@st.composite
def layouts(draw):
    packing = Packing(draw(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)))
    name = draw(st.sampled_from(["contiguous", "zigzag", "balanced", "random"]))
    return layout_by_name(name, packing, draw(st.integers(1, 6)), align=draw(st.sampled_from([1, 4])), seed=0)


@ragged
@given(layouts())
def test_a_ranks_segments_are_its_rows_cut_where_documents_begin(layout):
    segments, packing = Segments.from_layout(layout), layout.packing
    for rank in range(layout.cp_size):
        own = segments.local(rank)
        rows = [np.arange(segments.start[i], segments.end[i]) for i in own.ids]
        assert np.array_equal(np.concatenate([*rows, []]), layout.tokens(rank))
        assert own.packing.total == layout.token_counts[rank]
        for number, tokens in zip(own.ids, rows, strict=True):
            (document,) = set(packing.documents_of(tokens).tolist())
            first, last = packing.cu_seqlens[document], packing.cu_seqlens[document + 1]
            assert segments.past[number] == (tokens[0] > first)
            assert segments.future[number] == (tokens[-1] + 1 < last)
            assert layout.tokens(rank)[segments.row[number]] == tokens[0]


@ragged
@given(layouts())
def test_a_rank_needs_the_maps_that_lead_to_its_segments_and_no_others(layout):
    segments = Segments.from_layout(layout)
    count = segments.start.size
    for forward in (True, False):
        receivers = np.zeros(count, dtype=int)
        for rank in range(layout.cp_size):
            needed = {
                i
                for i in range(count)
                for j in range(count)
                if segments.rank[j] == rank
                and segments.document[i] == segments.document[j]
                and (i < j if forward else i > j)
            }
            assert segments.needed(rank, forward=forward).tolist() == sorted(needed)
            for source in range(layout.cp_size):
                sent = [i for i in sorted(needed) if segments.rank[i] == source and source != rank]
                assert segments.sent(source, rank, forward=forward).tolist() == sent
                receivers[sent] += 1
        assert segments.receivers(forward=forward).tolist() == receivers.tolist()
        assert segments.crosses == bool(receivers.any())


def test_segments_of_a_layout_are_made_once():
    layout = Layout.zigzag(Packing([7, 3]), 2)
    assert Segments.from_layout(layout) is Segments.from_layout(layout)


@pytest.mark.parametrize("name", ["contiguous", "balanced"])
def test_few_segments_continue_in_layouts_of_few_fragments(name):
    packing = Packing(np.random.default_rng(0).integers(1, 200, 1000))
    segments = Segments.from_layout(getattr(Layout, name)(packing, 8))
    assert segments.past.sum() <= 3 * 8
    assert Segments.from_layout(Layout.zigzag(packing, 8)).past.sum() > 8 * 1000
