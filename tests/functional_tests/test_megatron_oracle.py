"""Against code that is not ours: a packed batch equals each document alone through torch and through Megatron."""

import pytest
import torch

from megatron_cp.linear.gated_delta_net import gated_delta_net, gated_delta_rule
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.parity import FLOOR_SHARE, Case, draw, relative_error
from tests import stock_layers

megatron = pytest.importorskip("megatron.core.ssm.gated_delta_net")

RAGGED = (7, 1, 130, 0, 64, 2)


def megatron_rule(q, k, v, g, beta):
    return megatron.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


def gradients(function, tensors, output_gradient):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, output_gradient)]


def assert_close(actual, expected, tolerance):
    for mine, theirs in zip(actual, expected, strict=True):
        assert relative_error(mine, theirs, FLOOR_SHARE) <= tolerance


@pytest.mark.any_cpu
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [None, 0.3], ids=str)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_packed_attention_is_each_document_through_torchs_sdpa(mask, scale, kernel):
    case = Case("attention", 1, RAGGED, mask=mask)
    problem, plan = draw(case), case.plan()
    ours = gradients(
        lambda q, k, v: attention(q, k, v, plan, softmax_scale=scale, kernel=kernel),
        problem.inputs.values(),
        problem.output_gradient,
    )
    theirs = gradients(
        lambda q, k, v: stock_layers.attention(q, k, v, case.packing, is_causal=mask == "causal", scale=scale),
        problem.inputs.values(),
        problem.output_gradient,
    )
    assert_close(ours, theirs, 1e-12)


@pytest.mark.any_cpu
@pytest.mark.parametrize("kernel", ["chunked", "reference"])
def test_packed_gated_delta_net_is_each_document_through_megatrons_rule(kernel):
    case = Case("gdn", 1, RAGGED, dtype=torch.float32)  # Megatron's rule computes in fp32
    problem, plan = draw(case), case.plan()
    tensors = [*problem.inputs.values(), *problem.parameters.values()]

    def ours(qkv, beta, alpha, conv, a_log, dt_bias):
        return gated_delta_net(qkv, beta, alpha, plan, conv=conv, A_log=a_log, dt_bias=dt_bias, kernel=kernel)

    def theirs(qkv, beta, alpha, conv, a_log, dt_bias):
        shape = {"heads": case.heads, "key_heads": case.groups, "head_dim": case.head_dim}
        parameters = {"conv": conv, "A_log": a_log, "dt_bias": dt_bias}
        return stock_layers.gated_delta_net(qkv, beta, alpha, case.packing, megatron_rule, **shape, **parameters)

    assert_close(*(gradients(f, tensors, problem.output_gradient) for f in (ours, theirs)), 1e-5)


@pytest.mark.any_cpu
@pytest.mark.parametrize("kernel", ["chunked", "reference"])
@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "l2norm"])
def test_bare_rule_is_each_document_through_megatrons(normalised, kernel):
    case = Case("gdn", 1, RAGGED, dtype=torch.float32)
    random, total = torch.Generator().manual_seed(0), case.packing.total
    q, k = (torch.randn(total, case.groups, case.head_dim, generator=random) for _ in range(2))
    if not normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = torch.randn(total, case.heads, case.value_head_dim, generator=random)
    g, beta = -torch.rand(total, case.heads, generator=random), torch.rand(total, case.heads, generator=random)
    plan = case.plan()

    def theirs(q, k, v, g, beta):
        if normalised:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(case.heads // case.groups, 1) for x in (q, k))
        rows = [
            megatron_rule(*(x[None, start:end] for x in (q, k, v, g, beta)))[0] for start, end in case.packing.spans()
        ]
        return torch.cat(rows)

    def ours(q, k, v, g, beta):
        return gated_delta_rule(q, k, v, g, beta, plan, use_qk_l2norm_in_kernel=normalised, kernel=kernel)

    output_gradient = torch.randn(total, case.heads, case.value_head_dim, generator=random)
    tensors = (q, k, v, g, beta)
    assert_close(gradients(ours, tensors, output_gradient), gradients(theirs, tensors, output_gradient), 1e-5)
