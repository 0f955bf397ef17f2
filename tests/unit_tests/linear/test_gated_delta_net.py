"""The operations: what they refuse, and that a rank without heads still takes part."""

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.linear.kernels import LinearKernel, choose_conv, choose_rule
from megatron_cp.testing.parity import Case, compare
from tests.refusals import rejects

HEADS, KEY_HEADS, DIM = 4, 2, 8
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


def plan_for(lengths=(5, 1, 6), cp_size=1, mode="auto"):
    packing, sizes = cp.Packing(lengths), {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DIM}
    return cp.plan_linear(packing, cp.Layout.zigzag(packing, cp_size), **sizes, mode=mode)


def rule_inputs(rows=12):
    return {
        "q": torch.randn(rows, KEY_HEADS, DIM), "k": torch.randn(rows, KEY_HEADS, DIM),
        "v": torch.randn(rows, HEADS, DIM), "g": -torch.rand(rows, HEADS), "beta": torch.rand(rows, HEADS),
    }  # fmt: skip


def mixer_inputs(rows=12):
    return {
        "qkv": torch.randn(rows, CHANNELS), "beta": torch.randn(rows, HEADS), "alpha": torch.randn(rows, HEADS),
        "conv": torch.randn(CHANNELS, 4), "A_log": torch.randn(HEADS), "dt_bias": torch.randn(HEADS),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_rejects_rule_tensors_that_do_not_fit_the_plan(name):
    inputs = rule_inputs()
    inputs[name] = inputs[name][:, :1]
    rejects(f"^{name}: got ", cp.gated_delta_rule, **inputs, plan=plan_for())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qkv", lambda x: x.long()), ("beta", lambda x: x.to("meta")), ("A_log", lambda x: x.to("meta")),
        ("conv", lambda x: x[:, 0]), ("conv", lambda x: x[:, :0]),
    ],
)  # fmt: skip
def test_rejects_types_devices_and_convolutions_that_cannot_be(name, change):
    inputs = mixer_inputs()
    inputs[name] = change(inputs[name])
    rejects(f"^{name}: got ", cp.gated_delta_net, **inputs, plan=plan_for())


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


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_parameters_in_a_wider_type_do_not_widen_the_message():
    plan = plan_for(cp_size=6, mode="headwise")
    inputs = mixer_inputs()

    def rank(group):
        tensors = [plan.layout.shard(inputs[name].bfloat16(), group.rank) for name in ("qkv", "beta", "alpha")]
        return cp.gated_delta_net(
            *tensors, plan, group, **{name: inputs[name] for name in ("conv", "A_log", "dt_bias")}
        )

    assert [out.dtype for out in run_ranks(rank, 6)] == [torch.bfloat16] * 6


# A plain sum over tokens fails with 6 heads, whose channels do not fill a rank's last vector as they fill one rank's.
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim"), [(6, 2, 16, 24), (32, 16, 64, 64), (4, 4, 16, 16), (8, 4, 16, 16)]
)
def test_gradients_are_the_same_bits_where_no_head_is_shared(heads, key_heads, dim, value_dim):
    sizes = {"heads": heads, "groups": key_heads, "head_dim": dim, "value_head_dim": value_dim}
    case = Case("gdn", 2, (7, 1, 70), scheme="headwise", **sizes)
    assert compare(case).bitwise_backward


def test_rejects_a_plan_of_another_kind():
    packing = cp.Packing([12])
    plan = cp.plan_attention(packing, cp.Layout.zigzag(packing, 1), heads=HEADS, kv_heads=KEY_HEADS, head_dim=DIM)
    rejects("plan_linear", cp.gated_delta_rule, **rule_inputs(), plan=plan)


def test_a_conv_weight_may_have_megatrons_middle_axis_and_a_bias():
    inputs = mixer_inputs()
    flat = cp.gated_delta_net(**inputs, plan=plan_for())
    inputs["conv"] = inputs["conv"][:, None]
    assert torch.equal(cp.gated_delta_net(**inputs, plan=plan_for()), flat)
    inputs = mixer_inputs()
    bias = torch.zeros(CHANNELS, requires_grad=True)
    out = cp.gated_delta_net(**inputs, plan=plan_for(), conv_bias=bias)
    assert torch.allclose(out, cp.gated_delta_net(**inputs, plan=plan_for()))
    out.sum().backward()
    assert bias.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
def test_every_rank_gets_a_gradient_for_every_parameter_even_without_heads():
    plan = plan_for(cp_size=6, mode="headwise")
    inputs = mixer_inputs()

    def rank(group):
        parameters = {name: inputs[name].clone().requires_grad_() for name in ("conv", "A_log", "dt_bias")}
        bias = torch.zeros(CHANNELS, requires_grad=True)
        tensors = [plan.layout.shard(inputs[name], group.rank) for name in ("qkv", "beta", "alpha")]
        cp.gated_delta_net(*tensors, plan, group, **parameters, conv_bias=bias).sum().backward()
        return [tensor.grad for tensor in (*parameters.values(), bias)]

    gradients = run_ranks(rank, 6)
    assert all(gradient is not None for own in gradients for gradient in own)
    idle = [rank for rank, (lo, hi) in enumerate(plan.partition.heads) if lo == hi]
    assert len(idle) == 2
    assert all(not gradient.any() for rank in idle for gradient in gradients[rank])
