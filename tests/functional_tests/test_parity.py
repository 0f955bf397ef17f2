"""Every layer over N ranks equals one rank: outputs and every gradient, in float64, on ragged documents."""

import pytest
import torch
from hypothesis import strategies as st

from megatron_cp.testing.parity import Case, compare, run_layer
from megatron_cp.testing.poison import poisoned
from tests.covering import covering
from tests.drawing import drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")

RAGGED = (7, 1, 130, 64, 2)
LINEAR = ("gdn", "kda", "mamba", "conv1d")
LAYERS = ("attention", *LINEAR)
LAYOUTS = ("contiguous", "zigzag", "balanced", "random")


def case_of(layer, *args, **kwargs):
    """A case by head exchange."""
    return Case(layer, *args, **{"scheme": "a2a" if layer == "attention" else "headwise"} | kwargs)


def poisoned_layer(group, case):
    with poisoned():
        return run_layer(group, case)


def assert_parity(case, **how):
    parity = compare(case, **how)
    assert parity.passed, parity
    assert parity.bitwise_forward, parity
    return parity


@pytest.mark.parametrize(
    ("layer", "cp", "layout"), covering(LAYERS, (1, 2, 3, 4, 5, 8), ("contiguous", "zigzag", "random"))
)
@pytest.mark.few(of=lambda layer, cp, layout: (layer, cp, layout))
def test_layer_equals_one_rank(layer, cp, layout):
    assert_parity(case_of(layer, cp, RAGGED, layout), run=poisoned_layer)


@pytest.mark.parametrize("lengths", [(6, 10), (2, 6)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_lengths_that_break_megatrons_permutation_are_exact(layer, lengths):
    assert assert_parity(case_of(layer, 2, lengths)).bitwise_backward


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few
def test_backward_is_bitwise_where_no_head_is_shared(layer, groups):
    assert assert_parity(case_of(layer, 2, RAGGED, heads=8, groups=groups, value_head_dim=24)).bitwise_backward


SHAPES = [
    {"heads": 7, "groups": 1}, {"heads": 5, "groups": 5}, {"heads": 12, "groups": 4, "value_head_dim": 24},
    {"heads": 2, "groups": 1, "head_dim": 5, "value_head_dim": 3}, {"softmax_scale": 0.3}, {"align": 8},
    {"lengths": (1, 1)}, {"lengths": (0, 3, 0)}, {"lengths": (1,) * 11},
]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "shape", "cp"),
    [
        *covering(
            LAYERS, SHAPES, (3, 5), allowed=lambda layer, shape, cp: layer != "mamba" or "softmax_scale" not in shape
        ),
        *covering(["attention"], [{"mask": "full"}], (3, 5)),
        *covering(LINEAR, [{"conv_width": 7}], (3, 5)),
    ],
    ids=str,
)
@pytest.mark.few(of=lambda layer, shape, cp: (layer, str(shape), cp))
def test_any_shape_equals_one_rank(layer, shape, cp):
    assert_parity(case_of(layer, cp, **{"lengths": RAGGED, **shape}), run=poisoned_layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few
def test_short_types_stay_bitwise_forward(layer, dtype):
    assert_parity(case_of(layer, 3, RAGGED, "random", dtype=dtype))


@pytest.mark.parametrize(("layer", "kernel"), [(layer, "reference") for layer in LAYERS])
def test_reference_kernels_keep_parity(layer, kernel):
    assert_parity(case_of(layer, 3, (7, 1, 20), "random", kernel=kernel), run=poisoned_layer)


@pytest.mark.parametrize("layer", LAYERS)
def test_processes_equal_one_rank(layer):
    assert_parity(case_of(layer, 3, RAGGED, "random"), kind="processes")


@drawn(
    10,
    40,
    layer=st.sampled_from(LAYERS),
    cp=st.integers(1, 6),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 31, 67]), min_size=1, max_size=6).filter(any),
    layout=st.sampled_from(["contiguous", "zigzag", "random"]),
    groups=st.integers(1, 4),
    ratio=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    value_head_dim=st.none() | st.integers(1, 9),  # none: the key size, which is what the fast attention kernel runs
    conv_width=st.integers(1, 5),
    align=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_any_case_equals_one_rank(groups, ratio, lengths, head_dim, value_head_dim, **rest):
    dims = {"head_dim": head_dim, "value_head_dim": value_head_dim or head_dim}
    case = case_of(lengths=tuple(lengths), groups=groups, heads=groups * ratio, **dims, **rest)
    parity = compare(case, run=poisoned_layer)
    assert parity.passed, parity
    # With one feature a head, torch computes a single head's products as vectors and several heads' as matrices.
    assert parity.bitwise_forward or 1 in (case.head_dim, case.value_head_dim), parity


def segments_case(layer, cp, lengths, layout, **rest):
    return Case(layer, cp, lengths, layout, **{"hidden_size": 96} | rest)


def assert_close(case, **how):
    parity = compare(case, run=poisoned_layer, **how)
    assert parity.passed, parity


@pytest.mark.parametrize(("layer", "cp", "layout"), covering(LINEAR, (1, 2, 3, 5, 8), LAYOUTS))
@pytest.mark.few(of=lambda layer, cp, layout: (layer, cp, layout))
def test_segments_continue_one_another(layer, cp, layout):
    assert_close(segments_case(layer, cp, RAGGED, layout, scheme="chunkwise"))


@pytest.mark.parametrize("layout", ["zigzag", "random"])
@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.few
def test_redistributed_layers_equal_one_rank(layer, layout):
    assert_close(segments_case(layer, 3, RAGGED, layout, scheme="redistribute"))


SEGMENTS = [
    {"lengths": (400,)},  # all ranks between the ends both wait and leave a map
    {"lengths": (1,) * 11},
    {"lengths": (1, 1)},  # fewer tokens than ranks
    {"lengths": (0, 9, 0, 3)},  # fragments shorter than the halo
    {"heads": 7, "groups": 1},
    {"heads": 12, "groups": 4, "head_dim": 5, "value_head_dim": 24},
    {"align": 8},
    {"conv_width": 7},
    {"conv_width": 1},
    {"kernel": "reference", "lengths": (7, 1, 20)},
]


@pytest.mark.parametrize("layout", ["contiguous", "random"])
@pytest.mark.parametrize("shape", SEGMENTS, ids=str)
@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.few
def test_any_shape_of_segments_equals_one_rank(layer, shape, layout):
    assert_close(segments_case(layer, 5, **{"lengths": RAGGED, "layout": layout, "scheme": "chunkwise", **shape}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.few
def test_segments_of_short_types_stay_close(layer, dtype):
    assert_close(segments_case(layer, 3, RAGGED, "contiguous", scheme="chunkwise", dtype=dtype))


@pytest.mark.parametrize("layer", LINEAR)
def test_processes_continue_segments(layer):
    assert_close(segments_case(layer, 3, RAGGED, "random", scheme="chunkwise"), kind="processes")


@drawn(  # `make fuzz` draws more, of a new seed
    10, 40, layer=st.sampled_from(LINEAR), scheme=st.sampled_from(["chunkwise", "redistribute", "auto"]),
    cp=st.integers(1, 6),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 67, 150]), min_size=1, max_size=6).filter(any),
    layout=st.sampled_from(LAYOUTS), groups=st.integers(1, 3), ratio=st.integers(1, 3), head_dim=st.integers(1, 9),
    value_head_dim=st.integers(1, 9), conv_width=st.integers(1, 6), align=st.integers(1, 4), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_segments_equal_one_rank(groups, ratio, lengths, **rest):
    assert_close(Case(lengths=tuple(lengths), groups=groups, heads=groups * ratio, hidden_size=64, **rest))


def test_a_wrong_result_is_seen():
    def wrong(group, case):
        results = run_layer(group, case)
        results["d_k"] += 1e-9
        return results

    parity = compare(Case("attention", 2, RAGGED), run=wrong)
    assert not parity.passed
    assert parity.bitwise_forward
    assert not parity.bitwise_backward


def test_nan_never_passes():
    def poisoned_result(group, case):
        results = run_layer(group, case)
        results["out"][0] = torch.nan
        return results

    assert not compare(Case("attention", 2, RAGGED), run=poisoned_result).passed
