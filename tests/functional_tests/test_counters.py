"""What a layer costs besides arithmetic: collectives, waits of the host, and copies around the inbound exchange."""

import pytest
import torch

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.pack import like_rows
from megatron_cp.exchange.sections import Section, Sections, deal_heads
from megatron_cp.executor.exchange import to_heads
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.counters import Counters
from megatron_cp.testing.parity import Case, draw

RAGGED = (7, 1, 130, 64, 2)


def count_layer(group, case, steps=2):
    """The counters of the last forward and the last backward: the first step makes the batch's tables."""
    problem, plan = draw(case), case.plan()
    for _ in range(steps):
        forward, backward = Counters(), Counters()
        inputs = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
        gradient = plan.layout.shard(problem.output_gradient, group.rank)
        with forward:
            if case.layer == "attention":
                out = attention(*inputs, plan, watched(group, forward, backward))
            else:
                out = gated_delta_net(*inputs, plan, watched(group, forward, backward), **problem.parameters)
        forward_collectives = forward.collectives
        with backward:
            out.backward(gradient)
    return forward_collectives, forward.collectives - forward_collectives, forward.host_syncs + backward.host_syncs


def watched(group, forward, backward):
    return backward.watch(forward.watch(group))


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("layer", ["attention", "gdn"])
def test_a_layer_is_two_collectives_each_way_and_never_waits(layer, layout, kind):
    for counted in run_ranks(count_layer, 3, Case(layer, 3, RAGGED, layout), kind=kind):
        assert counted == (2, 2, {})


def count_inbound(group, layout, in_place):
    """Copy passes of the inbound exchange of GatedDeltaNet's sections, forward and backward."""
    heads, key_heads, dim = 8, 4, 16
    deal = deal_heads(heads, key_heads, layout.cp_size)
    widths = {"q": (key_heads, dim, deal.groups), "k": (key_heads, dim, deal.groups), "v": (heads, dim, deal.heads)}
    gates = {"beta": (heads, 1, deal.heads), "alpha": (heads, 1, deal.heads)}
    exchange = Exchange(layout, Sections(tuple(Section(name, *rest) for name, rest in (widths | gates).items())))
    local = torch.randn(int(layout.row_counts[group.rank]), exchange.sections.width, requires_grad=True)
    torch.autograd.backward([s.sum() for s in to_heads(exchange, group, local)])  # the first makes the batch's tables
    local.grad = None
    forward, backward = Counters(), Counters()
    with forward:
        sections = to_heads(exchange, group, local)
    gradients = like_rows(*sections) if in_place else [torch.empty(s.shape) for s in sections]
    for gradient in gradients:
        gradient.fill_(1.0)
    with backward:
        torch.autograd.backward(sections, gradients)
    assert torch.equal(local.grad, torch.ones_like(local))
    return forward.copy_passes(local), backward.copy_passes(local)


@pytest.mark.parametrize(
    ("name", "in_place", "passes"),
    [("contiguous", True, (1, 1)), ("zigzag", True, (2, 2)), ("contiguous", False, (1, 2)), ("zigzag", False, (2, 2))],
)
def test_copy_passes_around_the_inbound_exchange(name, in_place, passes):
    packing = Packing([64, 32, 160])
    layout = getattr(Layout, name)(packing, 2)
    # 4 heads of beta and alpha fill their 16 bytes, so that no alignment blurs the count.
    for counted in run_ranks(count_inbound, 2, layout, in_place):
        assert counted == passes


def test_counters_see_what_a_dispatcher_does_not():
    counters = Counters()
    x = torch.arange(4.0, requires_grad=True)

    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient.tolist()
            gradient.numpy()
            return gradient.cpu()

    y = Peeks.apply(x)
    with counters:
        y.sum().backward()
        x.detach().sum().item()
        x.detach()[x.detach() > 1]
    expected = {"tolist": 1, "numpy": 1, "cpu": 1, "_local_scalar_dense": 1, "index": 1}
    assert {name: counters.host_syncs[name] for name in expected} == expected
    assert "tolist" not in torch.Tensor.__dict__  # the class is as it was
