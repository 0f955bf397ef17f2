"""Tests of a layer's cost besides arithmetic: collectives, waits of the host, copies around the inbound exchange."""

import itertools

import pytest
import torch

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.messages import like_rows
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.executor.head_exchange import to_heads
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.softmax.attention import attention
from megatron_cp.testing.counters import Counters
from megatron_cp.testing.parity import Case, draw
from tests.counting_group import bytes_of_layer
from tests.covering import covering

RAGGED = (7, 1, 130, 64, 2)
OPERATIONS = {"attention": attention, "gdn": gated_delta_net, "kda": kda_mixer, "mamba": mamba2_mixer}


def count_layer(group, case, steps=2):
    """The counters of the last forward and the last backward: the first step makes the batch's tables."""
    problem, plan = draw(case), case.plan()
    for _ in range(steps):
        forward, backward = Counters(), Counters()
        inputs = [plan.layout.shard(x, group.rank).requires_grad_() for x in problem.inputs.values()]
        gradient = plan.layout.shard(problem.output_gradient, group.rank)
        with forward:
            watched = backward.watch(forward.watch(group))
            out = OPERATIONS[case.layer](*inputs, plan, watched, **problem.parameters)
        forward_collectives = forward.collectives
        with backward:
            out.backward(gradient)
    return forward_collectives, forward.collectives - forward_collectives, forward.host_syncs + backward.host_syncs


WAYS = ("attention", "a2a"), *itertools.product(("gdn", "kda", "mamba"), ("headwise", "chunkwise"))


@pytest.mark.parametrize(
    ("way", "layout", "kind"),
    covering(WAYS, ("contiguous", "zigzag", "balanced", "random"), ("threads", "processes")),
    ids=str,
)
@pytest.mark.few
def test_a_layer_is_two_collectives_each_way_and_never_waits(way, layout, kind):
    """They are those of a head exchange, or of a halo and a scan."""
    layer, scheme = way
    for counted in run_ranks(count_layer, 3, Case(layer, 3, RAGGED, layout, scheme=scheme), kind=kind):
        assert counted == (2, 2, {})


@pytest.mark.parametrize("layer", ["gdn", "kda", "mamba"])
def test_documents_within_ranks_send_nothing_chunkwise(layer):
    case = Case(layer, 3, (40, 30, 10, 40), "contiguous", scheme="chunkwise")
    plan = case.plan()
    assert (plan.collectives(forward=True), plan.bytes_sent(2, forward=True)) == (0, [0, 0, 0])
    for counted in run_ranks(count_layer, 3, case):
        assert counted == (0, 0, {})


@pytest.mark.parametrize("layout", ["contiguous", "balanced", "random", "zigzag"])
@pytest.mark.parametrize("layer", ["gdn", "kda", "mamba"])
@pytest.mark.few
def test_a_chunkwise_plan_says_what_is_sent(layer, layout):
    case = Case(layer, 5, RAGGED, layout, scheme="chunkwise")
    plan = case.plan()
    sent = run_ranks(bytes_of_layer, 5, case)
    expected = [plan.bytes_sent(case.dtype.itemsize, forward=forward) for forward in (True, False)]
    assert sent == list(zip(*expected, strict=True))


def count_inbound(group, layout, in_place):
    """Copy passes of the inbound exchange of GatedDeltaNet's sections, forward and backward."""
    heads, key_heads, dim = 8, 4, 16
    partition = partition_heads(heads, key_heads, layout.cp_size)
    widths = {
        "q": (key_heads, dim, partition.groups),
        "k": (key_heads, dim, partition.groups),
        "v": (heads, dim, partition.heads),
    }
    gates = {"beta": (heads, 1, partition.heads), "alpha": (heads, 1, partition.heads)}
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
    return tuple(sum(counters.copied.values()) / local.nbytes for counters in (forward, backward))


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
