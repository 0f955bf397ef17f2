"""`PackedStream`: the packs that training reads."""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data import GlobalBatch, PackedStream, TokenCorpus
from megatron_cp.errors import ArgumentError
from megatron_cp.planner.predict.pack_cost import PackCost
from tests.refusals import rejects

ragged = settings(max_examples=60)
LENGTHS = [1, 7, 30, 2, 2, 13, 8, 9, 1, 16, 5, 17, 3, 97]


def corpus_of(lengths):
    """Every token is told apart: they are numbered through."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    return TokenCorpus("numbered", int(offsets[-1]), np.arange(offsets[-1], dtype=np.int32), offsets)


def epoch_of(stream, epoch):
    first = sum(stream.packs_per_epoch(earlier) for earlier in range(epoch))
    return [stream.pack(index) for index in range(first, first + stream.packs_per_epoch(epoch))]


def plain(packs):
    return [(packing.lengths.tolist(), tokens.tolist()) for packing, tokens in packs]


@ragged
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    budget=st.integers(2, 20),
    window=st.integers(1, 12) | st.just(65536),
    seed=st.integers(0, 3),
)
def test_every_token_comes_once_in_each_epoch(lengths, budget, window, seed):
    stream = PackedStream(corpus_of(lengths), budget, seed, window)
    assert stream.tokens_per_epoch == sum(lengths)
    for epoch in range(3):
        packs = epoch_of(stream, epoch)
        assert sorted(np.concatenate([tokens for _, tokens in packs]).tolist()) == list(range(sum(lengths)))
        assert all(packing.total == tokens.size <= budget for packing, tokens in packs)
        assert all(tokens.dtype == np.int64 for _, tokens in packs)


@ragged
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), budget=st.integers(2, 20))
def test_each_length_of_a_pack_is_one_piece_of_one_document(lengths, budget):
    corpus = corpus_of(lengths)
    stream = PackedStream(corpus, budget)
    seen = Counter()
    for index in range(stream.packs_per_epoch(0)):
        packing, tokens = stream.pack(index)
        pieces = stream.pieces(index)
        assert packing.num_documents == len(pieces)
        for piece, (start, end) in zip(pieces, packing.spans(), strict=True):
            assert tokens[start:end].tolist() == corpus.tokens(piece.document)[piece.start : piece.end].tolist()
        seen.update(pieces)
    assert seen == Counter(
        (document, start, min(start + budget, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, budget)
    )


def test_sizes_of_an_epoch():
    stream, asked = (PackedStream(corpus_of(LENGTHS), 16, window=4) for _ in range(2))
    assert asked.packs_per_epoch(7) > 0
    assert asked.fill > 0
    assert plain(map(asked.pack, range(30))) == plain(map(stream.pack, range(30)))
    # A window of two pieces joins at most two; a window of all joins the short ones.
    corpus = corpus_of([1] * 64)
    assert PackedStream(corpus, 8, window=2).packs_per_epoch(0) == 32
    assert PackedStream(corpus, 8, window=65536).packs_per_epoch(0) == 8
    assert PackedStream(corpus_of([3, 4, 7]), 10).fill == 14 / 20
    stream = PackedStream(corpus_of(LENGTHS), 16, window=3)
    packs = epoch_of(stream, 0)
    assert stream.fill == sum(packing.total for packing, _ in packs) / (16 * len(packs))


def test_epochs_differ_and_mix_documents():
    orders = [plain(epoch_of(PackedStream(corpus_of(LENGTHS), 16, seed), epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(str, orders))) == 4
    stream = PackedStream(corpus_of([4] * 40), 8)
    partners = {frozenset(tokens[::4].tolist()) for epoch in range(2) for _, tokens in epoch_of(stream, epoch)}
    assert len(partners) > 20 + 10
    # Best fit alone gives falling lengths in each pack, and the packs of long documents first.
    packs = epoch_of(PackedStream(corpus_of([5, 2, 1] * 100 + [8] * 100), 8), 0)
    orders = Counter(tuple(packing.lengths.tolist()) for packing, _ in packs)
    assert len(orders) == 1 + 6
    full = [packing.num_documents == 1 for packing, _ in packs]
    assert 30 < sum(full[:100]) < 70


def test_only_one_epoch_is_kept(monkeypatch):
    made = []

    def default_rng(seed, original=np.random.default_rng):
        made.append(seed[1])
        return original(seed)

    monkeypatch.setattr(np.random, "default_rng", default_rng)
    stream = PackedStream(corpus_of(LENGTHS), 16)
    count = stream.packs_per_epoch(0)
    for index in [*range(2 * count), 0]:
        stream.pack(index)
    assert made == [0, 1, 0]


def test_reads_no_more_of_a_long_document_than_a_pack_needs():
    corpus = corpus_of([1000])
    asked = []

    class Watched:
        name, vocab_size, lengths, skipped = corpus.name, corpus.vocab_size, corpus.lengths, corpus.skipped

        def tokens(self, document, start=0, end=None):
            asked.append((start, end))
            return corpus.tokens(document, start, end)

    epoch_of(PackedStream(Watched(), 300), 0)
    assert sorted(asked) == [(0, 300), (300, 600), (600, 900), (900, 1000)]


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("seq_length", 1), ("seq_length", 4096.0), ("seed", -1), ("seed", None), ("window", 0), ("index", -1),
        ("index", 1.0), ("epoch", -1),
    ],
)  # fmt: skip
def test_rejects_numbers_out_of_range(argument, given):
    def ask():
        options = {"budget": 16, "seed": 0, "window": 4, "index": 0, "epoch": 0}
        options["budget" if argument == "seq_length" else argument] = given
        index, epoch = options.pop("index"), options.pop("epoch")
        stream = PackedStream(corpus_of(LENGTHS), **options)
        return stream.pack(index), stream.packs_per_epoch(epoch)

    rejects(re.escape(f"{argument}: got {given}; allowed: an integer of at least "), ask)


def test_a_budget_of_any_size_holds_every_document_that_there_is():
    # Also the largest: nothing is cut, so nothing is counted in its units.
    stream = PackedStream(corpus_of([3, 1, 4]), 2**63 - 1)
    assert stream.packs_per_epoch(0) == 1
    assert stream.pack(0)[0].total == 8
    with pytest.raises(ArgumentError, match=re.escape("data_path: got 'numbered'; allowed: a corpus with at least")):
        PackedStream(corpus_of([0, 0]), 16)


COST = PackCost(0, 1, 0.1)


@ragged
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), budget=st.integers(2, 20),
    ranks=st.integers(1, 3), microbatches=st.integers(1, 4), barrier=st.booleans(),
)  # fmt: skip
def test_a_global_batch_holds_what_it_would_hold(lengths, budget, ranks, microbatches, barrier):
    """Over the ends of epochs too."""
    kind = GlobalBatch(ranks, microbatches, COST, barrier)
    plain_stream, stream = (PackedStream(corpus_of(lengths), budget, even=even) for even in (None, kind))
    assert [stream.packs_per_epoch(epoch) for epoch in range(2)] == [
        plain_stream.packs_per_epoch(epoch) for epoch in range(2)
    ]
    for batch in range(3):
        numbers = range(batch * kind.packs, (batch + 1) * kind.packs)
        given_, even = ([each.pieces(number) for number in numbers] for each in (plain_stream, stream))
        assert Counter(piece for pack in given_ for piece in pack) == Counter(piece for pack in even for piece in pack)
        assert all(even)
        assert max(sum(piece.end - piece.start for piece in pack) for pack in even) <= budget
        times = [[COST.of([p.end - p.start for p in pack]) for pack in packs] for packs in (even, given_)]
        assert kind.step_time(times[0]) <= kind.step_time(times[1]) * (1 + 1e-9)


def test_the_step_is_shorter_and_the_batch_is_the_same():
    corpus = corpus_of(np.minimum(np.random.default_rng(0).lognormal(3, 1.5, 2000).astype(int) + 1, 500).tolist())
    kind = GlobalBatch(4, 2, COST)
    given_, even = (PackedStream(corpus, 500, even=each) for each in (None, kind))
    steps = np.array([
        [kind.step_time([COST.of(each.pack(8 * batch + k)[0].lengths) for k in range(8)]) for batch in range(5)]
        for each in (given_, even)
    ])  # fmt: skip
    assert (steps[1] < steps[0]).all()
    assert plain(map(given_.pack, range(8))) != plain(map(even.pack, range(8)))


@pytest.mark.parametrize("options", [{"window": 3}, {}, {"even": GlobalBatch(2, 2, COST)}], ids=str)
def test_a_pack_is_a_function_of_its_number(options):
    read = [PackedStream(corpus_of(LENGTHS), 16, 5, **options).pack(index) for index in range(60)]
    stream = PackedStream(corpus_of(LENGTHS), 16, 5, **options)
    for index in np.random.default_rng(0).permutation(60):  # numpy's integers too
        assert plain([stream.pack(index)]) == plain([read[index]])


def test_every_token_comes_once_in_an_epoch_of_even_packs():
    # And in its last batch, for the first time of the next.
    stream = PackedStream(corpus_of(LENGTHS), 16, even=GlobalBatch(2, 2, COST))
    count = stream.packs_per_epoch(0)
    last = -(-count // 4) * 4
    tokens = Counter(np.concatenate([stream.pack(index)[1] for index in range(last)]).tolist())
    assert sorted(tokens) == list(range(sum(LENGTHS)))
    assert sum(tokens.values()) - sum(LENGTHS) <= 16 * (last - count)


def test_pieces_of_even_packs_keep_their_order():
    plain_stream = PackedStream(corpus_of(LENGTHS), 16)
    stream = PackedStream(corpus_of(LENGTHS), 16, even=GlobalBatch(2, 2, COST))
    order = [piece for index in range(4) for piece in plain_stream.pieces(index)]
    for index in range(4):
        places = [order.index(piece) for piece in stream.pieces(index)]
        assert places == sorted(places)
    pieces = stream.pieces(1)
    kept = list(pieces)
    pieces.clear()
    assert stream.pieces(1) == kept


@pytest.mark.parametrize("lengths", [[3.5, 2.0], [3, -1], np.array([2**63], np.uint64), None])
def test_rejects_a_corpus_whose_lengths_are_none(lengths):
    corpus = SimpleNamespace(name="mine", vocab_size=9, lengths=lengths, skipped={})
    rejects("corpus.lengths: got", PackedStream, corpus, 4)


@pytest.mark.parametrize("even", [True, 3, (2, 2), COST])
def test_rejects_what_is_no_global_batch(even):
    rejects(r"even: got .* allowed: a GlobalBatch or None", PackedStream, corpus_of(LENGTHS), 16, even=even)
