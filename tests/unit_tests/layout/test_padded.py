"""Pad rows that were asked for after the fact."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Packing

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(lengths=LENGTHS, cp_size=st.integers(1, 7), align=st.integers(1, 5), min_rows=st.integers(0, 4))
def test_padding_changes_rows_alone(lengths, cp_size, align, min_rows):
    plain = Layout.zigzag(Packing(lengths), cp_size)
    padded = plain.padded(align=align, min_rows=min_rows)
    stream = np.arange(1, plain.packing.total + 1)
    for rank in range(cp_size):
        rows = int(padded.row_counts[rank])
        least = max(len(plain.tokens(rank)), min_rows, 1 if align > 1 else 0)
        assert rows == -(-least // align) * align
        assert padded.tokens(rank).tolist() == plain.tokens(rank).tolist()
        assert padded.shard(stream, rank).tolist() == plain.shard(stream, rank).tolist() + [0] * (
            rows - len(plain.tokens(rank))
        )
        assert len(padded.positions(rank)) == rows
        assert not padded.labels(stream, rank)[1][len(plain.tokens(rank)) :].any()
    assert padded.unshard([padded.shard(stream, rank) for rank in range(cp_size)]).tolist() == stream.tolist()


def test_padding_is_part_of_the_value():
    layout = Layout.contiguous(Packing([1]), 2)
    assert layout.padded(min_rows=1) == layout.padded(min_rows=1) != layout
    assert hash(layout.padded(min_rows=1)) != hash(layout)
    assert layout.padded() is layout
    assert layout.padded(min_rows=1).pad_rows.tolist() == [1, 0]
    assert layout.padded(min_rows=1).padded() == layout
