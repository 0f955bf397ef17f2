"""Planned tiles under every mask, for every kind of pack, shape of heads and number of ranks: exact, and as planned.

Each case is run over its ranks, compared with one dense softmax, and run once more: as it is, for the same bits, or
with one document changed, of which no other may notice. The suite runs every mask with every number of ranks, of one
pack and one shape of heads in turn, so that every pair is there; `python -m tests.functional_tests.test_tiled_masks`
runs the whole product, in minutes.
"""

import contextlib
import itertools
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_cp.executor.agreement import compare_calls
from megatron_cp.executor.launch import run_ranks
from megatron_cp.testing.parity import Case, draw, run_layer, whole
from megatron_cp.testing.poison import poisoned
from tests.counting_group import CountingGroup
from tests.isolation import _changed, _changed_documents
from tests.limits import limit
from tests.scheme_cases import check_results

TOKENS = 47
PACKS = {"1 document": (TOKENS,), "5 documents": (11, 1, 19, 3, 13)}
SHAPES = {
    "MHA": {"heads": 3, "groups": 3, "head_dim": 8, "value_head_dim": 8},
    "8:2": {"heads": 8, "groups": 2, "head_dim": 8, "value_head_dim": 8},
    "one head": {"heads": 1, "groups": 1, "head_dim": 8, "value_head_dim": 8},
    "MLA": {"heads": 2, "groups": 2, "head_dim": 24, "value_head_dim": 16},
}
SIZES = (3, 4, 5, 8)
LAYOUTS = ("contiguous", "zigzag", "balanced", "random")  # one in each case
BLOCK = 5


def table(causal):
    """Makes a table in which blocks of queries see themselves and a few others; one sees none, the last is short."""
    blocks = -(-TOKENS // BLOCK)
    found = np.random.default_rng(3).random((blocks, blocks)) < 0.35
    found |= np.eye(blocks, dtype=bool)
    found[3] = False
    return ("from_blocks", found, BLOCK) if not causal else ("from_blocks", np.tril(found), BLOCK)


# Masks of one spelling for both packs, and such that depend on the pack.
MASKS = {
    **{name: name for name in ("full", "causal", "strided", "global_local", "star", "streaming")},
    **{name: name for name in ("window:6,0", "window:4,3", "first:2+window:5,0", "prefix:7", "chunk:6")},
    "shared questions": {
        "1 document": ("shared_question", ((17, 11, 4, 15),)),
        "5 documents": ("shared_question", ((5, 4, 2), (1,), (7, 0, 12), (1, 1, 1), (13,))),
    },
    "slices": (
        "from_slices",
        ((0, 30, 5, 47, "causal"), (2, 40, 0, 11, "full"), (20, 47, 8, 30, "inverse_causal"), (9, 33, 14, 47, "both")),
    ),
    "blocks": table(causal=False),
    "blocks below the diagonal": table(causal=True),
}
EVERY = list(itertools.product(MASKS, PACKS, SHAPES, SIZES))


def is_usual(mask, pack, shape, size):
    """Returns True if a case is in every run: each mask with each number of ranks; packs and head shapes alternate."""
    row, column = list(MASKS).index(mask), SIZES.index(size)
    return (list(PACKS).index(pack), list(SHAPES).index(shape)) == ((row + column // 2) % 2, (row + column) % 4)


def layout_of(mask, size):
    return LAYOUTS[(list(MASKS).index(mask) // 2 + SIZES.index(size)) % 4]


@dataclass(frozen=True)
class Planned(Case):
    """A case that is planned once for all ranks of this process."""

    made: Any = field(default=None, compare=False)

    def plan(self):
        return super().plan() if self.made is None else self.made


def case_of(mask, pack, shape, size):
    given, number = MASKS[mask], EVERY.index((mask, pack, shape, size))
    case = Planned(
        "attention", size, PACKS[pack], layout=layout_of(mask, size),
        scheme="tiled", mask=given[pack] if isinstance(given, dict) else given, seed=number, **SHAPES[shape],
    )  # fmt: skip
    return replace(case, made=case.plan())


def run_twice(group, case, problem, other):
    """This rank's results of two problems, and the bytes that it sent for the first."""
    compare_calls(group, False)  # what a plan costs once is not part of it
    counted = CountingGroup(group)
    with poisoned() if case.seed % 8 == 0 else contextlib.nullcontext():
        first = run_layer(counted, case, problem)
    return first, counted.bytes_sent, run_layer(group, case, other)


def check_case(case):
    problem = draw(case)
    document = 2 if len(case.lengths) > 1 else None
    other = problem if document is None else _changed(problem, case, document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ranks without tokens
        ranks = run_ranks(run_twice, case.cp, case, problem, other, timeout=limit(60))
    planned = [
        sum(pair) for pair in zip(*(case.plan().bytes_sent(8, forward=way) for way in (True, False)), strict=True)
    ]
    assert [sent for _, sent, _ in ranks] == planned
    first, second = (whole(case, [each[place] for each in ranks]) for place in (0, 2))
    check_results(case, first)
    for name, value in first.items():
        if document is None:
            assert torch.equal(value, second[name]), name
        else:
            assert _changed_documents(case, value, second[name], document) == [], name
    start, end = case.packing.cu_seqlens[2:4].tolist() if document else (0, 0)
    assert not document or not torch.equal(first["out"][start:end], second["out"][start:end])


@pytest.fixture(scope="module")
def ran():
    """Counts the cases that ran, and prints the number at the end."""
    cases = []
    yield cases
    print(f"\nplanned tiles: {len(cases)} of {len(EVERY)} cases ran")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.few
def test_planned_tiles_are_dense_attention_in_the_planned_bytes(mask, size, ran):
    (given,) = (given for given in itertools.product([mask], PACKS, SHAPES, [size]) if is_usual(*given))
    check_case(case_of(*given))
    ran.append(given)


def test_every_pair_is_in_the_cases_of_a_run():
    """Pairs are those of mask, pack, shape of heads, number of ranks and layout."""
    axes = MASKS, PACKS, SHAPES, SIZES, LAYOUTS
    usual = [(*given, layout_of(given[0], given[3])) for given in EVERY if is_usual(*given)]
    for one, two in itertools.combinations(range(5), 2):
        assert {(case[one], case[two]) for case in usual} == set(itertools.product(axes[one], axes[two]))


def test_tiles_travel_in_the_cases():
    """Most of them: in most, queries leave their owners too."""
    plans = [case_of(mask, "1 document", "8:2", 4).plan() for mask in MASKS]
    assert all(max(plan.bytes_sent(8, forward=True)) > 0 for plan in plans)
    visited = [plan for plan in plans if plan.attend.moves_queries(forward=True)]
    assert len(visited) >= len(plans) // 3


if __name__ == "__main__":
    for done, given in enumerate(EVERY, 1):
        check_case(case_of(*given))
        print(f"{done} of {len(EVERY)} cases ran: {', '.join(map(str, given))}", flush=True)
