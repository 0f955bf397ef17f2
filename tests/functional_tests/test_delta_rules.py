"""The rules of Gated DeltaNet-2 and Gated DeltaProduct over ranks are their definitions, token by token."""

from functools import partial

import pytest
import torch

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.fuzz_cases import layout_named
from tests.linear_oracle import delta_product

LENGTHS = (37, 1, 130, 22, 1)
HEADS, GROUPS, KEY, VALUE, STEPS = 6, 3, 8, 5, 3
SIZES = {"heads": HEADS, "key_heads": GROUPS, "head_dim": KEY, "value_head_dim": VALUE}
LAYOUTS = {"contiguous": cp.Layout.contiguous, "zigzag": cp.Layout.zigzag, "balanced": cp.Layout.balanced}
LAYOUTS["one"] = partial(layout_named, "one")
WAYS = [
    (2, "zigzag", "chunkwise"), (2, "balanced", "headwise"), (3, "balanced", "chunkwise"),
    (3, "contiguous", "headwise"), (5, "contiguous", "chunkwise"), (5, "zigzag", "headwise"),
    (3, "one", "headwise"), (2, "one", "chunkwise"),  # ranks without rows
]  # fmt: skip


def channel_gated(q, k, v, g, b, w):
    """Gated DeltaNet-2, arXiv 2605.22791, document by document."""
    out, shared = [], HEADS // GROUPS
    q, k, g, b = (x.repeat_interleave(shared, 1) for x in (q, k, g, b))
    for tokens in torch.arange(len(q)).split(LENGTHS):
        state = q.new_zeros(HEADS, KEY, VALUE)
        for t in tokens.tolist():
            state = g[t].exp()[..., None] * state
            erased = torch.einsum("hkv,hk->hv", state, b[t] * k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], w[t] * v[t] - erased)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) * KEY**-0.5)
    return torch.stack(out)


def several_steps(q, k, v, g, beta):
    k, v, beta = (x.unflatten(0, (-1, STEPS)) for x in (k, v, beta))
    groups = torch.arange(HEADS) // (HEADS // GROUPS)
    return delta_product(q, k, v, g, beta.transpose(1, 2), groups, KEY**-0.5, LENGTHS)


def drawn(kind):
    """The inputs over the whole stream, and the gradient of the output."""
    random, total = torch.Generator().manual_seed(1), sum(LENGTHS)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    rows = total * (STEPS if kind == "gdp" else 1)
    q, k = (torch.nn.functional.normalize(normal(count, GROUPS, KEY), dim=-1) for count in (total, rows))
    inputs, gradient = {"q": q, "k": k, "v": normal(rows, HEADS, VALUE)}, normal(total, HEADS, VALUE)
    if kind == "gdp":
        return inputs | {"g": -normal(total, HEADS).exp() / 8, "beta": 2 * normal(rows, HEADS).sigmoid()}, gradient
    inputs |= {"g": -normal(total, GROUPS, KEY).exp() / 8, "b": normal(total, GROUPS, KEY).sigmoid()}
    return inputs | {"w": normal(total, HEADS, VALUE).sigmoid()}, gradient


RULES = {
    "gdn2": (cp.gdn2, channel_gated, {}),
    "gdp": (cp.gated_delta_product, several_steps, {"num_householder": STEPS}),
}


@pytest.mark.parametrize(("size", "layout", "mode"), WAYS)
@pytest.mark.parametrize("kind", RULES)
def test_the_rule_over_ranks_is_its_definition(kind, size, layout, mode):
    rule, definition, sizes = RULES[kind]
    inputs, weight = drawn(kind)
    alone = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    expected = definition(**alone)
    expected.backward(weight)
    assigned = LAYOUTS[layout](cp.Packing(LENGTHS), size)
    plan = cp.plan_linear(assigned.packing, assigned, kind, **SIZES, **sizes, mode=mode)

    def by_tokens(x):
        return x.unflatten(0, (len(weight), -1))  # the steps of a token stay together

    def main(group):
        own = {name: assigned.shard(by_tokens(x), group.rank).flatten(0, 1) for name, x in inputs.items()}
        own = {name: x.requires_grad_() for name, x in own.items()}
        out = rule(**own, plan=plan, group=group)
        out.backward(assigned.shard(weight, group.rank))
        return out.detach(), {
            name: x.grad.unflatten(0, (len(out), len(inputs[name]) // len(weight))) for name, x in own.items()
        }

    found = run_ranks(main, size)
    assert (assigned.unshard([out for out, _ in found]) - expected).abs().max() < 1e-12
    for name, x in alone.items():
        gradient = assigned.unshard([gradients[name] for _, gradients in found]).flatten(0, 1)
        assert (gradient - x.grad).abs().max() < 1e-12 * max(x.grad.abs().max(), 1), name


def test_one_step_is_the_gated_delta_rule():
    inputs, _ = drawn("gdn2")
    layout = cp.Layout.contiguous(cp.Packing(LENGTHS), 1)
    beta, g = inputs["w"][..., 0], inputs["g"][:, :1, 0].expand(-1, HEADS)
    given = *(inputs[name] for name in "qkv"), g, beta
    of_one, plain = (cp.plan_linear(layout.packing, layout, kind, **SIZES) for kind in ("gdp", "gdn"))
    assert torch.equal(cp.gated_delta_product(*given, of_one), cp.gated_delta_rule(*given, plain))


def test_channel_gates_that_are_one_number_are_kda():
    inputs, _ = drawn("gdn2")
    layout = cp.Layout.contiguous(cp.Packing(LENGTHS), 1)
    sizes = SIZES | {"key_heads": HEADS}
    q, k, g = (inputs[name].repeat_interleave(HEADS // GROUPS, 1) for name in "qkg")
    beta, v = inputs["w"][..., :1], inputs["v"]
    gated, plain = (cp.plan_linear(layout.packing, layout, kind, **sizes) for kind in ("gdn2", "kda"))
    found = cp.gdn2(q, k, v, g, beta.expand_as(k), beta.expand_as(v), gated)
    assert (found - cp.kda(q, k, v, g, beta[..., 0], plain)).abs().max() < 1e-13
