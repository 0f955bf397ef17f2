"""The heads that ranks compute, and the places of sections in messages.

`test_head_exchange.py` holds the copies between tensors and messages to slices of the full tensors.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.exchange.sections import Section, Sections, partition_heads
from tests.refusals import refusal_of
from tests.unit_tests.exchange.test_head_exchange import sections

ragged = settings(max_examples=100)
HEADS_PER_GROUP = st.integers(1, 9) | st.sampled_from([13, 16])
GROUPS = st.integers(1, 12) | st.sampled_from([31, 64])
CP_SIZES = st.integers(1, 12) | st.sampled_from([31, 64, 1024])


def ceil(count, parts):
    return -(-count // parts)


def sizes(ranges):
    return [hi - lo for lo, hi in ranges]


PARTITIONS = {  # (heads, groups, ranks): the heads of each rank, the groups that it reads
    (32, 8, 4): ([(0, 8), (8, 16), (16, 24), (24, 32)], [(0, 2), (2, 4), (4, 6), (6, 8)]),
    (10, 5, 3): ([(0, 4), (4, 8), (8, 10)], [(0, 2), (2, 4), (4, 5)]),
    (6, 2, 3): ([(0, 2), (2, 4), (4, 6)], [(0, 1), (0, 2), (1, 2)]),
    (10, 2, 5): ([(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)], [(0, 1), (0, 1), (0, 2), (1, 2), (1, 2)]),
    (6, 2, 5): ([(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)], [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2)]),
    (7, 1, 3): ([(0, 3), (3, 5), (5, 7)], [(0, 1), (0, 1), (0, 1)]),
    (2, 2, 5): ([(0, 1), (1, 1), (1, 1), (1, 2), (2, 2)], [(0, 1), (1, 1), (1, 1), (1, 2), (2, 2)]),
}


@pytest.mark.parametrize("counts", PARTITIONS, ids=str)
def test_assigns_heads_and_groups(counts):
    partition = partition_heads(*counts)
    assert (list(partition.heads), list(partition.groups)) == PARTITIONS[counts]


@ragged
@given(per_group=HEADS_PER_GROUP, groups=GROUPS, cp_size=CP_SIZES)
def test_every_head_is_assigned_once_with_exactly_the_groups_it_reads(per_group, groups, cp_size):
    partition = partition_heads(per_group * groups, groups, cp_size)
    assert [head for lo, hi in partition.heads for head in range(lo, hi)] == list(range(per_group * groups))
    assert [list(range(*read)) for read in partition.groups] == [
        sorted({head // per_group for head in range(lo, hi)}) for lo, hi in partition.heads
    ]
    readers = Counter(group for read in partition.groups for group in range(*read))
    assert partition.idle_ranks == sizes(partition.heads).count(0)
    assert partition.replicated == (max(readers.values()) > 1)


@ragged
@given(per_group=HEADS_PER_GROUP, groups=GROUPS, cp_size=CP_SIZES)
def test_assigns_whole_groups_where_there_is_one_for_each_rank(per_group, groups, cp_size):
    groups = max(groups, cp_size)
    partition = partition_heads(per_group * groups, groups, cp_size)
    assert max(sizes(partition.groups)) - min(sizes(partition.groups)) <= 1
    assert list(partition.heads) == [(lo * per_group, hi * per_group) for lo, hi in partition.groups]
    assert not partition.replicated
    assert partition.idle_ranks == 0


@ragged
@given(per_group=HEADS_PER_GROUP, groups=GROUPS, cp_size=CP_SIZES)
def test_with_fewer_groups_than_ranks_no_rank_is_busier_than_single_heads_make_it(per_group, groups, cp_size):
    cp_size = max(cp_size, groups + 1)
    heads = per_group * groups
    partition = partition_heads(heads, groups, cp_size)
    assert max(sizes(partition.heads)) == ceil(heads, cp_size)
    if ceil(per_group, cp_size // groups) == ceil(heads, cp_size):
        assert max(sizes(partition.groups)) == 1


@given(st.integers(1, 6).flatmap(sections), st.data())
def test_rows_hold_heads_and_scales_apart(drawn, data):
    count = len(drawn.blocks)
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=count, max_size=count))
    coded = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    form = drawn.row_format(sizes, coded=coded)
    for rank, row in enumerate(form.row_bytes):
        pieces = []
        for block, size, is_coded, offset, scales in zip(
            drawn.blocks, sizes, coded, form.offsets[rank], form.scales[rank], strict=True
        ):
            heads = block.heads_on(rank)
            pieces.append((offset, offset + heads * block.head_dim * (1 if is_coded else size)))
            assert offset % 16 == 0
            assert (scales is not None) == is_coded
            if is_coded:
                assert scales % 4 == 0
                pieces.append((scales, scales + 4 * heads))
        pieces = sorted(piece for piece in pieces if piece[1] > piece[0])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(pieces))
        assert row % 16 == 0
        assert row >= max((end for _, end in pieces), default=0)


RANGES = {  # and the ranks of another section
    "start after head 0": (2, ((1, 2), (2, 4))), "a head between them": (2, ((0, 2), (3, 4))),
    "stop before the last head": (2, ((0, 2), (2, 3))), "beyond the last head": (2, ((0, 2), (2, 5))),
    "starts fall": (3, ((0, 2), (1, 3), (0, 4))), "ends fall": (3, ((0, 4), (1, 3), (2, 4))),
    "end before they start": (2, ((0, 4), (4, 3))), "another number of ranks": (3, ((0, 2), (2, 4))),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "ranges"), RANGES.values(), ids=RANGES)
def test_rejects_ranges(ranks, ranges):
    with refusal_of("ranges", repr(ranges)):
        Sections((Section("q", 4, 8, partition_heads(4, 4, ranks).heads), Section("k", 4, 8, ranges)))


@pytest.mark.parametrize(("argument", "heads", "groups"), [
    ("num_heads", 0, 1), ("num_heads", -4, 1), ("num_groups", 4, 0), ("num_groups", 4, -4), ("num_groups", 8, 3),
])  # fmt: skip
def test_rejects_heads_that_groups_do_not_divide(argument, heads, groups):
    with refusal_of(argument, heads if argument == "num_heads" else groups):
        partition_heads(heads, groups, 2)
