"""State dicts of transformers' layers load as they are, and give what those classes give on each document."""

import pytest

pytest.importorskip("transformers")
import torch

import megatron_cp as cp
from tests.transformers_cases import build, wide

HIDDEN = 48


def mixer_of(name, attribute):
    """Returns the mixer of the first layer."""
    model = build(name)
    return next(module for label, module in model.named_modules() if label.endswith(f".0.{attribute}"))


WIDE = {"dtype": torch.float64}
LAYERS = {
    "Qwen3Next": (
        "linear_attn", lambda: cp.nn.GatedDeltaNet(HIDDEN, 4, 2, head_dim=8, value_head_dim=16, **WIDE),
    ),
    "KimiLinear": ("self_attn", lambda: cp.nn.KimiDeltaAttention(HIDDEN, 3, head_dim=16, **WIDE)),
    "Mamba2": ("mixer", lambda: cp.nn.Mamba2(HIDDEN, 6, head_dim=16, state=8, groups=2, **WIDE)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_dict_loads_and_computes_the_same(name):
    attribute, make = LAYERS[name]
    stock, layer = mixer_of(name, attribute), make()
    if name == "Mamba2" and not hasattr(stock.norm, "group_size"):
        pytest.skip("its norm is over all groups in this transformers, which mamba_ssm's is not")
    layer.load_state_dict(stock.state_dict())
    hidden = torch.randn(11, HIDDEN, **WIDE)
    out = layer(hidden, cp.BatchPlan(cp.Layout.contiguous(cp.Packing([11]), 1)))
    with wide(), torch.no_grad():
        expected = stock(hidden[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert (out - expected[0]).abs().max() < 1e-12
