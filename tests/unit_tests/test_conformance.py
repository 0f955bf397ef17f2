"""`tools/conformance` says right, wrong, refused and hung where each is the case."""

import time

import pytest
import torch
from torch import distributed

from tests.limits import limit
from tools.conformance import page
from tools.conformance.cells import Cell, all_cells, unavailable
from tools.conformance.judge import ABSENT, BOUND, Outcome, in_order, over_ranks, relative, run_cell
from tools.conformance.ways import Way


def attend(q, k, v):
    return torch.softmax(q @ k.T, dim=-1) @ v


def shared(rank, ranks, *, keys_of_all=True, late=False):
    """Errors of attention over rows that ranks share; the wrong way leaves out other ranks' keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 12, 4, generator=generator)
    places = torch.arange(12).chunk(ranks)[rank]
    mine = slice(None) if keys_of_all else places
    if late and rank == 1:
        time.sleep(60)
    rows = attend(q[places], k[mine], v[mine])
    return relative(in_order(rows, places, 12), attend(q, k, v)), None


def wrong(rank, ranks):
    return shared(rank, ranks, keys_of_all=False)


def wrong_gradient(rank, ranks):
    return 0.0, (3 * BOUND if rank else 0.0)


def refusing(rank, ranks):
    if rank:
        raise ValueError("4 heads on 3 ranks\nand more")
    return over_ranks(torch.zeros(1)).item(), None  # the other rank waits for it


def hanging(rank, ranks):
    return shared(rank, ranks, late=True)


def without_flash(rank, ranks):
    raise ImportError("flash_attn is not installed")


@pytest.mark.parametrize(
    ("compare", "name", "words"),
    [
        (shared, "right", ""), (wrong, "wrong without a word", ""), (wrong_gradient, "wrong without a word", ""),
        (refusing, "refused", "ValueError: 4 heads on 3 ranks"), (hanging, "hung", "had not answered"),
        (without_flash, "not runnable", "ImportError: flash_attn is not installed"),
    ],
)  # fmt: skip
def test_cells_are_judged(compare, name, words):
    outcome = run_cell(compare, 2, 5.0 if compare is hanging else limit(60))  # a busy machine is no hang
    assert outcome.name == name
    assert words in outcome.words
    assert not distributed.is_initialized()


def test_rows_that_no_rank_has_are_wrong_and_packages_that_are_not_there_are_said():
    rows = torch.ones(2, 3)
    for places in ([0, 5], [0, 0], [-1, 1]):
        assert relative(in_order(rows, torch.tensor(places), 2), rows) == float("inf")
    assert relative(in_order(torch.ones(3, 3), torch.tensor([1, 0, 2]), 2), rows) == 0
    assert unavailable(Way(None, "no-such-package", "no_such_module", "")).name == ABSENT


def test_the_page_shows_every_outcome():
    cells = all_cells("ringmaster ulysses Llama, 3")
    wrong_one = Outcome("wrong without a word", 0.3, 0.1)
    outcomes = [Outcome("right", 1e-7, 2e-7), wrong_one, Outcome("refused", words="why")]
    text = page.text_of(dict(zip(cells, outcomes, strict=False)), 60)
    shown = ("| right | **wrong** 3.0e-01 | refused [1] |", "- [1] `` why ``", "| 1 | 1 | 1 | 0 | 0 |")
    for expected in shown:
        assert expected in text
    assert len(set(all_cells())) == len(all_cells())
    assert Cell("ours", "Flux, 3 heads", "37, 1", 3) in all_cells()
