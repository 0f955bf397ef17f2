"""Every order and every split of four tokens on two ranks: whatever asks in which order rows lie is asked it here.

python -m tests.functional_tests.test_tiny_layouts    # three ranks too: every sixth of them, 30 minutes
"""

import itertools

import pytest

from tests.fuzz_cases import Call, Case
from tests.fuzz_check import check

MASKS = (("causal",), ("full",), ("window", 1, 1), ("blocks", ((1, 0), (1, 1)), 2))
SCHEMES = ("a2a", "p2p", "all_gather", "exact", "tiled")
LINEAR = ("gated_delta_rule", "kda", "mamba2", "causal_conv1d")
MODES = ("headwise", "chunkwise", "redistribute")
SIZES = {"heads": 2, "groups": 2, "head_dim": 2, "value_head_dim": 2}


def layouts(ranks, total=4):
    """The fragments of every rank, one token each, for all orders of tokens and all numbers of tokens a rank."""
    for order in itertools.permutations(range(total)):
        for cuts in itertools.combinations_with_replacement(range(total + 1), ranks - 1):
            held = [order[start:end] for start, end in itertools.pairwise([0, *cuts, total])]
            yield tuple(tuple((token, token + 1) for token in tokens) for tokens in held)


ON_TWO = tuple(layouts(2))
each_quarter = pytest.mark.parametrize("first", range(4))


def check_all(ranks, held, operation, **fields):
    """Checks a case in all these layouts, with ranks that start once."""
    calls = tuple(Call(operation, (4,), layout=fragments, **SIZES, **fields) for fragments in held)
    check(Case(ranks, calls, tuple(number for call in range(len(calls)) for number in (call, call))))


def test_there_are_as_many_as_orders_and_splits():
    assert len(set(ON_TWO)) == len(ON_TWO) == 24 * 5


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask[0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
@each_quarter
def test_attention(scheme, mask, first):
    check_all(2, ON_TWO[first::4], "attention", scheme=scheme, mask=mask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", LINEAR)
@pytest.mark.few
@each_quarter
def test_linear_layers(operation, mode, first):
    check_all(2, ON_TWO[first::4], operation, scheme=mode, width=3)


@pytest.mark.parametrize("operation", ["gather", "relayout"])
def test_rows_that_only_move(operation):
    for number, scheme in enumerate(("same_loss", "own_loss")):
        to = ON_TWO[7 * number + 1 :] + ON_TWO[: 7 * number + 1]
        calls = tuple(
            Call(operation, (4,), layout=source, kv_layout=target, scheme=scheme, **SIZES)
            for source, target in zip(ON_TWO, to, strict=True)
        )
        check(Case(2, calls, tuple(number for call in range(len(calls)) for number in (call, call))))


if __name__ == "__main__":
    some = tuple(layouts(3))[::6]
    for scheme, mask in itertools.product(SCHEMES, MASKS):
        check_all(3, some, "attention", scheme=scheme, mask=mask)
        print(f"{len(some)} layouts of three ranks: {scheme} {mask[0]}", flush=True)
    for operation, mode in itertools.product(LINEAR, MODES):
        check_all(3, some, operation, scheme=mode, width=3)
        print(f"{len(some)} layouts of three ranks: {operation} {mode}", flush=True)
