"""Every order and every split of four tokens on two ranks: whatever asks in which order rows lie is asked it here."""

import itertools

import pytest

from tests.covering import covering
from tests.fuzz_cases import Call, Case
from tests.fuzz_check import check

MASKS = (("causal",), ("full",), ("window", 1, 1), ("blocks", ((1, 0), (1, 1)), 2))
SCHEMES = ("a2a", "p2p", "all_gather", "exact", "tiled")
LINEAR = ("gated_delta_rule", "kda", "mamba2", "causal_conv1d")
MODES = ("headwise", "chunkwise", "redistribute")
SIZES = {"heads": 2, "groups": 2, "head_dim": 2, "value_head_dim": 2}


# The fragments of both ranks, one token each, for all orders of tokens and all numbers of tokens a rank.
ON_TWO = tuple(
    tuple(tuple((token, token + 1) for token in tokens) for tokens in (order[:cut], order[cut:]))
    for order in itertools.permutations(range(4))
    for cut in range(5)
)
QUARTERS = tuple(range(4))  # a case has a quarter of these; each scheme, mask, operation and mode meets them all


def check_all(*calls):
    """Checks calls on two ranks that start once."""
    check(Case(2, calls, tuple(number for call in range(len(calls)) for number in (call, call))))


@pytest.mark.parametrize(("scheme", "mask", "first"), covering(SCHEMES, MASKS, QUARTERS))
@pytest.mark.few(of=lambda scheme, mask, first: (scheme, mask, first))
def test_attention(scheme, mask, first):
    check_all(*(Call("attention", (4,), layout=held, scheme=scheme, mask=mask, **SIZES) for held in ON_TWO[first::4]))


@pytest.mark.parametrize(("operation", "mode", "first"), covering(LINEAR, MODES, QUARTERS))
@pytest.mark.few(of=lambda operation, mode, first: (operation, mode, first))
def test_linear_layers(operation, mode, first):
    check_all(*(Call(operation, (4,), layout=held, scheme=mode, width=3, **SIZES) for held in ON_TWO[first::4]))


@pytest.mark.parametrize("operation", ["gather", "relayout"])
def test_rows_that_only_move(operation):
    for number, scheme in enumerate(("same_loss", "own_loss")):
        to = ON_TWO[7 * number + 1 :] + ON_TWO[: 7 * number + 1]
        check_all(*(
            Call(operation, (4,), layout=source, kv_layout=target, scheme=scheme, **SIZES)
            for source, target in zip(ON_TWO, to, strict=True)
        ))  # fmt: skip
