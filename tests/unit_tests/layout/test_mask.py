"""`Mask` against the token-level oracle, and what it refuses."""

import pickle
import re
from itertools import pairwise

import numpy as np
import pytest

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Mask, Packing
from tests import mask_oracle as oracle
from tests.counts import calls_of
from tests.refusals import rejects

TABLES = ["strided", "global_local", "star", "streaming"]
WITH_BLOCKS = ["strided:8", "global_local:5", "star:1", "streaming:3"]
SPELLED = ["causal", "full", "window:3,0", "window:-1,2", "window:2,-1", "prefix:4", "chunk:3", "first:2+window:3,1",
           *TABLES, *WITH_BLOCKS]  # fmt: skip


def lengths(rng, documents):
    return rng.choice([0, 0, 1, 1, 2, 3, 5, 7, 11], documents)


def packing(rng):
    return Packing(lengths(rng, rng.integers(1, 5)))


def keys_of(rng, queries):
    return Packing(lengths(rng, queries.num_documents))


def parts_of(rng, length):
    cuts = np.sort(rng.integers(0, length + 1, rng.integers(0, 5))).tolist()
    return [end - start for start, end in pairwise([0, *cuts, int(length)])]


def slices_of(rng, queries, keys):
    kinds = ["full", "causal", "inverse_causal", "both"]
    ends = [np.sort(rng.integers(0, total + 1, (rng.integers(0, 7), 2))) for total in (queries, queries)]
    count = min(map(len, ends))
    ends[1] = np.sort(rng.integers(0, keys + 1, (count, 2)))
    return [(*q, *k, str(rng.choice(kinds))) for q, k in zip(*(rows[:count].tolist() for rows in ends), strict=True)]


def both(name, *args, **kwargs):
    made = getattr(Mask, {"slices": "from_slices", "blocks": "from_blocks"}.get(name, name))
    return made(*args, **kwargs), getattr(oracle, name)(*args, **kwargs)


def blocks(rng, **kwargs):
    p, size = packing(rng), int(rng.integers(1, 5))
    count = -(-p.total // size)
    return both("blocks", p, rng.random((count, count)) < rng.random(), size, **kwargs)


def cross(rng, name):
    p = packing(rng)
    return both(name, p, keys_of(rng, p))


def cross_window(rng, **first):
    p = packing(rng)
    return both("window", p, *rng.integers(-1, 6, 2).tolist(), kv_packing=keys_of(rng, p), **first)


def cross_slices(rng):
    p = packing(rng)
    keys = keys_of(rng, p)
    return both("slices", p, slices_of(rng, p.total, keys.total), keys)


def own_slices(rng):
    p = packing(rng)
    return both("slices", p, slices_of(rng, p.total, p.total))


def prefixes(rng):
    p = packing(rng)
    return both("prefix", p, lengths(rng, p.num_documents).tolist())


def shared_question(rng):
    p = packing(rng)
    return both("shared_question", p, [parts_of(rng, length) for length in p.lengths])


def table(rng, name, *num_blocks):
    p = Packing(rng.choice([0, 1, 2, 3, 7, 17, 35], rng.integers(1, 4)))
    return Mask.named(p, ":".join([name, *map(str, num_blocks)])), oracle.table(p, name, *num_blocks)


KINDS = {
    "causal": lambda rng: both("causal", packing(rng)),
    "full": lambda rng: both("full", packing(rng)),
    "cross causal": lambda rng: cross(rng, "causal"),
    "cross full": lambda rng: cross(rng, "full"),
    "window": lambda rng: both("window", packing(rng), *rng.integers(-1, 6, 2).tolist()),
    "first": lambda rng: both(
        "window", packing(rng), *rng.integers(-1, 6, 2).tolist(), first=int(rng.integers(0, 6))
    ),
    "prefix": lambda rng: both("prefix", packing(rng), int(rng.integers(0, 8))),
    "prefixes": prefixes,
    "chunk": lambda rng: both("chunk", packing(rng), int(rng.integers(1, 8))),
    "shared question": shared_question,
    "slices": own_slices,
    "cross slices": cross_slices,
    "cross window": cross_window,
    "cross first": lambda rng: cross_window(rng, first=int(rng.integers(0, 6))),
    "blocks": blocks,
    "causal blocks": lambda rng: blocks(rng, causal=True),
    "strided": lambda rng: table(rng, "strided"),
    "global_local": lambda rng: table(rng, "global_local"),
    "star": lambda rng: table(rng, "star"),
    "streaming": lambda rng: table(rng, "streaming"),
    "named table": lambda rng: table(rng, str(rng.choice(TABLES)), 4 * int(rng.integers(1, 6))),
}  # fmt: skip


@pytest.mark.parametrize("cases", [80, pytest.param(250, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_oracle_and_queries_rise(kind, cases):
    rng = np.random.default_rng(list(KINDS).index(kind))
    for _ in range(cases):
        mask, expected = KINDS[kind](rng)
        count = oracle.pairs_of(mask.bands, mask.packing.total, mask.kv_packing.total)
        np.testing.assert_array_equal(count, expected.astype(int), err_msg=f"{mask!r} {mask.bands.tolist()}")
        assert mask.area == expected.sum()
        assert mask.seen.tolist() == expected.sum(axis=1).tolist()
    rng = np.random.default_rng(1)
    for _ in range(50):
        mask, _ = KINDS[kind](rng)
        first, last = mask.packing.documents_of(mask.bands[:, 0]), mask.packing.documents_of(mask.bands[:, 1] - 1)
        assert first.tolist() == last.tolist()
        assert (np.diff(mask.bands[:, 0]) >= 0).all()


def test_named_reads_every_number():
    p = Packing([9, 4])
    assert Mask.named(p, "first:2+window:3,1") == Mask.window(p, 3, 1, first=2)
    assert Mask.named(p, "window:3,1") == Mask.window(p, 3, 1)
    assert Mask.named(p, "prefix:3") == Mask.prefix(p, 3)
    assert Mask.named(p, "chunk:3") == Mask.chunk(p, 3)
    assert Mask.named(p, "full", Packing([2, 3])) == Mask.full(p, Packing([2, 3]))
    assert Mask.named(p, "causal", Packing([2, 3])) == Mask.causal(p, Packing([2, 3]))
    assert Mask.window(p, 3, first=0).name == "window:3,0"
    huge = "9" * 15
    assert Mask.named(p, f"window:{huge},{huge}") == Mask.full(p) == Mask.named(p, f"prefix:{huge}")
    assert Mask.named(p, f"chunk:{huge}") == Mask.causal(p) == Mask.named(p, f"first:{huge}+window:1,0")
    assert Mask.window(Packing([6]), 1, 0, first=2).seen.tolist() == [1, 2, 3, 4, 4, 4]


def test_what_was_cut_needlessly_is_joined():
    documents = Packing([40, 13])
    steps = [(start, start + 1, 0, start + 1, "full") for start in range(40)]
    assert Mask.from_slices(documents, [*steps, (40, 53, 40, 53, "causal")]) == Mask.causal(documents)
    whole = Mask.from_blocks(documents, np.ones((7, 7), dtype=bool), 8)
    assert whole == Mask.full(documents)
    assert Mask.from_blocks(documents, np.tri(7, dtype=bool), 8, causal=True) == Mask.causal(documents)
    assert len(Mask.shared_question(documents, [[10, 20, 10], [13]]).bands) == 4


def test_masks_are_compared_by_bands_and_packings():
    p = Packing([5, 1, 0, 3])
    assert Mask.causal(p) == Mask.window(p, -1, 0) == Mask.window(p, 9) == Mask.prefix(p, 1) == Mask.chunk(p, 5)
    assert hash(Mask.causal(p)) == hash(Mask.window(p, 9))
    assert Mask.causal(Packing([1, 1])) == Mask.full(Packing([1, 1]))
    p = Packing([5, 1])
    assert Mask.causal(p) != Mask.full(p)
    assert Mask.causal(p) != Mask.causal(Packing([5, 1, 0]))
    assert Mask.full(p) != "full"
    no_pairs = Packing([0, 0])
    assert Mask.full(no_pairs, no_pairs) != Mask.full(no_pairs, Packing([0, 1]))


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_by_value(kind):
    mask, _ = KINDS[kind](np.random.default_rng(2))
    assert mask.seen.size == mask.packing.total  # derived, and left behind
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask
    assert hash(copy) == hash(mask)
    assert copy.describe() == mask.describe()
    with pytest.raises(ValueError, match="read-only"):
        copy.bands[:] = 0


@pytest.mark.parametrize("spec", SPELLED)
def test_names_round_trip(spec):
    mask = Mask.named(Packing([7, 0, 1, 4]), spec)
    assert mask.name == spec
    assert Mask.named(mask.packing, mask.name) == mask
    assert mask.describe() == f"{spec} in each document"


def test_describe_tells_masks_of_one_name_apart():
    p = Packing([9, 4])
    one, other = (Mask.shared_question(p, [[3, size, 6 - size], [4]]) for size in (2, 3))
    table = np.eye(2, dtype=bool)
    pairs = [
        (one, other),
        (Mask.prefix(p, [2, 3]), Mask.prefix(p, [3, 2])),
        (Mask.from_slices(p, [(0, 3, 0, 3, "full")]), Mask.from_slices(p, [(0, 3, 0, 2, "full")])),
        (Mask.from_blocks(p, table, 7), Mask.from_blocks(p, ~table, 7)),
        (Mask.full(p, Packing([1, 2])), Mask.full(p, Packing([2, 2]))),
        (Mask.full(Packing([0]), Packing([1])), Mask.full(Packing([0]), Packing([2]))),
    ]
    for one, other in pairs:
        assert one.name == other.name
        assert one.describe() != other.describe()
        assert re.fullmatch(rf"{one.name} \([0-9a-f]{{16}}\) in each document", one.describe())


def test_is_cross_where_keys_are_packed_otherwise():
    p = Packing([3, 2])
    assert Mask.full(p, Packing([3, 1])).is_cross
    assert not Mask.full(p, Packing([3, 2])).is_cross
    assert not Mask.full(p).is_cross


def test_calls_do_not_grow_with_documents_or_no_faster_than_they_do():
    documents = Packing(np.random.default_rng(0).integers(0, 200, 4000))
    parts = [[length // 2, length // 4, length - length // 2 - length // 4] for length in documents.lengths.tolist()]
    slices = [
        made
        for start, end in documents.spans()
        for made in ((start, end, start, end, "causal"), (start, end, start, (start + end) // 2, "full"))
    ]
    table = np.ones((390, 390), dtype=bool)
    for spec in set(SPELLED) - set(WITH_BLOCKS):
        assert calls_of(lambda spec=spec: Mask.named(documents, spec)) < 3_000, spec
    assert calls_of(lambda: Mask.from_blocks(documents, table, -(-documents.total // 390), causal=True)) < 3_000
    assert calls_of(lambda: Mask.shared_question(documents, parts)) < 20 * 4000
    assert calls_of(lambda: Mask.from_slices(documents, slices)) < 100 * 4000


@pytest.mark.parametrize("spec", [spec for spec in SPELLED if spec not in (*TABLES, *WITH_BLOCKS)])
def test_pads_behind_documents_see_nothing_and_nobody_sees_them(spec):
    documents = Packing([7, 3, 0, 5, 4])
    real = [5, 3, 0, 0, 3]
    tokens = documents.positions() < np.repeat(real, documents.lengths)
    mask = Mask.named(documents, spec)
    padded = mask.unpadded(real)
    total = documents.total
    expected = oracle.pairs_of(mask.bands, total, total) * np.outer(tokens, tokens)
    np.testing.assert_array_equal(oracle.pairs_of(padded.bands, total, total), expected)
    assert mask.unpadded(documents.lengths) is mask
    # Ranks that compare their plans tell pads apart.
    assert len({one.describe() for one in (mask, padded, mask.unpadded([4, 3, 0, 0, 3]))}) == 3


P = Packing([5, 2])
NAMES = " | ".join(
    ["causal", "full", "window:LEFT,RIGHT", "window:N", "prefix:N", "chunk:N", "first:N+window:LEFT,RIGHT"]
    + [f"{name}[:BLOCKS]" for name in TABLES]
)


@pytest.mark.parametrize(
    "spec",
    ["stride", "star:", "star:x", "strided:4,8", "", "Causal", "window", "window:0", "window:-1", "window:-2,0",
     "window:1.5,0", "prefix:-1", "chunk:0", "first:2", "window:1,2,3", " causal", "causal\n", "prefix:" + "9" * 99,
     None, 3],
)  # fmt: skip
def test_rejects_an_unknown_name(spec):
    with pytest.raises(ArgumentError, match=re.escape(f"allowed: {NAMES}.")) as caught:
        Mask.named(P, spec)
    assert caught.value.argument == "mask"


def test_one_number_of_a_window_counts_the_query_itself_and_two_do_not():
    packing = Packing([6, 0, 1, 3])
    mask = Mask.named(packing, "window:3")
    assert mask == Mask.named(packing, "window:2,0")
    assert mask.name == "window:2,0"
    assert mask.seen.tolist() == [1, 2, 3, 3, 3, 3, 1, 1, 2, 3]
    assert Mask.named(packing, "window:1").seen.tolist() == [1] * 10
    keys = Packing([9, 1, 1, 2])
    assert Mask.named(packing, "window:3", keys) == Mask.window(packing, 2, kv_packing=keys)


@pytest.mark.parametrize("spec", [spec for spec in SPELLED if "window" in spec])
def test_windows_by_name_of_cross_attention(spec):
    keys = Packing([1, 4])
    named = Mask.named(P, spec, keys)
    first, *numbers = [int(n) for n in re.findall(r"-?\d+", spec if "first" in spec else f"0,{spec}")]
    np.testing.assert_array_equal(
        oracle.pairs_of(named.bands, P.total, keys.total), oracle.window(P, *numbers, first=first, kv_packing=keys)
    )
    assert named.name == spec


@pytest.mark.parametrize("spec", ["prefix:4", "chunk:3", *TABLES])
def test_rejects_a_name_without_meaning_for_cross_attention(spec):
    with pytest.raises(ArgumentError, match=r"mask: got .* where keys have a packing of their own.*Mask\.from_slices"):
        Mask.named(P, spec, Packing([1, 2]))
    assert Mask.named(P, spec, Packing([5, 2])) == Mask.named(P, spec)


def test_rejects_what_the_table_of_arguments_does_not_have():
    rejects("^lengths: got", Mask.full(P, Packing([4, 2])).unpadded, [4, 2])
    rejects(r"^slices\[0\]: got", Mask.from_slices, P, [(0, 7, 0, 7, "full")], Packing([1, 2]))
    rejects(r"^slices\[1\]: got", Mask.from_slices, P, [(0, 1, 0, 1, "full"), (0, 1, 0, 1, "diagonal")])
