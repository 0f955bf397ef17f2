"""`Layout`: which rank holds which tokens, against loops over tokens and against Megatron's own order."""

import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Packing
from megatron_cp.layout.fragments import index_ranges
from tests.counts import calls_of, peak_of
from tests.refusals import refusal_of, rejects

ragged = settings(max_examples=24)
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 13, 97, 101]) | st.integers(0, 300), min_size=1, max_size=8)
CP_SIZES = st.integers(1, 9) | st.sampled_from([16, 61, 1023, 1024])
MEGATRON_CP_SIZES = [2, 3, 4, 5, 8]


@st.composite
def layouts(draw, aligns=(1,)):
    """Draws any layout: one of the named ones, or pieces of the stream assigned to ranks at will, some ranks empty."""
    packing, cp_size, align = Packing(draw(LENGTHS)), draw(CP_SIZES), draw(st.sampled_from(aligns))
    named = draw(st.sampled_from([Layout.contiguous, Layout.zigzag, Layout.zigzag_of_pack, Layout.striped, None]))
    if named:
        return named(packing, cp_size, align=align)
    cuts = sorted(draw(st.sets(st.integers(0, packing.total), max_size=9)) | {0, packing.total})
    fragments = [[] for _ in range(cp_size)]
    for piece in draw(st.permutations(list(itertools.pairwise(cuts)))):
        fragments[draw(st.integers(0, min(cp_size, 9) - 1))].append(piece)
    return Layout.from_fragments(packing, fragments, align=align)


def aligned_layouts():
    return layouts(aligns=(2, 3, 16)).filter(lambda layout: layout.packing.total)


def ranks(layout):
    return range(layout.cp_size)


@ragged
@given(layout=layouts())
def test_every_token_is_held_once_in_an_order_that_can_be_undone(layout):
    held = [layout.tokens(rank).tolist() for rank in ranks(layout)]
    assert sorted(itertools.chain(*held)) == list(range(layout.packing.total))
    assert layout.token_counts.tolist() == [len(tokens) for tokens in held]
    assert layout.order.tolist() == list(itertools.chain(*held))
    np.testing.assert_array_equal(layout.order[layout.inverse_order], np.arange(layout.packing.total))
    np.testing.assert_array_equal(layout.inverse_order[layout.order], np.arange(layout.packing.total))
    assert layout.in_stream_order is np.array_equal(layout.order, np.arange(layout.packing.total))
    singles = [[(token, token + 1) for token in layout.tokens(rank).tolist()] for rank in ranks(layout)]
    assert Layout.from_fragments(layout.packing, singles) == layout
    assert not layout.pad_rows.any()
    np.testing.assert_array_equal(layout.row_counts, layout.token_counts)


@ragged
@given(lengths=LENGTHS, cp_size=CP_SIZES)
def test_contiguous_and_zigzag_totals_differ_by_at_most_1(lengths, cp_size):
    layout = Layout.contiguous(Packing(lengths), cp_size)
    assert np.ptp(layout.token_counts) <= 1
    assert layout.in_stream_order
    assert np.ptp(Layout.zigzag(Packing(lengths), cp_size).token_counts) <= 1
    layout = Layout.zigzag(Packing(lengths), cp_size)
    assert [layout.tokens(rank).tolist() for rank in ranks(layout)] == zigzag_by_loop(lengths, cp_size)
    layout = Layout.zigzag_of_pack(Packing(lengths), cp_size)
    whole = Layout.zigzag(Packing([sum(lengths)]), cp_size)
    assert layout.packing == Packing(lengths)
    assert [layout.fragments_of(rank) for rank in ranks(layout)] == [whole.fragments_of(rank) for rank in ranks(whole)]
    layout = Layout.striped(Packing(lengths), cp_size)
    assert [layout.tokens(rank).tolist() for rank in ranks(layout)] == [
        list(range(rank, sum(lengths), cp_size)) for rank in ranks(layout)
    ]


def zigzag_by_loop(lengths, cp_size):
    """Returns each rank's tokens, with the left-over ones assigned one at a time."""
    held = [[] for _ in range(cp_size)]
    start, turn = 0, 0
    for length in lengths:
        chunks = [length // (2 * cp_size)] * (2 * cp_size)
        served = set()
        for _ in range(length % (2 * cp_size)):
            rank = turn % cp_size
            chunks[2 * cp_size - 1 - rank if rank in served else rank] += 1
            served.add(rank)
            turn += 1
        for chunk, size in enumerate(chunks):
            held[min(chunk, 2 * cp_size - 1 - chunk)] += range(start, start + size)
            start += size
    return held


@pytest.mark.parametrize("cp_size", MEGATRON_CP_SIZES)
@pytest.mark.parametrize("multiples", [[1], [7, 1, 13, 3], [5, 0, 2]], ids=str)
def test_zigzag_is_megatrons_order_where_lengths_are_multiples(multiples, cp_size):
    layout = Layout.zigzag(Packing([2 * cp_size * multiple for multiple in multiples]), cp_size)
    megatron_gdn = pytest.importorskip("megatron.core.ssm.gated_delta_net.common")
    inverse_order, order = megatron_gdn._build_thd_cp_a2a_perm(
        torch.tensor(layout.packing.cu_seqlens), cp_size, layout.packing.total
    )
    np.testing.assert_array_equal(layout.inverse_order, inverse_order)
    np.testing.assert_array_equal(layout.order, order)


@pytest.mark.parametrize("cp_size", MEGATRON_CP_SIZES)
def test_zigzag_is_megatrons_split_of_one_document_and_of_packs_with_inter_document_masks(cp_size, monkeypatch):
    megatron_utils = pytest.importorskip("megatron.core.utils")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: cp_size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)
    stream = torch.arange(2 * cp_size * 7)
    one, two = Packing([len(stream)]), Packing([5, len(stream) - 5])
    packed = {"cu_seqlens": torch.tensor(two.cu_seqlens)[None]}
    for layout, more, how in (
        (Layout.zigzag(one, cp_size), {}, {}),
        (Layout.zigzag_of_pack(two, cp_size), packed, {"use_per_sequence_balancing": True}),
    ):
        for rank in ranks(layout):
            batch = {"tokens": stream[None], **more}
            theirs = megatron_utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=rank, **how)
            assert layout.shard(stream, rank).tolist() == theirs["tokens"][0].tolist()


@ragged
@given(layout=layouts(aligns=(1, 4)))
def test_fragments_make_an_equal_layout_and_positions_travel_with_tokens(layout):
    fragments = [layout.fragments_of(rank) for rank in ranks(layout)]
    again = Layout.from_fragments(layout.packing, fragments, align=layout.align)
    assert again == layout
    assert hash(again) == hash(layout)
    assert [again.fragments_of(rank) for rank in ranks(layout)] == fragments
    held = [(document, position) for document, n in enumerate(layout.packing.lengths) for position in range(n)]
    for rank in ranks(layout):
        rows = [held[token] for token in layout.tokens(rank)]
        assert layout.document_ids(rank)[: len(rows)].tolist() == [document for document, _ in rows]
        assert layout.positions(rank)[: len(rows)].tolist() == [position for _, position in rows]


def test_touching_fragments_of_one_rank_are_joined_and_empty_ones_dropped():
    layout = Layout.from_fragments(Packing([5, 3]), [[(0, 2), (3, 3), (2, 4)], [], [(6, 8), (4, 6)]])
    assert [layout.fragments_of(rank) for rank in ranks(layout)] == [[(0, 4)], [], [(6, 8), (4, 6)]]


@pytest.mark.parametrize(
    "other",
    [
        Layout.contiguous(Packing([5, 3]), 2, align=2),
        Layout.contiguous(Packing([3, 5]), 2),
        Layout.from_fragments(Packing([5, 3]), [[(4, 8)], [(0, 4)]]),
        Layout.from_fragments(Packing([5, 3]), [[(0, 5)], [(5, 8)]]),
        Layout.from_fragments(Packing([5, 3]), [[(0, 4)], [(4, 8)], []]),
    ],
    ids=["align", "packing", "ranks", "cut", "cp_size"],
)
def test_layouts_differ_by(other):
    assert Layout.contiguous(Packing([5, 3]), 2) != other


def test_pickling_keeps_the_value_and_drops_device_tables():
    layout = Layout.zigzag(Packing([5, 3]), 2)
    assert layout.memo("key", lambda: "device tensor") == layout.memo("key", lambda: "made again")
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert copy.memo("key", lambda: "made again") == "made again"


def test_a_layout_from_another_process_hashes_like_its_equal():
    make = "Layout.zigzag(Packing([5, 3]), 2)"
    program = (
        "import pickle, sys; from megatron_cp.layout import Layout, Packing\n"
        f"layout = {make}; hash(layout); sys.stdout.buffer.write(pickle.dumps(layout))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    pickled = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    layout, equal = pickle.loads(pickled.stdout), Layout.zigzag(Packing([5, 3]), 2)
    assert layout == equal
    assert hash(layout) == hash(equal)


@pytest.mark.parametrize(
    "name",
    ["starts", "ends", "fragment_offsets", "token_counts", "pad_rows", "row_counts", "order", "inverse_order"],
)
def test_is_immutable_and_so_is_what_it_derives(name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(Layout.zigzag(Packing([5, 3]), 2), name)[0] = 7


@ragged
@given(layout=layouts(aligns=(2, 3, 16)))
def test_align_makes_rows_the_least_multiple_that_is_not_empty(layout):
    for tokens, pad, rows in zip(layout.token_counts, layout.pad_rows, layout.row_counts, strict=True):
        assert rows == tokens + pad == next(n for n in itertools.count(layout.align, layout.align) if n >= tokens)


@ragged
@given(layout=aligned_layouts())
def test_pad_rows_belong_to_no_document(layout):
    stream = np.arange(layout.packing.total)
    for rank in ranks(layout):
        pad = slice(layout.token_counts[rank], None)
        labels, mask = layout.labels(stream, rank, ignore_index=-9)
        for rows, fill in ((layout.positions(rank), 0), (layout.document_ids(rank), -1), (labels, -9), (mask, False)):
            assert rows[pad].tolist() == [fill] * layout.pad_rows[rank]


@settings(ragged, max_examples=40)
@given(
    layout=layouts() | aligned_layouts(), library=st.sampled_from([np, torch]),
    trailing=st.sampled_from([(), (3,), (2, 1)]),
)  # fmt: skip
def test_unshard_undoes_shard(layout, library, trailing):
    shape = (layout.packing.total, *trailing)
    stream = np.random.default_rng(0).integers(0, 2**40, shape)
    stream = torch.from_numpy(stream) if library is torch else stream
    locals_ = [layout.shard(stream, rank, pad_value=-1) for rank in ranks(layout)]
    for rank, local in enumerate(locals_):
        assert local.shape == (layout.row_counts[rank], *trailing)
        assert local.dtype == stream.dtype
        assert (local[layout.token_counts[rank] :] == -1).all()
        assert local[: layout.token_counts[rank]].tolist() == [stream[token].tolist() for token in layout.tokens(rank)]
    again = layout.unshard(locals_)
    assert type(again) is type(stream)
    assert again.dtype == stream.dtype
    assert again.tolist() == stream.tolist()


def test_a_shard_is_a_copy_through_which_gradients_flow():
    stream, layout = np.arange(8), Layout.contiguous(Packing([8]), 1)
    layout.shard(stream, 0)[:] = -1
    layout.labels(stream, 0)
    assert stream.tolist() == list(range(8))
    stream = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    layout = Layout.zigzag(Packing([5, 3]), 3, align=4)
    layout.unshard([layout.shard(stream, rank) for rank in ranks(layout)]).sum().backward()
    assert stream.grad.tolist() == torch.ones(8, 2).tolist()


def sources_by_loop(packing, shift):
    """Returns for each token of the stream the token that is its label, None if its document ends first."""
    return [
        token + shift if token + shift < end else None for start, end in packing.spans() for token in range(start, end)
    ]


@ragged
@given(layout=layouts() | aligned_layouts(), shift=st.integers(1, 3), library=st.sampled_from([np, torch]))
def test_labels_are_later_tokens_of_the_same_document(layout, shift, library):
    sources = sources_by_loop(layout.packing, shift)
    stream = library.arange(layout.packing.total) + 1000
    labelled = []
    for rank in ranks(layout):
        labels, mask = layout.labels(stream, rank, shift=shift)
        rows = [sources[token] for token in layout.tokens(rank)] + [None] * layout.pad_rows[rank]
        assert labels.tolist() == [-100 if source is None else 1000 + source for source in rows]
        assert mask.tolist() == [source is not None for source in rows]
        labelled += layout.tokens(rank)[mask[: layout.token_counts[rank]]].tolist()
    assert sorted(labelled) == [token for token, source in enumerate(sources) if source is not None]


def test_an_empty_stream_has_pad_rows_and_ignored_labels():
    labels, mask = Layout.contiguous(Packing([0]), 2, align=2).labels(np.arange(0), 1)
    assert labels.tolist() == [-100, -100]
    assert mask.tolist() == [False, False]
    assert Layout.zigzag(Packing([0]), 2, align=4).shard(np.arange(0), 0, pad_value=7).tolist() == [7] * 4


def test_ten_thousand_documents_take_few_calls_and_a_few_numbers_a_token():
    weights = np.random.default_rng(0).lognormal(0, 1.2, 10_000)
    lengths = np.diff(np.round(np.cumsum(weights) / weights.sum() * 1_000_000).astype(np.int64), prepend=0)
    stream = np.arange(1_000_000)

    def build():
        layout = Layout.zigzag(Packing(lengths), 64)
        assert layout.order.size == layout.inverse_order.size == lengths.sum() == 1_000_000
        return layout.tokens(3), layout.positions(3), layout.labels(stream, 3)

    assert calls_of(build) < 500
    assert peak_of(build) < 8 * 8 * 1_000_000


EIGHT = Packing([8])
FRAGMENTS = [
    ([[(0, 3)], [(5, 8)]], "'tokens 3 to 4 are held by no rank'"),
    ([[(0, 3)], [(3, 6)]], "'tokens 6 to 7 are held by no rank'"), ([[(0, 3)], [(2, 8)]], "'token 2 is held twice'"),
    ([[(0, 8)], [(2, 3)]], "'token 2 is held twice'"), ([[(0, 3)], [(3, 9)]], "'a fragment ends at 9'"),
    ([[(0, 8)], [(5, 3)]], "(5, 3)"), ([[(0, 8)], *[[]] * 1024], "'those of 1025 ranks'"),
    ([[(-3, 8)]], "'a fragment starts at -3'"),
]  # fmt: skip


@pytest.mark.parametrize(("fragments", "given"), FRAGMENTS)
def test_rejects_what_is_no_layout(fragments, given):
    with refusal_of("fragments", given):
        Layout.from_fragments(EIGHT, fragments)


def test_rejects_shards_that_do_not_fit_their_ranks():
    halves = Layout.zigzag(EIGHT, 2)
    with refusal_of("shards", "'1 tensors'"):
        halves.unshard([np.arange(4)])
    with refusal_of("shards[1]", "'3 rows'"):
        halves.unshard([np.arange(4), np.arange(3)])


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_labels_of_unsigned_token_ids_can_be_ignored(make):
    tokens = make([250, 251, 252], dtype=(np if make is np.array else torch).uint8)
    labels, _ = Layout.contiguous(Packing([2, 1]), 1).labels(tokens, 0)
    assert labels.tolist() == [251, -100, -100]


def test_ranges_beyond_32_bits_are_counted_in_64():
    starts = np.array([2**31 - 2, 0, 2**40])
    assert index_ranges(starts, starts + 2).tolist() == [2**31 - 2, 2**31 - 1, 0, 1, 2**40, 2**40 + 1]
    assert index_ranges(starts[:2], starts[:2] + 1).dtype == np.int32


def test_a_layout_from_the_counts_of_each_rank():
    layout = Layout.from_counts([[2, 0, 1], [1, 3, 0], [0, 0, 0]])
    assert layout.packing.lengths.tolist() == [3, 3, 1]
    assert [layout.tokens(rank).tolist() for rank in range(3)] == [[0, 1, 6], [2, 3, 4, 5], []]
    assert Layout.from_counts(np.array([[2], [1]]), align=2).row_counts.tolist() == [2, 2]


def test_rejects_tokens_with_a_batch_axis_of_one_and_says_to_take_it_out():
    layout = Layout.contiguous(Packing([3, 2]), 2)
    for tokens in (np.zeros((1, 5), np.int64), torch.zeros(1, 5, dtype=torch.long)):
        rejects(r"got 'shape \[1, 5\]'; .* It has a batch axis of one: use tokens\[0\]\.", layout.labels, tokens, 0)
