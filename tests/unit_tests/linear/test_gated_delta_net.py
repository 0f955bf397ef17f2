"""Gated DeltaNet: kernels of the caller's, forms of parameters, and that a rank without heads still takes part."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.kernels import LinearKernel, choose_conv, choose_rule
from megatron_cp.testing.parity import Case, compare
from tests.fuzz_cases import Call
from tests.fuzz_cases import Case as FuzzCase
from tests.fuzz_check import check

HEADS, KEY_HEADS, DIM = 4, 2, 8
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


def plan_for(lengths=(5, 1, 6), cp_size=1, mode="auto"):
    packing, sizes = cp.Packing(lengths), {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DIM}
    return cp.plan_linear(packing, cp.Layout.zigzag(packing, cp_size), **sizes, mode=mode)


def mixer_inputs(rows=12):
    return {
        "qkv": torch.randn(rows, CHANNELS), "beta": torch.randn(rows, HEADS), "alpha": torch.randn(rows, HEADS),
        "conv": torch.randn(CHANNELS, 4), "A_log": torch.randn(HEADS), "dt_bias": torch.randn(HEADS),
    }  # fmt: skip


class Counting(LinearKernel):
    """A kernel of the caller's."""

    name = "counting"

    def __init__(self):
        self.calls = []

    def refusal(self, call):
        return None

    def conv(self, x, weight, bias, call, **options):
        self.calls.append("conv")
        return choose_conv("reference", call).conv(x, weight, bias, call, **options)

    def rule(self, inputs, groups, scale, call):
        self.calls.append("rule")
        return choose_rule("reference", call).rule(inputs, groups, scale, call)

    work = None


def test_a_kernel_of_the_callers_computes_both():
    inputs, kernel = mixer_inputs(), Counting()
    out = cp.gated_delta_net(**inputs, plan=plan_for(), kernel=kernel)
    assert torch.equal(out, cp.gated_delta_net(**inputs, plan=plan_for(), kernel="reference"))
    assert kernel.calls == ["conv"] * 3 + ["rule"]


# A plain sum over tokens fails with 6 heads, whose channels do not fill a rank's last vector as they fill one rank's.
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim"), [(6, 2, 16, 24), (32, 16, 64, 64), (4, 4, 16, 16), (8, 4, 16, 16)]
)
def test_gradients_are_the_same_bits_where_no_head_is_shared(heads, key_heads, dim, value_dim):
    sizes = {"heads": heads, "groups": key_heads, "head_dim": dim, "value_head_dim": value_dim}
    case = Case("gdn", 2, (7, 1, 70), scheme="headwise", **sizes)
    assert compare(case).bitwise_backward


def test_ranks_without_heads_have_gradients_of_parameters_and_taps_may_have_megatrons_middle_axis():
    sizes = {"heads": HEADS, "groups": KEY_HEADS, "head_dim": DIM, "value_head_dim": DIM}
    check(FuzzCase(6, (Call("gated_delta_net", (5, 1, 6), scheme="headwise", options=("bias", "three"), **sizes),)))


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_parameters_in_a_wider_type_do_not_widen_the_message():
    plan, inputs = plan_for(cp_size=6, mode="headwise"), mixer_inputs()
    parameters = {name: inputs[name] for name in ("conv", "A_log", "dt_bias")}

    def rank(group):
        tensors = [plan.layout.shard(inputs[name].bfloat16(), group.rank) for name in ("qkv", "beta", "alpha")]
        return cp.gated_delta_net(*tensors, plan, group, **parameters).dtype

    assert run_ranks(rank, 6) == [torch.bfloat16] * 6
