"""`partition_heads`, `Sections` and `RowFormat`, against loops over heads."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan import KINDS
from tests.refusals import refusal_of, rejects

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


@pytest.mark.parametrize("count", [0, -4])
def test_rejects_no_heads_and_no_groups(count):
    with refusal_of("num_heads", count):
        partition_heads(count, 1, 2)
    with refusal_of("num_groups", count):
        partition_heads(4, count, 2)


def test_rejects_groups_that_do_not_divide_the_heads():
    with refusal_of("num_groups", 3):
        partition_heads(8, 3, 2)


@st.composite
def sections(draw):
    """Sections of any valid head ranges over one number of ranks: empty, uneven, overlapping over several ranks."""
    cp_size = draw(st.integers(1, 6))
    blocks = []
    for index in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            groups = draw(st.integers(1, 8))
            heads = groups * draw(st.integers(1, 4))
            partition = partition_heads(heads, groups, cp_size)
            count, ranges = draw(st.sampled_from([(heads, partition.heads), (groups, partition.groups)]))
        else:
            lo, hi, ranges = 0, 0, ()
            for _ in range(cp_size):
                lo = draw(st.integers(lo, hi))
                hi += draw(st.integers(0, 4))
                ranges += ((lo, hi),)
            count = hi
        blocks.append(Section(f"s{index}", count, draw(st.sampled_from([1, 2, 3, 8, 64, 80])), ranges))
    return Sections(tuple(blocks))


@st.composite
def sections_and_item_sizes(draw):
    drawn = draw(sections())
    return drawn, [draw(st.sampled_from([1, 2, 4, 8])) for _ in drawn.blocks]


def heads_in_messages(sections, item_sizes):
    """(section, rank, head, byte of the head in the rank's message row) for every head that a rank computes."""
    row_format = sections.row_format(item_sizes)
    return sorted(
        (index, rank, head, row_format.offsets[rank][index] + place * block.head_dim * size)
        for index, (block, size) in enumerate(zip(sections.blocks, item_sizes, strict=True))
        for rank, ranges in enumerate(block.ranges)
        for place, head in enumerate(range(*ranges))
    )


@ragged
@given(drawn=sections_and_item_sizes())
def test_rows_start_on_16_bytes_and_columns_span_rows_of_one_size(drawn):
    sections, item_sizes = drawn
    row_format = sections.row_format(item_sizes)
    for rank, (row_bytes, offsets) in enumerate(zip(row_format.row_bytes, row_format.offsets, strict=True)):
        assert offsets[0] == 0
        for block, size, start, end in zip(
            sections.blocks, item_sizes, offsets, (*offsets[1:], row_bytes), strict=True
        ):
            assert start % 16 == 0
            assert end == start + ceil(sizes(block.ranges)[rank] * block.head_dim * size, 16) * 16
    row_format = sections.row_format(item_sizes)
    for columns in row_format.head_copies:
        assert len(set(row_format.row_bytes[columns.first_rank : columns.last_rank])) == 1
    for columns in sections.row_format(item_sizes).head_copies:
        ranges = sections.blocks[columns.section].ranges
        for step in range(columns.num_ranks):
            lower = {head for lo, hi in ranges[: columns.first_rank + step] for head in range(lo, hi)}
            first = columns.first_head + step * columns.head_step
            shared = [head in lower for head in range(first, first + columns.num_heads)]
            assert shared == [place < columns.shared_heads for place in range(columns.num_heads)]


@ragged
@given(drawn=sections_and_item_sizes())
def test_columns_cover_every_head_of_every_rank_exactly_once(drawn):
    sections, item_sizes = drawn
    covered = [
        (
            columns.section,
            columns.first_rank + step,
            columns.first_head + step * columns.head_step + place,
            columns.offset + place * sections.blocks[columns.section].head_dim * item_sizes[columns.section],
        )
        for columns in sections.row_format(item_sizes).head_copies
        for step in range(columns.num_ranks)
        for place in range(columns.num_heads)
    ]
    assert sorted(covered) == heads_in_messages(sections, item_sizes)


def test_columns_widths_and_scales_of_two_sections():
    partition = partition_heads(32, 8, 4)
    sections = Sections((Section("q", 32, 128, partition.heads), Section("k", 8, 128, partition.groups)))
    columns = sections.row_format([2, 2]).head_copies
    assert [(c.section, c.first_rank, c.last_rank, c.num_heads) for c in columns] == [(0, 0, 4, 8), (1, 0, 4, 2)]
    ranges = ((0, 1), (1, 2))
    sections = Sections(tuple(Section(name, 2, 128, ranges) for name in "qkv"))
    form = sections.row_format([2, 2, 2], coded=[True, True, True])
    assert form.offsets == ((0, 128, 256),) * 2
    assert form.scales == ((384, 388, 392),) * 2
    assert form.row_bytes == (400, 400)
    sections = Sections((Section("q", 6, 8, ((0, 4), (4, 6))), Section("beta", 3, 1, ((0, 2), (1, 3)))))
    assert [block.width for block in sections.blocks] == [48, 3]
    assert [block.heads_on(1) for block in sections.blocks] == [2, 2]
    assert (sections.width, sections.cp_size) == (51, 2)


@ragged
@given(drawn=sections())
def test_a_section_is_replicated_exactly_where_ranks_share_a_head(drawn):
    for block in drawn.blocks:
        readers = Counter(head for ranges in block.ranges for head in range(*ranges))
        assert block.replicated == (max(readers.values(), default=0) > 1)


@given(sections(), st.data())
def test_coded_rows_hold_heads_and_scales_apart(drawn, data):
    sizes = data.draw(st.lists(st.sampled_from([2, 4, 8]), min_size=len(drawn.blocks), max_size=len(drawn.blocks)))
    coded = data.draw(st.lists(st.booleans(), min_size=len(drawn.blocks), max_size=len(drawn.blocks)))
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


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(((1, 2), (2, 4)), id="start after head 0"),
        pytest.param(((0, 2), (3, 4)), id="a head between them"),
        pytest.param(((0, 2), (2, 3)), id="stop before the last head"),
        pytest.param(((0, 2), (2, 5)), id="beyond the last head"),
        pytest.param(((0, 2), (1, 3), (0, 4)), id="starts fall"),
        pytest.param(((0, 4), (1, 3), (2, 4)), id="ends fall"),
        pytest.param(((0, 4), (4, 3)), id="end before they start"),
    ],
)
def test_rejects_ranges(ranges):
    with refusal_of("ranges", repr(ranges)):
        Sections((Section("q", 4, 8, partition_heads(4, 4, len(ranges)).heads), Section("k", 4, 8, ranges)))


def test_rejects_sections_over_other_numbers_of_ranks():
    q, k = (Section(name, 4, 8, partition_heads(4, 4, ranks).heads) for name, ranks in (("q", 2), ("k", 3)))
    rejects("'k'", Sections, (q, k))
    with refusal_of("sections", "'heads assigned to 2 ranks'"):
        Exchange(Layout.zigzag(Packing([8]), 3), Sections((Section("q", 4, 8, ((0, 2), (2, 4))),)))


@pytest.mark.parametrize(
    ("layout", "local"),
    [
        (Layout.contiguous(Packing([5, 3]), 1), True),
        (Layout.from_fragments(Packing([5, 3]), [[(5, 8), (0, 5)]]), False),
        (Layout.contiguous(Packing([5, 3]), 1, align=16), False),
        (Layout.contiguous(Packing([5, 3]), 2), False),
    ],
    ids=["one rank", "other order", "pad rows", "two ranks"],
)
def test_is_local_where_nothing_moves(layout, local):
    partition = partition_heads(4, 4, layout.cp_size)
    assert Exchange(layout, Sections((Section("q", 4, 8, partition.heads),))).is_local == local


def test_gates_decays_and_step_sizes_are_never_coded():
    exact = {kind.name: {each.name for each in kind.sections if each.exact} for kind in KINDS.values()}
    found = {name: sections for name, sections in exact.items() if sections}
    assert found == {"gdn": {"beta", "alpha"}, "kda": {"g", "beta"}, "mamba": {"dt"}}
