"""Parts of a corpus."""

import numpy as np
import pytest

from megatron_cp.data.corpus import TokenCorpus, split_corpus
from tests.refusals import rejects

OFFSETS = np.arange(0, 44, 4)
CORPUS = TokenCorpus("numbers", 64, np.arange(40, dtype=np.uint8), OFFSETS)


def test_parts_hold_every_document_once():
    training, validation, test = split_corpus(CORPUS, "8,2,0")
    assert test is None
    assert training.lengths.tolist() == [4] * 8
    assert validation.lengths.tolist() == [4] * 2
    assert training.tokens(7).tolist() == [28, 29, 30, 31]
    assert validation.tokens(0).tolist() == [32, 33, 34, 35]
    assert validation.tokens(1, 1, 3).tolist() == [37, 38]
    assert (validation.vocab_size, validation.skipped) == (64, {})
    assert validation.name == "documents 8 to 10 of numbers"


@pytest.mark.parametrize("shares", ["", "a,b", "-1,2", "0,0,0", "nan,1", "1,inf"])
def test_rejects_shares_that_are_none(shares):
    rejects(r"split: got .*; allowed: shares of at least 0", split_corpus, CORPUS, shares)


def test_rejects_a_part_without_documents():
    rejects("split: got 'documents 10 to 10'; allowed: at least one of the 10", split_corpus, CORPUS, "99,1,0")
