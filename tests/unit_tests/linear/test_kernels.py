"""Kernels of the gated delta rule and its convolution agree with the equations, and gradients stay finite."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_cp.layout import Packing
from megatron_cp.linear.kernels import CONVS, RULES, Delta, LinearCall, StateSpace, choose_conv, choose_rule
from tests import linear_oracle
from tests.refusals import rejects

BY_NAME = {kernel.name: kernel for kernel in RULES}
CONV_BY_NAME = {kernel.name: kernel for kernel in CONVS}
KINDS = ("gdn", "kda", "gdn2", "mamba")
RAGGED = (70, 1, 0, 129, 64, 2)
SHORT = (3, 1, 1, 9, 0, 2, 16, 4, 17, 5)  # which are computed in chunks of 4, 16 and 64 tokens


def call_for(lengths, dtype=torch.float64, head_dim=8, kind="gdn"):
    return LinearCall(kind, Packing(lengths), dtype, torch.device("cpu"), head_dim)


def draw(call, heads=4, key_heads=2, dk=8, dv=6):
    total = call.packing.total
    random, wide = torch.Generator().manual_seed(0), {"dtype": torch.float64}
    q, k = (
        torch.nn.functional.normalize(torch.randn(total, key_heads, dk, generator=random, **wide), dim=-1) for _ in "qk"
    )
    v, dout = (torch.randn(total, heads, dv, generator=random, **wide) for _ in range(2))
    features = (dk,) if call.kind in ("kda", "gdn2") else ()
    g = -torch.rand(total, heads, *features, generator=random, **wide)
    beta = torch.rand(total, heads, *(features if call.kind == "gdn2" else ()), generator=random, **wide)
    if call.kind == "mamba":
        return StateSpace(v, beta, g[0] - 0.1, k, q), dout
    return Delta(q, k, v, g, beta), dout


def with_gradients(function, tensors, dout):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_rule(name, tensors, dout, groups, call):
    kind = type(tensors)
    return with_gradients(lambda *x: BY_NAME[name].rule(kind(*x), groups, 0.4, call), tensors, dout)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_recurrence_token_by_token(kind):
    call, groups = call_for([3, 0, 9], kind=kind), [0, 0, 1, 1]
    tensors, dout = draw(call)
    oracle = linear_oracle.state_space if kind == "mamba" else linear_oracle.delta_rule
    expected = with_gradients(lambda *x: oracle(type(tensors)(*x), groups, 0.4, [3, 0, 9]), tensors, dout)
    for a, b in zip(run_rule("reference", tensors, dout, groups, call), expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.any_cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("groups", "lengths"),
    [([0, 0, 1, 1], RAGGED), ([0, 1, 1, 1], RAGGED), ([0, 0, 0, 0], RAGGED), ([0, 1, 1, 1], SHORT), ([0] * 4, [1] * 3)],
    ids=str,
)
def test_chunked_rule_agrees_with_the_reference(groups, lengths, kind):
    call = call_for(lengths, kind=kind)
    tensors, dout = draw(call)
    actual, expected = (run_rule(name, tensors, dout, groups, call) for name in ("chunked", "reference"))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-13 * max(1, b.abs().max())


@pytest.mark.any_cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dk", "dv"), [(8, 6), (5, 7)])
def test_documents_have_the_bits_that_they_have_alone(kind, dk, dv):
    """Whatever the other documents are, NaN included."""
    lengths = (*SHORT, 70)
    call = call_for(lengths, torch.float32, dk, kind)
    tensors, _ = draw(call, dk=dk, dv=dv)
    tensors = type(tensors)(*(x.float() for x in tensors))
    out = BY_NAME["chunked"].rule(tensors, [0, 0, 1, 1], 0.4, call)
    for start, end in call.packing.spans():
        own = tensors.piece(start, end)
        alone = BY_NAME["chunked"].rule(own, [0, 0, 1, 1], 0.4, call_for([end - start], torch.float32, dk, kind))
        assert torch.equal(out[start:end], alone)
        others = tensors.values.clone()
        others[start] = torch.nan
        spoilt = tensors._replace(**{"x" if kind == "mamba" else "v": others})
        found = BY_NAME["chunked"].rule(spoilt, [0, 0, 1, 1], 0.4, call)
        assert torch.equal(found[:start], out[:start])
        assert torch.equal(found[end:], out[end:])


@pytest.mark.parametrize("kind", KINDS)
def test_short_documents_cost_what_their_tokens_cost(kind):
    """Counts the operations of products, forward and backward, and the bytes that are kept for backward."""
    costs = {}
    for size in (64, 8, 2, 1):
        call, kept = call_for([size] * (128 // size), torch.float32, 64, kind), [0]
        tensors, dout = draw(call, dk=64, dv=64)

        def note(x, kept=kept):
            kept[0] += x.nbytes
            return x

        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            leaves = type(tensors)(*(x.float() for x in tensors))
            run_rule("chunked", leaves, dout.float(), [0, 0, 1, 1], call)
        costs[size] = counter.get_total_flops(), kept[0]
    for operations, kept in costs.values():
        assert 0 < operations <= 2 * costs[64][0]
        assert 0 < kept <= 4 * costs[64][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_strong_decay_neither_overflows_nor_gives_nan(name, kind):
    call = call_for([100, 3], torch.float32, kind=kind)
    tensors, dout = draw(call)
    (tensors.A if kind == "mamba" else tensors.g).mul_(1000)
    results = run_rule(name, type(tensors)(*(x.float() for x in tensors)), dout.float(), [0, 0, 1, 1], call)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.any_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_strong_decays_are_no_noise(kind):
    """They are small, and once were differences of large numbers: 1 % to 16 % of noise in float32."""
    call = call_for([320, 70], kind=kind)
    tensors, dout = draw(call)
    rates = torch.tensor([1.0, 4.0, 9.0, 16.0], dtype=torch.float64)
    if kind == "mamba":
        tensors = tensors._replace(A=-rates)
    else:
        tensors = tensors._replace(g=-rates.view(-1, *(1,) * (tensors.g.ndim - 2)) * (1 - tensors.g))
    groups, place = [0, 0, 1, 1], type(tensors)._fields.index("A" if kind == "mamba" else "g") + 1

    def of_rates(name, dtype):
        found = run_rule(name, type(tensors)(*(x.to(dtype) for x in tensors)), dout.to(dtype), groups,
                         call_for([320, 70], dtype, kind=kind))[place].double()  # fmt: skip
        return found if kind == "mamba" else (found * tensors.g).transpose(0, 1).flatten(1).sum(1)

    exact = of_rates("reference", torch.float64)
    error = (of_rates("chunked", torch.float32) - exact).abs().max() / exact.abs().max()
    assert error <= 1e-4


@pytest.mark.any_cpu
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_convolution_is_torchs_conv1d_of_each_document(name, width, bias):
    call = call_for([5, 1, 0, 3, 40, 2])
    random = torch.Generator().manual_seed(0)
    total, channels = call.packing.total, 6
    x, dout = (torch.randn(total, channels, generator=random, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(channels, width, generator=random, dtype=torch.float64)
    tensors = [x, weight, *([torch.randn(channels, generator=random, dtype=torch.float64)] if bias else [])]

    def ours(x, weight, bias=None):
        return CONV_BY_NAME[name].conv(x, weight, bias, call, silu=True)

    def torchs(x, weight, bias=None):
        return linear_oracle.convolution(x, weight, bias, call.packing.lengths.tolist(), silu=True)

    for a, b in zip(with_gradients(ours, tensors, dout), with_gradients(torchs, tensors, dout), strict=True):
        assert (a - b).abs().max() <= 1e-13 * max(1, b.abs().max())


def test_rejects_an_unknown_kernel_and_a_convolution_has_the_name_of_its_rule():
    rejects(r"auto or .*chunked or reference", choose_rule, "triton", call_for([3]))
    assert choose_conv("reference", call_for([3])).name == "reference"
    assert choose_conv("mamba_ssm", call_for([3])).name == "chunked"


@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_chunked_on_the_cpu(kind):
    assert choose_rule("auto", call_for([3], kind=kind)).name == "chunked"
    assert choose_conv("auto", call_for([3], kind=kind)).name == "chunked"
