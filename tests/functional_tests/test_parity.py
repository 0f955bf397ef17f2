"""Every layer over N ranks equals one rank: outputs and every gradient, in float64, on ragged documents."""

import pytest
import torch

from megatron_cp.testing.parity import Case, compare, run_layer
from megatron_cp.testing.poison import poisoned
from tests.covering import covering

pytestmark = pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")

RAGGED = (7, 1, 130, 64, 2)
LINEAR = ("gdn", "kda", "mamba", "conv1d")
LAYERS = ("attention", *LINEAR)
LAYOUTS = ("contiguous", "zigzag", "balanced", "random")


def poisoned_layer(group, case):
    with poisoned():
        return run_layer(group, case)


def assert_parity(layer, cp, lengths=RAGGED, layout="zigzag", *, run=poisoned_layer, kind="threads", **rest):
    """A head exchange has the bits of one rank forward."""
    case = Case(layer, cp, lengths, layout, **{"scheme": "a2a" if layer == "attention" else "headwise"} | rest)
    parity = compare(case, run=run, kind=kind)
    assert parity.passed, parity
    assert parity.bitwise_forward or case.scheme not in ("a2a", "headwise"), parity
    return parity


@pytest.mark.parametrize(
    ("layer", "cp", "layout"), covering(LAYERS, (1, 2, 3, 4, 5, 8), ("contiguous", "zigzag", "random"))
)
@pytest.mark.few(of=lambda layer, cp, layout: (layer, cp, layout))
def test_layer_equals_one_rank(layer, cp, layout):
    assert_parity(layer, cp, layout=layout)


OF_OWN_HEADS = [
    {"lengths": (6, 10)}, {"lengths": (2, 6)},  # which break Megatron's permutation
    *({"heads": 8, "groups": groups, "value_head_dim": 24} for groups in (2, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shape", OF_OWN_HEADS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few
def test_backward_is_bitwise_where_no_head_is_shared(layer, shape):
    assert assert_parity(layer, 2, **shape).bitwise_backward


SHAPES = [
    {"heads": 7, "groups": 1}, {"heads": 5, "groups": 5}, {"heads": 12, "groups": 4, "value_head_dim": 24},
    {"heads": 2, "groups": 1, "head_dim": 5, "value_head_dim": 3}, {"softmax_scale": 0.3}, {"align": 8},
    {"lengths": (1, 1)}, {"lengths": (0, 3, 0)}, {"lengths": (1,) * 11}, {"kernel": "reference", "lengths": (7, 1, 20)},
]  # fmt: skip
OF_ATTENTION = [
    {"mask": "full"}, {"mask": "window:5,2", "learned_sink": True}, {"mask": "prefix:9"},
    {"mask": "first:2+window:4,0", "heads": 7, "groups": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "shape", "cp"),
    [
        *covering(
            LAYERS, SHAPES, (3, 5), allowed=lambda layer, shape, cp: layer != "mamba" or "softmax_scale" not in shape
        ),
        *covering(["attention"], OF_ATTENTION, (2, 5)),
        *covering(LINEAR, [{"conv_width": 7}], (3, 5)),
    ],
    ids=str,
)
@pytest.mark.few(of=lambda layer, shape, cp: (layer, str(shape), cp))
def test_any_shape_equals_one_rank(layer, shape, cp):
    assert_parity(layer, cp, **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few
def test_short_types_stay_bitwise_forward(layer, dtype):
    assert_parity(layer, 3, layout="random", dtype=dtype)


@pytest.mark.parametrize(("layer", "cp", "layout"), covering(LINEAR, (1, 2, 3, 5, 8), LAYOUTS))
@pytest.mark.few(of=lambda layer, cp, layout: (layer, cp, layout))
def test_segments_continue_one_another(layer, cp, layout):
    assert_parity(layer, cp, layout=layout, scheme="chunkwise")


@pytest.mark.parametrize("layout", ["zigzag", "random"])
@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.few
def test_redistributed_layers_equal_one_rank(layer, layout):
    assert_parity(layer, 3, layout=layout, scheme="redistribute", hidden_size=96)


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
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize(("layer", "shape", "layout"), covering(LINEAR, SEGMENTS, ("contiguous", "random")), ids=str)
@pytest.mark.few(of=lambda layer, shape, layout: (layer, str(shape), layout))
def test_any_shape_of_segments_equals_one_rank(layer, shape, layout):
    assert_parity(layer, 5, layout=layout, scheme="chunkwise", **shape)


@pytest.mark.parametrize("layer", LAYERS)
def test_processes_equal_one_rank(layer):
    for way in ({},) if layer == "attention" else ({}, {"scheme": "chunkwise"}):
        assert_parity(layer, 3, layout="random", run=run_layer, kind="processes", **way)


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
