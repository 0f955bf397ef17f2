"""Linear operations: their refusals, and a skip that is flat. Their results: `test_options.py`."""

import re

import pytest
import torch

import megatron_cp as cp
from megatron_cp.testing.parity import Case, draw
from tests.refusals import rejects

LENGTHS = (9, 1, 80, 0, 4)
TOTAL, HEADS, GROUPS, DIM, VALUE_DIM, CHANNELS = 94, 4, 2, 8, 6, 24
DELTA = {"heads": HEADS, "key_heads": GROUPS, "head_dim": DIM, "value_head_dim": VALUE_DIM}
SIZES = {
    "gdn": DELTA, "kda": DELTA, "gdn2": DELTA, "gdp": DELTA | {"num_householder": 2},
    "mamba": {"heads": HEADS, "groups": GROUPS, "head_dim": VALUE_DIM, "state": DIM},
    "conv1d": {"channels": CHANNELS},
}  # fmt: skip
KEYS, VALUES = (TOTAL, GROUPS, DIM), (TOTAL, HEADS, VALUE_DIM)
SHAPES = {
    "gdn": {"q": KEYS, "k": KEYS, "v": VALUES, "g": (TOTAL, HEADS), "beta": (TOTAL, HEADS)},
    "kda": {"q": KEYS, "k": KEYS, "v": VALUES, "g": (TOTAL, HEADS, DIM), "beta": (TOTAL, HEADS)},
    "gdn2": {"q": KEYS, "k": KEYS, "v": VALUES, "g": KEYS, "b": KEYS, "w": VALUES},
    "gdp": {
        "q": KEYS,
        "k": (2 * TOTAL, *KEYS[1:]),
        "v": (2 * TOTAL, *VALUES[1:]),
        "g": (TOTAL, HEADS),
        "beta": (2 * TOTAL, HEADS),
    },
    "mamba": {"x": VALUES, "dt": (TOTAL, HEADS), "A": (HEADS,), "B": KEYS, "C": KEYS},
    "conv1d": {"x": (TOTAL, CHANNELS), "weight": (CHANNELS, 4), "bias": (CHANNELS,)},
}
RULES = {
    "gdn": cp.gated_delta_rule, "kda": cp.kda, "gdn2": cp.gdn2, "gdp": cp.gated_delta_product, "mamba": cp.mamba2,
    "conv1d": cp.causal_conv1d,
}  # fmt: skip
MIXERS = {
    "gdn": cp.gated_delta_net, "kda": cp.kda_mixer, "gdn2": cp.gdn2_mixer, "gdp": cp.gated_delta_product_mixer,
    "mamba": cp.mamba2_mixer,
}  # fmt: skip


def plan_for(kind, **more):
    packing = cp.Packing(LENGTHS)
    return cp.plan_linear(packing, cp.Layout.contiguous(packing, 1), kind, **SIZES[kind] | more)


def tensors_of(kind):
    return {name: torch.zeros(shape) for name, shape in SHAPES[kind].items()}


def mixer_tensors(kind):
    case = Case(kind, 1, LENGTHS, "contiguous", HEADS, GROUPS, DIM, VALUE_DIM, dtype=torch.float32)
    problem = draw(case)
    return case.plan(), problem.inputs | problem.parameters


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MIXERS for name in mixer_tensors(kind)[1]])
def test_rejects_mixer_tensors_that_do_not_fit_the_plan(kind, name):
    plan, tensors = mixer_tensors(kind)
    rejects(f"^{name}: got ", MIXERS[kind], **tensors | {name: tensors[name][:-1]}, plan=plan)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in RULES for name in SHAPES[kind]])
def test_rejects_rule_tensors_that_do_not_fit_the_plan(kind, name):
    tensors = tensors_of(kind)
    rejects(f"^{name}: got ", RULES[kind], *(tensors | {name: tensors[name][:-1]}).values(), plan_for(kind))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        *((kind, {"plan": "gdn" if kind == "mamba" else "mamba"}, f'plan_linear(kind="{kind}")') for kind in RULES),
        *((kind, {next(iter(SHAPES[kind])): None}, "got None; allowed: a tensor") for kind in RULES),
        ("mamba", {"dt_limit": (2.0, 1.0)}, "dt_limit: got "),
        ("mamba", {"dt_limit": (-1.0, 1.0)}, "dt_limit: got "),
        ("mamba", {"dt_limit": 0.5}, "dt_limit: got "),
        ("mamba", {"D": torch.zeros(HEADS - 1)}, "D: got "),
        ("conv1d", {"activation": "gelu"}, "activation: got "),
        ("kda", {"scale": float("nan")}, "scale: got "),
        ("gdn", {"kernel": "mamba_ssm"}, "kernel: got "),
        ("mamba", {"kernel": "fla"}, "kernel: got "),
    ],
)
def test_rejects_plans_of_another_kind_what_is_no_tensor_and_options_that_make_no_sense(kind, changes, says):
    named = tensors_of(kind) | {"plan": kind} | changes
    rejects(re.escape(says), RULES[kind], **named | {"plan": plan_for(named["plan"])})


def test_rejects_taps_that_the_plan_is_not_for_and_a_lower_bound_above_zero():
    says = r"the plan's 3 taps\. Plan with conv_width=the taps"
    rejects(says, cp.causal_conv1d, *tensors_of("conv1d").values(), plan_for("conv1d", conv_width=3))
    plan, tensors = mixer_tensors("kda")
    rejects("lower_bound", cp.kda_mixer, **tensors, plan=plan, lower_bound=0.5)


def test_a_skip_may_be_flat():
    plan, tensors = mixer_tensors("mamba")
    skip = torch.randn(HEADS, VALUE_DIM)
    flat, shaped = (cp.mamba2_mixer(**tensors | {"D": each}, plan=plan) for each in (skip.flatten(), skip))
    assert torch.equal(flat, shaped)
