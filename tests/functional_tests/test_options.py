"""Every operation in every scheme or mode with each of its options is what the oracle says: outputs and all gradients.

Calls are those of the fuzz, which draws more. In each case another call of the same layer is in flight, all rows of
padding hold NaN, and documents are ragged.
"""

from dataclasses import replace

import pytest

from megatron_cp.plan.latent import LATENT_MODES
from megatron_cp.plan.schemes import MODES, SCHEMES
from tests.covering import covering
from tests.fuzz_cases import Call, Case
from tests.fuzz_check import check
from tests.limits import limit

pytestmark = pytest.mark.filterwarnings("ignore:.*ranks get no")
LENGTHS, OTHERS = (7, 1, 40, 0, 13, 2, 11), (2, 33, 5, 1)
SIZES = {
    "lengths": LENGTHS,
    "align": 4,
    "layout": "zigzag",
    "heads": 6,
    "groups": 2,
    "head_dim": 8,
    "value_head_dim": 6,
}
KEYS = (3, 5, 17, 2, 0, 1, 30)  # of other lengths
BLIND = ((8, 30, 8, 20, "causal"), (50, 60, 48, 55, "full"))
ATTENTION = (
    {"kv_lengths": KEYS, "kv_layout": "random", "mask": ("window", 4, 1)},
    {"kv_lengths": KEYS, "mask": ("full",), "batch": 2, "sink": True},
    {"mask": ("slices", BLIND), "sink": True, "layout": "random"},  # queries that see nothing, keys that nobody sees
    {"mask": ("slices", ()), "sink": True},  # no pair at all
    {"mask": ("first", 3, 0, 2), "batch": 2, "dropout": 0.5},
    {"mask": ("prefix", 9), "softcap": 1.5, "scale": -0.4, "kernel": "reference"},
    {"mask": ("chunk", 6), "sink": True, "checkpoint": "reentrant"},
    {"dropout": 0.2, "checkpoint": "non-reentrant"},
    {"twice": "input", "strides": "last"},
    {"twice": "output", "strides": "turned", "batch": 1},
    {"twice": "backward", "strides": "odd"},
    {"frozen": ("q",), "ones": True},
    {"frozen": ("k", "v")},
    {"dtype": "bfloat16", "whole": True, "mask": ("full",), "groups": 6},
    {"codec": "int8", "transport": "pairwise"},
    {"head_dim": 9, "value_head_dim": 3, "heads": 7, "groups": 1},
)
OTHER_SOFTMAX = (
    *({"operation": "latent_attention", "groups": 6, "latent": (2, 5), "latent_mode": mode} for mode in LATENT_MODES),
    {"operation": "projected_attention"},
    {"operation": "projected_attention", "kv_lengths": KEYS, "batch": 2, "sink": True},
)
SPARSE = (
    {"width": 5, "options": ("dense", "relu")},
    {"width": 5, "checkpoint": "non-reentrant"},
    {"width": 5, "options": ("dense",), "kv_lengths": KEYS, "mask": ("full",)},
    {"width": 2, "block": 3},
)
LINEAR = (
    ("gated_delta_rule", ("norm",)), ("gated_delta_rule", ()), ("gated_delta_net", ("bias", "three")),
    ("kda", ("norm",)), ("kda_mixer", ("bias", "bound")), ("kda_mixer", ()), ("mamba2", ("skips",)),
    ("mamba2", ("softplus", "limit", "skip", "bias")), ("mamba2_mixer", ("limit", "skips", "bias")),
    ("mamba2_mixer", ("skip",)), ("causal_conv1d", ("bias", "silu", "three")), ("causal_conv1d", ()),
)  # fmt: skip
USES = (
    {"checkpoint": "reentrant", "layout": "random"}, {"checkpoint": "non-reentrant"}, {"twice": "input", "ones": True},
    {"twice": "output", "strides": "turned"}, {"twice": "backward", "strides": "odd"}, {"dtype": "float32", "width": 1},
    {"frozen": True, "transport": "pairwise"}, {"kernel": "reference", "width": 7},
)  # fmt: skip
FROZEN = {"gated_delta_rule": ("v",), "kda": ("v",), "mamba2": ("x",), "causal_conv1d": ("x",)}


def assert_exact(ranks, call):
    """Runs the call, and one of other documents whose passes lie between its own; memory that nobody wrote is NaN."""
    other = replace(call, lengths=OTHERS, kv_lengths=OTHERS[::-1] if call.kv_lengths else (), mask=("causal",), seed=1)
    for schedule in ((0, 1, 0, 1), (0, 1, 1, 0)):
        check(Case(ranks, (call, other), schedule, poison=schedule[-1] == 1), limit(60))


@pytest.mark.parametrize("option", ATTENTION, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.few
def test_attention(scheme, option):
    assert_exact(4, Call("attention", scheme=scheme, **SIZES | option))


@pytest.mark.parametrize("option", OTHER_SOFTMAX, ids=str)
@pytest.mark.parametrize("scheme", ["a2a", "p2p", "all_gather", "exact", "tiled", "a2a+p2p"])
@pytest.mark.few
def test_other_softmax_attention(scheme, option):
    assert_exact(4, Call(scheme=scheme, **SIZES | option))


@pytest.mark.parametrize("option", SPARSE, ids=str)
@pytest.mark.parametrize("scheme", ["exact", "all_gather"])
@pytest.mark.few
def test_sparse_attention(scheme, option):
    assert_exact(4, Call("sparse_attention", scheme=scheme, **SIZES | option))


@pytest.mark.parametrize(("mode", "operation", "use"), covering(tuple(MODES), LINEAR, USES), ids=str)
@pytest.mark.few(of=lambda mode, operation, use: (mode, operation, str(use)))
def test_linear_operations(mode, operation, use):
    operation, options = operation
    if "frozen" in use:
        use = use | {"frozen": FROZEN.get(operation, ("conv",))}
    assert_exact(3, Call(operation, scheme=mode, options=options, **SIZES | use))


MOVES = ("relayout", ""), ("gather", "same_loss"), ("gather", "own_loss")


@pytest.mark.parametrize(("move", "batch", "dtype"), covering(MOVES, range(3), ("float64", "bfloat16")))
@pytest.mark.few(of=lambda move, batch, dtype: (move, batch, dtype))
def test_rows_that_only_move(move, batch, dtype):
    operation, scheme = move
    assert_exact(5, Call(operation, scheme=scheme, kv_layout="balanced", batch=batch, dtype=dtype, whole=True, **SIZES))
