"""A mesh of one axis wherever a group is taken; other meshes, and no group among several ranks, are refused by name."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup, rank_group
from megatron_cp.executor.launch import run_ranks
from tests.limits import limit
from tests.refusals import rejects

LENGTHS, ATTENTION = [5, 4], cp.AttentionSpec(2, 2, 4, 4, scheme="a2a")
LINEAR = cp.LinearSpec("conv1d", 6, 6, 1, 1, mode="headwise")


def test_a_mesh_of_one_axis_is_its_group():
    """By every function that takes a group: the same numbers; and each refuses a mesh of two axes."""
    assert run_ranks(_everything, 2, kind="processes", timeout=limit(120)) == [None, None]


def _everything(group):
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    for ours, theirs in zip(_calls(square["cp"]), _calls(group), strict=True):
        torch.testing.assert_close(ours(), theirs(), rtol=0, atol=0)
    assert rank_group(init_device_mesh("cpu", (2,))).size == 2
    for mesh, axes in ((square, r"\('dp', 'cp'\)"), (init_device_mesh("cpu", (1, 2)), ".without names")):
        for call in _calls(mesh):
            rejects(rf"^group: .* 2 dimensions {axes}.*mesh\[.cp.\]", call)
    for call in (
        lambda: cp.reduce_gradients([torch.ones(2, requires_grad=True)]),
        lambda: cp.token_loss(torch.ones(2), torch.ones(2)),
    ):
        rejects(r"^group: got None; allowed: a group, in a world of 2 ranks.*WORLD", call)
    alone = rank_group(square["dp"])  # an axis of this rank alone
    assert float(cp.token_loss(torch.full((2,), float(group.rank)), torch.ones(2), alone)) == group.rank


def _calls(group):
    """Functions of nothing that return what an operation over the group gives."""
    layout = cp.Layout.zigzag(cp.Packing(LENGTHS), 2)
    plans = cp.BatchPlan(layout, [ATTENTION, LINEAR])
    rank = torch.distributed.get_rank()
    rows = int(layout.row_counts[rank])
    values = torch.arange(rows * 8, dtype=torch.float64).view(rows, 2, 4).sin() + rank
    channels = values.flatten(1)[:, :6].contiguous()
    hidden = torch.arange(rows * 12, dtype=torch.float64).view(rows, 12).sin() + rank
    layer = cp.nn.Attention(12, 3, 1, 4, dtype=torch.float64)
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)

    def reduced():
        weight = torch.ones(3, requires_grad=True)
        weight.grad = torch.full((3,), 1.0 + rank)
        cp.reduce_gradients([weight], group)
        return weight.grad

    def agreed():
        cp.check_agreement(plans, group)
        cp.compare_calls(group, True)
        return torch.tensor(cp.hosts_of(group))

    return [
        lambda: cp.shard_batch(np.arange(9), layout, group, slots=[ATTENTION]).tokens,
        lambda: cp.attention(values, values, values, plans.plan(ATTENTION), group),
        lambda: cp.causal_conv1d(channels, torch.ones(6, 4).double(), None, plans.plan(LINEAR), group),
        lambda: cp.gather(values, layout, group),
        lambda: cp.relayout(values, layout, cp.Layout.contiguous(layout.packing, 2), group),
        lambda: cp.token_loss(values.flatten(), torch.ones(values.numel()), group),
        lambda: layer(hidden, cp.BatchPlan(layout, [layer.slot]), group),
        reduced,
        agreed,
    ]


def test_no_group_is_this_rank_where_it_is_the_only_one():
    assert float(cp.token_loss(torch.tensor([2.0]), torch.ones(1))) == 2
    assert rank_group(group := ThreadGroup.create(1)[0]) is group
    layout = cp.Layout.contiguous(cp.Packing([2]), 2)
    with pytest.raises(cp.ArgumentError, match=r"^group: got None; .*2 ranks. Pass .*mesh\[.cp.\] or dist.group.WORLD"):
        cp.gather(torch.zeros(1), layout, None)
