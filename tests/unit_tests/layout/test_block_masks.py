"""Tables of blocks by name: the pairs that they show, and the numbers of blocks that they refuse."""

import re

import numpy as np
import pytest

from megatron_cp.layout import Layout, Mask, Packing
from megatron_cp.layout.block_masks import BLOCK_TABLES
from tests import mask_oracle as oracle
from tests.refusals import rejects

TABLES = ["strided", "global_local", "star", "streaming"]
WITH_BLOCKS = ["strided:8", "global_local:5", "star:1", "streaming:3"]


def pairs_of(packing, spec):
    name, _, number = spec.partition(":")
    return oracle.table(packing, name, *map(int, filter(None, [number])))


@pytest.mark.parametrize(
    ("name", "visible", "blocks", "causal"),
    [("strided", 56, 16, False), ("global_local", 46, 16, False), ("star", 5, 4, True), ("streaming", 22, 8, True)],
)
def test_tables_have_their_published_weight(name, visible, blocks, causal):
    """Blocks that a table shows, of all of them; a causal block on the diagonal is half a block and half a diagonal."""
    size = 10
    mask = Mask.named(Packing([blocks * size]), name)
    assert mask.area == visible * size**2 + (blocks * size // 2 if causal else 0)


def test_a_table_has_as_many_bands_as_a_long_document_and_rows_of_a_short_one():
    assert list(BLOCK_TABLES) == TABLES
    counts = {name: len(Mask.named(Packing([1_000_003]), name).bands) for name in TABLES}
    assert counts == {"strided": 56, "global_local": 17, "star": 4, "streaming": 6}
    seen = {name: Mask.named(Packing([1, 3, 0, 6]), name).seen.tolist() for name in TABLES}
    assert seen == {
        "strided": [1, 1, 1, 1, 2, 2, 1, 1, 2, 2],
        "global_local": [1, 3, 2, 2, 6, 2, 2, 2, 2, 2],
        "star": [1, 1, 2, 2, 1, 2, 3, 4, 3, 3],
        "streaming": [1, 1, 2, 3, 1, 2, 3, 4, 4, 4],
    }


@pytest.mark.parametrize("spec", [*TABLES, *WITH_BLOCKS])
def test_tables_are_cut_of_tokens_and_shares_of_them_are_even(spec):
    assert not Mask.named(Packing([0, 0]), spec).bands.size
    packing = Packing([700, 1, 1300, 3, 640])
    mask = Mask.named(packing, spec)
    layout = Layout.balanced(packing, 5, mask=mask)
    work = [mask.seen[layout.tokens(rank)].sum() for rank in range(5)]
    assert np.ptp(layout.token_counts) <= 1
    assert max(work) < 1.01 * np.mean(work)
    # A document sees the same with pads behind it and without.
    real, filled = [29, 3, 0, 0, 17], [32, 4, 0, 5, 20]
    documents = Packing(filled)
    tokens = documents.positions() < np.repeat(real, filled)
    padded = Mask.named(documents, spec).unpadded(real)
    found = oracle.pairs_of(padded.bands, documents.total, documents.total)
    expected = pairs_of(Packing(real), spec)
    np.testing.assert_array_equal(found[np.ix_(tokens, tokens)], expected)
    assert found.sum() == expected.sum()
    assert padded.describe() != Mask.named(documents, spec).describe()
    assert Mask.named(documents, spec).unpadded(filled) == Mask.named(documents, spec)


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("strided:6", "strided:BLOCKS with a multiple of 4 from 4 to 256. strided has 16 blocks by default."),
        ("global_local:0", "global_local:BLOCKS with a number from 1 to 256. global_local has 16 blocks by default."),
        ("star:257", "star:BLOCKS with a number from 1 to 256. star has 4 blocks by default."),
        ("streaming:" + "9" * 15, "streaming:BLOCKS with a number from 1 to 256. streaming has 8 blocks by default."),
    ],
)
def test_rejects_a_number_of_blocks_that_a_table_cannot_have(spec, allowed):
    rejects(re.escape(f"mask: got '{spec}'; allowed: {allowed}"), Mask.named, Packing([5, 2]), spec)
