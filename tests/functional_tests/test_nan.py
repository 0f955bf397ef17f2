"""A NaN of one document changes no bit of another's outputs and gradients, in any operation, layout and tree."""

import dataclasses
import random
import warnings

import numpy as np
import pytest
import torch

from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.schemes import MODES, SCHEMES
from tests import fuzz_check
from tests.fuzz_cases import ATTENTIONS, KINDS, Call
from tests.fuzz_draw import case_of
from tests.fuzz_problem import problem_of

OPERATIONS = (*ATTENTIONS, *KINDS)


def touched(call, chosen):
    """The segments whose documents all have a segment, and those of which one has it.

    Documents end in segments with tokens that no other tokens continue: one that is the beginning of another is
    computed as one with it.
    """
    parents = call.parents or (-1,) * len(call.lengths)
    documents, continued = [set() for _ in parents], set()
    for number, length in reversed([*enumerate(call.lengths)]):  # a segment comes after its parent
        if length or number in continued:
            continued.add(parents[number])
    for leaf in {number for number, length in enumerate(call.lengths) if length} - continued:
        segment = leaf
        while segment >= 0:
            documents[segment].add(leaf)
            segment = parents[segment]
    own = {number for number, held in enumerate(documents) if held <= documents[chosen]}
    return own, {number for number, held in enumerate(documents) if held & documents[chosen]}


def outside(lengths, segments):
    """`[total]` True for the tokens of other segments."""
    return torch.from_numpy(np.repeat([number not in segments for number in range(len(lengths))], lengths))


def on_rank(group, call, plan, problem):
    rank = fuzz_check._Rank(group, call, plan, problem)
    rank.forward()
    rank.backward()
    return rank.results()


def whole(call, plan, problem, size):
    """The outputs and gradients of all tokens, by name, without those of parameters."""
    ranks = run_ranks(on_rank, size, call, plan, problem)
    rows, keys, out = fuzz_check.layouts_of(call, plan)
    layouts = {name: keys if name in problem.of_keys else rows for name in problem.leaves if name not in problem.whole}
    layouts |= {name: out for name in ranks[0] if name.startswith("out ")}
    return {
        name: layout.unshard([rank[name] for rank in ranks])
        for name, layout in layouts.items()
        if name not in call.frozen
    }


def poisoned(call, problem, chosen):
    """The problem with NaN in one segment's rows of all that is sharded."""
    dirty = {}
    for name, leaf in problem.leaves.items():
        dirty[name] = leaf.clone()
        if name not in problem.whole:
            lengths = call.kv_lengths or call.lengths if name in problem.of_keys else call.lengths
            dirty[name][~outside(lengths, {chosen})] = torch.nan
    return dataclasses.replace(problem, leaves=dirty)


def check(call, size, chosen):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        plan, problem = fuzz_check.plan_of(call, size), problem_of(call, size)
        clean, dirty = (whole(call, plan, given, size) for given in (problem, poisoned(call, problem, chosen)))
    own, shared = touched(call, chosen)
    for name, expected in clean.items():
        lengths = call.kv_lengths or call.lengths if name in problem.of_keys else call.lengths
        kept = outside(lengths, own if name.startswith("out ") else shared)
        assert torch.equal(dirty[name][kept], expected[kept]), (name, call)


def drawn(seed, count):
    """Calls with several documents or segments of tokens, and one of these."""
    number = 0
    while count:
        case, number = case_of(seed, number), number + 1
        for call in case.calls:
            tokens = np.flatnonzero(np.array(call.lengths))
            if call.operation in OPERATIONS and tokens.size > 1:
                yield call, case.cp_size, random.Random(number).choice(tokens.tolist())
                count -= 1
                if not count:
                    return


TREE = {"lengths": (4, 1, 1, 1), "parents": (-1, 0, 0, 0), "heads": 2, "groups": 2}
CASES = [
    (Call("attention", scheme=scheme, mask=mask, **TREE), 2, 2)
    for scheme in ("exact", "tiled") for mask in (("window", 0, 0), ("chunk", 1))
] + [
    (Call("attention", lengths=(4, 3, 3, 3), parents=(-1, 0, 0, 0), mask=("chunk", 4), scheme="exact"), 1, 2),
    *((Call("sparse_attention", lengths=(2, 2), layout=(((0, 1), (2, 3), (1, 2), (3, 4)),), width=3, scheme="exact",
            options=options), 1, 1) for options in ((), ("dense", "relu"))),
    (Call("sparse_attention", scheme="exact", width=2, options=("dense",), **TREE), 1, 2),
    (Call("sparse_attention", scheme="exact", width=2, block=2, **TREE), 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("call", "size", "chosen"), CASES)
def test_a_nan_stays_in_its_document(call, size, chosen):
    check(call, size, chosen)


RAGGED = {"lengths": (7, 1, 30, 14, 2), "layout": "zigzag", "heads": 6, "groups": 2}
EVERY = [("attention", scheme) for scheme in SCHEMES] + [(name, mode) for name in KINDS for mode in MODES]


@pytest.mark.parametrize(("operation", "scheme"), EVERY)
@pytest.mark.few
def test_a_nan_stays_in_its_document_in_every_scheme_and_mode(operation, scheme):
    check(Call(operation, scheme=scheme, sink=operation == "attention", **RAGGED), 4, 2)


@pytest.mark.parametrize(("seed", "count"), [(0, 12), pytest.param(5, 300, marks=pytest.mark.thorough)])
def test_a_nan_stays_in_its_document_in_any_case(seed, count):
    for call, size, chosen in drawn(seed, count):
        check(call, size, chosen)
