"""A fixed part of what `make fuzz` draws, and that the draws are wide, repeat, and see what is broken."""

import functools
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_cp.exchange import coding, messages
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.executor import gather, head_exchange, scan, transfers
from megatron_cp.executor.transports import hierarchical
from megatron_cp.layout import Mask, Packing
from megatron_cp.layout.block_masks import BLOCK_TABLES
from megatron_cp.layout.branches import Branches
from megatron_cp.plan.schemes import MODES, SCHEMES
from tests import fuzz_check
from tests.fuzz_cases import ATTENTIONS, KINDS, LAYOUTS, OPERATIONS, Call, Case, layout_named, shrunk
from tests.fuzz_check import check
from tests.fuzz_draw import case_of
from tools import fuzz

CASES = 24  # times 8


PARTS = [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 8))]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(600)
def test_any_case_is_what_the_oracle_says(part):
    # The same draws in every run: CI fails for what changed, `make fuzz` looks further.
    for number in range(part * CASES, (part + 1) * CASES):
        case = case_of(0, number)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"python tools/fuzz.py --case '{case.line()}'") from error


ROUNDED = (
    # A share of a key's gradient lies exactly between two numbers of bfloat16.
    '{"cp_size":4,"calls":[{"operation":"attention","lengths":[16],"layout":"random","scheme":"a2a+exact","heads":4,'
    '"groups":4,"mask":["full"],"dtype":"bfloat16","whole":true,"seed":388438}]}',
    # One rank of a host adds up the gradients of its host, and rounds the sum.
    '{"cp_size":3,"calls":[{"operation":"attention","lengths":[16],"scheme":"exact_by_host","transport":"hierarchical",'
    '"hosts":[0,1,0],"heads":5,"groups":5,"dtype":"bfloat16","whole":true,"seed":907977}]}',
    # Heads of one feature are normalised close to zero.
    '{"cp_size":1,"calls":[{"operation":"gated_delta_net","lengths":[2,14,13],"heads":4,"groups":4,"head_dim":1,'
    '"value_head_dim":1,"options":["bias"],"dtype":"float32","seed":625201}]}',
)  # fmt: skip


@pytest.mark.parametrize("line", ROUNDED, ids=("tie", "host", "steep"))
def test_what_rounding_may_change_is_allowed(line):
    check(Case.read(line))


@pytest.mark.parametrize("line", ROUNDED, ids=("tie", "host", "steep"))
def test_no_more_than_that_is_allowed(line, monkeypatch):
    case, close = Case.read(line), fuzz_check._close
    name = "v" if case.calls[0].whole else "conv"

    def shifted(call, named, found, *args):
        if named == name:  # by two numbers of bfloat16, or by a thousandth of the largest entry
            found = found + found.abs() * 2**-6 if call.whole else found + found.abs().max() / 1000
        close(call, named, found, *args)

    monkeypatch.setattr(fuzz_check, "_close", shifted)
    with pytest.raises(fuzz_check.MismatchError, match=name):
        check(case)


def test_a_tie_has_two_sums():
    shares = torch.tensor([258.0, 257.0, 259.0, -257.0, 3.0], dtype=torch.float64)  # numbers are 2 apart above 256
    assert fuzz_check._rounded_both_ways(shares).tolist() == [
        [258, 256, 260, -256, 3],
        [258, 258, 258, -258, 3],
    ]
    assert fuzz_check._rounded_both_ways(shares[:1]).tolist() == [[258]]


@functools.cache  # not when the module is imported, which every worker does
def many():
    return [case_of(1, number) for number in range(3000)]


def test_a_case_is_read_from_its_line():
    assert all(Case.read(case.line()) == case for case in many())
    assert many()[:50] == [case_of(1, number) for number in range(50)]


def calls():
    return [(case, call) for case in many() for call in case.calls]


def seen(name):
    return {getattr(call, name) for _, call in calls()}


def orders_of(case, call):
    """Returns the orders of the ranks' tokens in the stream."""
    layout = layout_named(call.layout, call.packing, case.cp_size, align=call.align, seed=call.seed)
    held = [layout.fragments_of(rank) for rank in range(case.cp_size)]
    of_ranks = [sorted(fragments) for fragments in held if fragments]
    are_blocks = all(one[-1].end - one[0].start == sum(end - start for start, end in one) for one in of_ranks)
    counts = layout.token_counts.tolist()
    return {
        "ranks hold a block each" if are_blocks else "ranks hold several",
        "ranks in order" if of_ranks == sorted(of_ranks) else "ranks turned",
        "shares equal" if len(set(counts)) == 1 else "shares uneven" if all(counts) else "some shares empty",
        *(["within ranks turned"] if held != [sorted(fragments) for fragments in held] else []),
        *(["one token a rank"] if max(counts) == 1 else []),
    }


def test_draws_have_rows_in_every_order():
    """Rows in every order are drawn by themselves and with each scheme, since a trait of all draws hides faults."""
    orders = ("ranks turned", "within ranks turned", "ranks hold a block each")
    others = ("ranks in order", "ranks hold several", "shares equal", "some shares empty", "shares uneven")
    met = Counter()
    for case, call in calls()[:3000]:  # each makes a layout
        family = "softmax" if call.operation in ATTENTIONS else "linear" if call.operation in KINDS else "moved"
        met.update((of, order) for of in (family, call.scheme) for order in orders_of(case, call))
    for family in ("softmax", "linear", "moved"):
        assert all(met[family, order] >= 2 for order in (*orders, *others, "one token a rank")), family
    for scheme in SCHEMES:
        assert all(met[scheme, order] >= 2 for order in orders), scheme


def levels_of(call):
    """The segments of the longest path."""
    levels = []
    for parent in call.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return max(levels)


def test_draws_have_forests():
    """A fifth of the calls have documents that branch, with each operation, scheme and mode; in all shapes."""
    forests = [call for _, call in calls() if call.parents]
    alone = [call for _, call in calls() if not call.parents and call.operation in (*ATTENTIONS, *KINDS)]
    assert 0.15 < len(forests) / len(forests + alone) < 0.3
    assert {call.operation for call in forests} == {*ATTENTIONS, *KINDS}
    assert {call.scheme for call in forests} >= {*SCHEMES, *MODES}
    assert {levels_of(call) for call in forests} == {1, 2, 3, 4, 5, 6}
    assert {call.lengths[0] for call in forests} >= {0, 1, 2}
    assert max(call.packing.num_documents for call in forests) > 1
    assert max(np.bincount(np.array(call.parents) + 1)[1:].max(initial=0) for call in forests) > 4


def test_draws_are_wide():
    assert seen("operation") == set(OPERATIONS)
    assert {scheme for scheme in seen("scheme") if scheme != "auto"} == {
        *SCHEMES, *MODES, "same_loss", "own_loss",
    }  # fmt: skip
    assert seen("layout") == set(LAYOUTS)
    assert seen("transport") == {"collective", "pairwise", "hierarchical", "shared_memory"}
    assert seen("codec") == {"none", "fp8", "fp8_e5m2", "int8"}
    assert seen("dtype") == {"float64", "float32", "bfloat16"}
    assert seen("checkpoint") == {"", "reentrant", "non-reentrant"}
    assert seen("twice") == {"", "input", "output", "backward"}
    assert seen("strides") == {"dense", "last", "turned", "odd"}
    assert {"=qkv", "+qkv", "=kv", "=qk", "+qk", "=BC", "+BC"} <= seen("shared")
    assert {mask[0] for mask in seen("mask")} == {
        "causal", "full", "window", "first", "prefix", "chunk", "shared_question", "slices", "blocks", "table",
    }  # fmt: skip
    assert {mask[1] for mask in seen("mask") if mask[0] == "table"} == set(BLOCK_TABLES)
    assert {case.cp_size for case in many()} == {1, 2, 3, 4, 5, 6, 8}
    assert {(0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)} <= {case.schedule for case in many()}
    assert max(seen("head_chunks") - {None}) > 2
    assert 0 in {sum(call.lengths) for _, call in calls()}


def failures(cases):
    found = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            found.append(error)
    return found


def cases_of(operation, ranks=4, heads=4, lengths=(9, 5), **fields):
    """Cases of one call with these fields, in two layouts."""
    sizes = {"heads": heads, "groups": heads, "lengths": lengths}
    return [
        Case(ranks, (Call(operation, layout=layout, seed=seed, **sizes, **fields),))
        for seed, layout in enumerate(("random", "zigzag"))
    ]


def in_another_order(payload, scales, kind):
    return coding.decode(payload, scales.roll(1, -1), kind)


def never_transposed(transition, state, transpose, real=scan._applied):
    return real(transition, state, transpose=False)


def turned(transport, pieces, ranks=(), real=hierarchical._TwoHopAllToAll._bundle):
    return real(transport, pieces if ranks else pieces[::-1], ranks)


def of_everybody(ctx, gradient, real=gather._Gather.backward):
    ctx.same_loss = True
    return real(ctx, gradient)


STAR = {"lengths": (6, 4, 5), "parents": (-1, 0, 0)}
OVER_HOSTS = {"ranks": 5, "transport": "hierarchical", "hosts": (0, 0, 1, 1, 1)}
TWO = tuple(Call("attention", (9, 5), heads=4, groups=4, scheme="a2a", seed=seed) for seed in range(2))
LOSSES = (gather._Gather, "backward", staticmethod(of_everybody))
# The function that is another one, and the cases that show it.
BROKEN = {
    "a ring adds gradients in bfloat16": (
        transfers, "accumulation_dtype", lambda dtype: dtype,
        cases_of("attention", scheme="p2p", dtype="bfloat16", whole=True, mask=("full",)),
    ),
    "pad rows hold what they held": (
        torch.Tensor, "zero_", lambda self: self, cases_of("gated_delta_net", scheme="headwise", align=4),
    ),
    "scales of other heads": (
        messages, "decode", in_another_order, cases_of("attention", heads=8, scheme="a2a", codec="int8"),
    ),
    "maps are not transposed in backward": (scan, "_applied", never_transposed, cases_of("kda", scheme="chunkwise")),
    "a query sees other answers": (
        Mask, "_path_mask", lambda packing, mask_of: mask_of(Packing(packing.lengths)),
        cases_of("attention", scheme="exact", **STAR),
    ),
    "an answer goes on from another one": (
        Branches, "predecessors", property(lambda self: np.arange(int(self.lengths.sum())) - 1),
        cases_of("gated_delta_rule", scheme="chunkwise", **STAR),
    ),
    "senders of other hosts change places": (
        hierarchical._TwoHopAllToAll, "_bundle", turned, cases_of("mamba2", scheme="headwise", **OVER_HOSTS),
    ),
    "a message that is kept goes back to the pool": (
        head_exchange, "keeps_message", lambda at: False, [Case(4, TWO, (0, 1, 0, 1))],
    ),
    "buffers are not released": (
        Buffers, "release", lambda self, *tensors: None, cases_of("kda_mixer", scheme="chunkwise"),
    ),
    "a loss of one's own is everybody's": (*LOSSES, cases_of("gather", scheme="own_loss", batch=2)),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_the_check_sees(broken, monkeypatch):
    *function, cases = BROKEN[broken]
    assert failures(cases) == []
    monkeypatch.setattr(*function)
    assert failures(cases)


def run_fuzz(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["fuzz.py", *arguments])
    code = fuzz.main()
    return code, capsys.readouterr().out


def test_failures_are_printed_as_lines_that_run_them(monkeypatch, capsys):
    monkeypatch.setattr(*LOSSES)
    arguments = ("--seed", "0", "--cases", "40", "--operations", "gather", "--stop")
    code, said = run_fuzz(monkeypatch, capsys, *arguments)
    assert code == 1
    line = next(line for line in said.splitlines() if "smaller" in line)
    case = line.split("--case ", 1)[1].strip("'")
    assert len(case) < 250
    assert run_fuzz(monkeypatch, capsys, "--case", case)[0] == 1
    monkeypatch.undo()
    assert run_fuzz(monkeypatch, capsys, "--case", case) == (0, "passed\n")


def test_a_rank_that_waits_in_vain_is_a_failure(monkeypatch, capsys):
    operate = fuzz_check.operate
    monkeypatch.setattr(fuzz_check, "operate", lambda *call: operate(*call) if call[2].rank else torch.zeros(()))
    case = cases_of("gather", frozen=("x",))[0].line()
    code, said = run_fuzz(monkeypatch, capsys, "--case", case, "--limit", "3")
    assert code == 1
    assert "waited" in said or "did not finish" in said


def test_what_hangs_without_ranks_is_a_failure(monkeypatch, capfd):
    monkeypatch.setattr(fuzz, "check", lambda case, limit: threading.Event().wait())
    error = fuzz._failure(cases_of("gather")[0], 0.2)
    assert isinstance(error, TimeoutError)
    assert "in test_what_hangs_without_ranks_is_a_failure" in capfd.readouterr().err


def test_a_smaller_case_fails_alike():
    def fails(case):
        return sum(case.calls[0].lengths) >= 3 and case.cp_size >= 2

    case = next(case for case in many() if case.cp_size == 6 and fails(case) and case.calls[0].mask[0] != "slices")
    small = shrunk(case, fails)
    assert (small.cp_size, sum(small.calls[0].lengths)) == (2, 3)
    assert len(small.line()) < 150
