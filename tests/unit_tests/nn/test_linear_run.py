"""Runs of linear layers: hidden states that are redistributed move once in and once back, and are exact in between."""

import copy
import inspect

import pytest
import torch
from torch import nn

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.counting_group import CountingGroup
from tests.refusals import rejects

HIDDEN, PACKING = 12, cp.Packing([37, 1, 13, 0, 22])
WIDE = {"dtype": torch.float64}


class Block(nn.Module):
    """A linear layer and an MLP, each with its residual, as models have them."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm, self.mlp = layer, nn.RMSNorm(HIDDEN, **WIDE), nn.Linear(HIDDEN, HIDDEN, **WIDE)

    def forward(self, hidden, batch, group):
        hidden = hidden + self.layer(self.norm(hidden), batch, group)
        return hidden + self.mlp(hidden).tanh()


def run_of(*modes):
    torch.manual_seed(0)
    layers = [
        cp.nn.GatedDeltaNet(HIDDEN, 4, 2, head_dim=4, mode=modes[0], **WIDE),
        cp.nn.Mamba2(HIDDEN, 4, head_dim=4, state=8, groups=2, mode=modes[1], **WIDE),
        cp.nn.KimiDeltaAttention(HIDDEN, 3, head_dim=4, mode=modes[2], **WIDE),
    ]
    return cp.nn.LinearRun([Block(layer) for layer in layers])


def trained(run, layout, group=None):
    run, rank = copy.deepcopy(run), 0 if group is None else group.rank
    random = torch.Generator().manual_seed(1)
    hidden, gradient = (torch.randn(PACKING.total, HIDDEN, generator=random, **WIDE) for _ in range(2))
    counted = None if group is None else CountingGroup(group)
    batch = cp.shard_batch(torch.zeros(PACKING.total, dtype=torch.int64), layout, counted, slots=run.slots)
    local = layout.shard(hidden, rank).requires_grad_()
    out = run(local, batch, counted)
    collectives = 0 if counted is None else counted.calls["all_to_all"]
    out.backward(layout.shard(gradient, rank))
    if group is not None:
        cp.reduce_gradients(run, group)
    gradients = {name: parameter.grad for name, parameter in run.named_parameters()}
    return out.detach(), local.grad, gradients, collectives


MODES = [("redistribute",) * 3, ("redistribute", "headwise", "chunkwise"), ("headwise", "redistribute", "auto")]


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(("size", "align"), [(2, 1), (3, 4)])
def test_a_run_over_ranks_is_the_run_on_one(modes, size, align):
    run, layout = run_of(*modes), cp.Layout.zigzag(PACKING, size, align=align)
    one = trained(run, cp.Layout.contiguous(PACKING, 1))
    ranks = run_ranks(lambda group: trained(run, layout, group), size)
    for place in (0, 1):
        assert torch.allclose(layout.unshard([rank[place] for rank in ranks]), one[place], rtol=0, atol=1e-11)
    for rank in ranks:
        for name, expected in one[2].items():
            assert torch.allclose(rank[2][name], expected, rtol=0, atol=1e-11), name


def test_hidden_states_move_once_in_and_once_back():
    run = run_of(*MODES[0])

    def collectives(layout):
        return {rank[3] for rank in run_ranks(lambda group: trained(run, layout, group), 2)}

    (moved,), (inside,) = collectives(cp.Layout.zigzag(PACKING, 2)), collectives(cp.Layout.contiguous(PACKING, 2))
    assert moved == inside + 2


def test_auto_weighs_the_run_as_a_whole():
    run, layout = run_of("auto", "auto", "auto"), cp.Layout.zigzag(PACKING, 2)
    plans = [slot.plan(layout) for slot in run.slots]
    assert len({plan.redistribution is None for plan in plans}) == 1
    assert all(plan.redistribution is None or plan.redistribution.layers == 3 for plan in plans)


def test_rejects_a_run_with_other_layers_or_none():
    attention = cp.nn.Attention(HIDDEN, 3)
    rejects("blocks: got 'Attention'; allowed: blocks with linear layers", cp.nn.LinearRun, [attention])
    rejects("blocks: got 'none with a linear layer'", cp.nn.LinearRun, [nn.Linear(2, 2)])


MIXERS = ("gated_delta_rule", "gated_delta_net", "kda", "kda_mixer", "mamba2", "mamba2_mixer", "causal_conv1d")
KIND_OF = {"gated": "gdn", "kda": "kda", "mamba2": "mamba", "causal": "conv1d"}


@pytest.mark.parametrize("name", MIXERS)
def test_rejects_rows_that_nobody_moved(name):
    slot = cp.LinearSpec(KIND_OF[name.split("_")[0]], 2, 2, 4, 4, mode="redistribute", hidden_size=8)
    plan, operation = slot.plan(cp.Layout.zigzag(PACKING, 2)), getattr(cp, name)
    assert plan.inside.hidden_layout is None
    needed = {
        parameter.name: torch.zeros(1, 1)
        for parameter in inspect.signature(operation).parameters.values()
        if parameter.default is parameter.empty
    }
    says = r"plan: got 'one that redistributes hidden states'; allowed: plan\.inside, .* relayout\("
    rejects(says, operation, **needed | {"plan": plan})
