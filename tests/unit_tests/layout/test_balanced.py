"""`Layout.balanced`: tokens and work both even, in few fragments."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.balance import TokenWork, even_shares, most_keys_moved
from megatron_cp.layout.bands import seen_in_pieces
from megatron_cp.planner.layouts import random_layout
from tests.counts import calls_of, peak_of
from tests.mask_oracle import pairs_of

ragged = settings(max_examples=25)
LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 5, 13, 97]) | st.integers(0, 300), min_size=1, max_size=8)
MASKS = ["causal", "full", "window:20,0", "prefix:10", "chunk:16", "first:4+window:9,0"]


def heavy_tailed(seed, scale=2000):
    lengths = np.random.default_rng(seed).pareto(1.1, 64) * scale + 1
    return Packing(np.minimum(lengths, 131072).astype(np.int64))


def work_of(layout, mask):
    return np.array([mask.seen[layout.tokens(rank)].sum() for rank in range(layout.cp_size)])


def imbalance(layout, mask):
    work = work_of(layout, mask)
    return work.max() / work.mean() if work.any() else 1.0


def fragments(layout):
    return np.diff(layout.fragment_offsets)


def check_shares(layout):
    """Every token once, counts even, few fragments, in stream order within a rank and ranks by their first token."""
    assert np.sort(layout.order).tolist() == list(range(layout.packing.total))
    assert np.ptp(layout.token_counts) <= 1
    assert fragments(layout).sum() <= 2 * layout.cp_size - 1
    held = [layout.tokens(rank) for rank in range(layout.cp_size)]
    assert all((np.diff(tokens) > 0).all() for tokens in held)
    firsts = [tokens[0] for tokens in held if tokens.size]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("cp_size", [8, 16, 32, 64])
@pytest.mark.parametrize("spec", ["causal", "window:500,0", "prefix:300"])
@pytest.mark.few
def test_64_heavy_tailed_documents(spec, cp_size):
    for seed in range(3):
        mask = Mask.named(heavy_tailed(seed), spec)
        layout = Layout.balanced(mask.packing, cp_size, mask=mask)
        check_shares(layout)
        assert imbalance(layout, mask) < 1.003
        assert fragments(layout).max() <= (3 if spec == "causal" else 4)
        assert not layout.pad_rows.any()
    assert imbalance(Layout.contiguous(heavy_tailed(0), cp_size), Mask.causal(heavy_tailed(0))) > 2


def test_fragments_of_a_rank_over_many_packs():
    counts = [
        fragments(Layout.balanced(heavy_tailed(seed, scale=300), cp_size)).max()
        for seed in range(10) for cp_size in (3, 5, 8, 24)
    ]  # fmt: skip
    assert max(counts) <= 4
    assert np.mean(np.array(counts) > 3) <= 0.05


@ragged
@given(lengths=LENGTHS, cp_size=st.integers(1, 12), spec=st.sampled_from(MASKS))
@example(lengths=[29, 28, 21], cp_size=3, spec="causal")  # where contiguous is lucky
@example(lengths=[0], cp_size=5, spec="causal")
@example(lengths=[1, 0, 1, 1], cp_size=5, spec="causal")
def test_shares_are_even_and_few(lengths, cp_size, spec):
    mask = Mask.named(Packing(lengths), spec)
    layout = Layout.balanced(mask.packing, cp_size, mask=mask)
    check_shares(layout)
    assert imbalance(layout, mask) <= imbalance(Layout.contiguous(mask.packing, cp_size), mask)


@pytest.mark.parametrize("cp_size", [2, 3, 5, 8])
def test_no_less_even_than_zigzag_of_as_few_fragments(cp_size):
    for length in range(40):
        mask = Mask.causal(Packing([length]))  # one document: such as 12 tokens at cp 5, where zigzag is lucky
        zigzag = Layout.zigzag(mask.packing, cp_size)
        assert fragments(zigzag).sum() <= 2 * cp_size - 1
        assert imbalance(Layout.balanced(mask.packing, cp_size), mask) <= imbalance(zigzag, mask), length


@ragged
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=6), cp_size=st.integers(2, 8))
def test_work_misses_the_mean_by_no_more_than_tokens_allow(lengths, cp_size):
    mask = Mask.causal(Packing(lengths))
    work = work_of(Layout.balanced(mask.packing, cp_size), mask)
    share = mask.area / cp_size
    largest_jump = int(mask.seen.max(initial=0))  # of the work of windows one token apart
    # Every rank in turn misses the mean of what is left, and what is missed is spread over those that remain.
    harmonic = sum(1 / ranks for ranks in range(1, cp_size + 1))
    assert np.abs(work - share).max() <= harmonic * max(largest_jump, 2e-3 * share)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 64])
def test_one_document(cp_size):
    mask = Mask.causal(Packing([100_003]))
    layout = Layout.balanced(mask.packing, cp_size)
    check_shares(layout)
    assert imbalance(layout, mask) < 1.002


def test_causal_is_the_default_and_cross_attention_counts_its_keys():
    packing = heavy_tailed(0)
    assert Layout.balanced(packing, 8) == Layout.balanced(packing, 8, mask=Mask.causal(packing))
    window = Mask.window(packing, 500)
    assert Layout.balanced(packing, 8) != Layout.balanced(packing, 8, mask=window)
    packing, kv_packing = Packing([1000, 1000, 1000]), Packing([10, 5000, 70])
    mask = Mask.full(packing, kv_packing)
    layout = Layout.balanced(packing, 4, mask=mask)
    check_shares(layout)
    assert imbalance(layout, mask) < 1.01


def test_work_that_is_even_stays_in_stream_order():
    packing = Packing([16] * 12)
    assert Layout.balanced(packing, 6) == Layout.contiguous(packing, 6)
    packing = Packing([40, 3])
    layout = Layout.balanced(packing, 4, mask=Mask.from_slices(packing, []))
    assert layout == Layout.contiguous(packing, 4)


def block_diffusion(tokens, block, documents=1):
    """Noisy tokens, which see their own block and the clean ones before it, and then the clean tokens, which are causal
    in blocks; so each document.
    """
    packing = Packing([2 * tokens] * documents)
    slices = []
    for noisy in packing.cu_seqlens[:-1].tolist():
        clean = noisy + tokens
        for start in range(0, tokens, block):
            end = min(start + block, tokens)
            slices += [(noisy + start, noisy + end, noisy + start, noisy + end, "full")]
            slices += [(noisy + start, noisy + end, clean, clean + start, "full")] * (start > 0)
            slices += [(clean + start, clean + end, clean, clean + end, "full")]
    return Mask.from_slices(packing, slices)


def keys_moved(layout, mask):
    fragments = [layout.fragments_of(rank) for rank in range(layout.cp_size)]
    return most_keys_moved(mask.bands, fragments)


def test_of_shares_that_are_as_even_the_one_that_moves_fewer_keys():
    mask = block_diffusion(65536, 1024)
    layout = Layout.balanced(mask.packing, 8, mask=mask)
    assert layout == Layout.zigzag(mask.packing, 8)
    shares = even_shares(TokenWork.from_tokens(mask.seen), 8)
    assert 1.9 * keys_moved(layout, mask) < most_keys_moved(mask.bands, shares)


def test_a_window_is_not_cut_in_two_for_a_thousandth_of_the_work():
    mask = Mask.window(Packing([262_144]), 1024, 1024)  # contiguous has 1.002 of the mean
    layout = Layout.balanced(mask.packing, 32, mask=mask)
    assert layout == Layout.contiguous(mask.packing, 32)
    shares = even_shares(TokenWork.from_tokens(mask.seen), 32)
    assert keys_moved(layout, mask) == 2048 < most_keys_moved(mask.bands, shares)


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize(
    "mask",
    [
        block_diffusion(2000, 150), block_diffusion(500, 100, documents=4), Mask.causal(Packing([4001])),
        *(Mask.named(Packing([4001]), name) for name in ("window:500,0", "prefix:900", "first:60+window:200,0")),
        Mask.causal(heavy_tailed(0, scale=30)),
    ],
    ids=["blocks", "blocks4", "causal", "window", "prefix", "first", "heavy"],
)  # fmt: skip
def test_fewer_keys_and_no_less_even_than_the_shares_of_work_alone(mask, cp_size):
    layout = Layout.balanced(mask.packing, cp_size, mask=mask)
    check_shares(layout)
    shares = Layout.from_fragments(mask.packing, even_shares(TokenWork.from_tokens(mask.seen), cp_size))
    assert imbalance(layout, mask) <= 1.002 * imbalance(shares, mask)
    assert keys_moved(layout, mask) <= keys_moved(shares, mask)


@ragged
@given(lengths=LENGTHS.filter(any), cp_size=st.integers(1, 5), spec=st.sampled_from(MASKS), seed=st.integers(0, 9))
def test_keys_that_ranks_send_and_receive(lengths, cp_size, spec, seed):
    mask = Mask.named(Packing(lengths), spec)
    layout = random_layout(mask.packing, cp_size, seed=seed)
    held = [set(layout.tokens(rank).tolist()) for rank in range(cp_size)]
    seen = pairs_of(mask.bands, mask.packing.total, mask.packing.total) > 0
    wanted = [set(np.flatnonzero(seen[sorted(own)].any(0)).tolist()) - own for own in held]
    moved = [len(each) for each in wanted] + [sum(len(each & own) for each in wanted) for own in held]
    assert keys_moved(layout, mask) == max(moved)


@pytest.mark.parametrize("align", [1, 3, 16])
def test_align_adds_pad_rows_to_the_same_shares(align):
    packing = heavy_tailed(1)
    layout = Layout.balanced(packing, 5, align=align)
    assert layout == Layout.balanced(packing, 5).padded(align=align)
    assert (layout.row_counts % align == 0).all()


def test_calls_grow_with_ranks_and_not_with_documents():
    for documents in (2_500, 20_000):  # with 175,000 and 120,000 calls
        packing, layouts = Packing(np.random.default_rng(0).integers(0, 200, documents)), []
        assert calls_of(lambda packing=packing, found=layouts: found.append(Layout.balanced(packing, 64))) < 300_000
        assert imbalance(layouts[0], Mask.causal(packing)) < 1.002


@ragged
@given(lengths=LENGTHS.filter(any), spec=st.sampled_from(MASKS))
def test_work_before_each_place(lengths, spec):
    mask = Mask.named(Packing(lengths), spec)
    work = TokenWork(*seen_in_pieces(mask.bands, mask.packing.total), mask.packing.total)
    places = np.arange(mask.packing.total + 1)
    assert work.before(places).tolist() == np.cumsum(np.append(0, mask.seen)).tolist()
    assert TokenWork.from_tokens(mask.seen).before(places).tolist() == work.before(places).tolist()


def test_no_table_is_made_of_tokens():
    packing = heavy_tailed(0, scale=30_000)
    assert packing.total > 2**21
    assert peak_of(lambda: Layout.balanced(packing, 64)) < packing.total  # far below a byte a token
