"""Runs of linear layers in a stack: who is in which, and when they are not redistributed."""

import dataclasses

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core")

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.megatron.layers.base import ContextParallelModule, LinearModule
from megatron_cp.megatron.layers.redistribution import _RunHooks, arrange_runs
from megatron_cp.megatron.modules import layer_slots
from megatron_cp.megatron.packed_seq_params import planned_params
from megatron_cp.planner.batch import BatchPlan, LinearSpec
from tests.counting_group import CountingGroup
from tests.refusals import rejects

SLOTS = {"G": LinearSpec("gdn", 8, 8, 16, 16), "M": LinearSpec("mamba", 8, 1, 16, 16)}


class Linear(nn.Module, LinearModule):
    def __init__(self, slot):
        super().__init__()
        self.slot, self.ranks, self.config = slot, ThreadGroup.create(4)[0], Config()


class Attention(nn.Module, ContextParallelModule):
    pass


class StockAttention(nn.Module):
    def forward(self, hidden_states, packed_seq_params=None):
        return hidden_states


@dataclasses.dataclass
class Config:
    context_parallel_size: int = 4
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    calculate_per_token_loss: bool = True
    hidden_size: int = 64
    fp8: str | None = None
    fp4: str | None = None


def stack(pattern, mode="auto"):
    makers = {
        "*": Attention,
        "S": StockAttention,
        "-": nn.Identity,
        **{
            symbol: lambda slot=slot: Linear(dataclasses.replace(slot, mode=mode)) for symbol, slot in SLOTS.items()
        },
    }  # fmt: skip
    return [nn.Sequential(makers[symbol]()) for symbol in pattern]


def hooked(layers):
    """Returns the layers at which hidden states enter a run, those inside of runs, and those at which they leave."""
    entering = [[hook.keywords["moves"] for hook in layer._forward_pre_hooks.values()] for layer in layers]
    places = list(enumerate(layers))
    return [
        [place for place, _ in places if any(entering[place])],
        [place for place, _ in places if entering[place]],
        [place for place, layer in places if layer._forward_hooks],
    ]


@pytest.mark.parametrize(
    ("pattern", "enter", "inside", "leave"),
    [
        ("GG*-", [0], [0, 1], [1]), ("-G-M-*G", [1, 6], [1, 2, 3, 6], [3, 6]), ("*-*-", [], [], []),
        ("*M-G", [1], [1, 2, 3], [3]), ("GMG", [0], [0, 1, 2], [2]), ("GSG", [0, 2], [0, 2], [0, 2]),
    ],
)  # fmt: skip
def test_a_run_begins_and_ends_with_a_linear_layer(pattern, enter, inside, leave):
    layers = stack(pattern)
    arrange_runs(layers, Config())
    assert hooked(layers) == [enter, inside, leave]


def test_linear_layers_know_all_kinds_of_their_run():
    layers = stack("-G-MG*M")
    arrange_runs(layers, Config())
    own = [layer[0].slot for layer in layers if isinstance(layer[0], Linear)]
    assert [slot.kind for slot in own] == ["gdn", "mamba", "gdn", "mamba"]
    assert [slot.run for slot in own] == [(SLOTS["G"], SLOTS["M"], SLOTS["G"])] * 3 + [(SLOTS["M"],)]
    assert {slot.hidden_size for slot in own} == {64}
    assert len(set(own)) == 3  # equal layers of a run share a plan


def test_nothing_is_redistributed_with_sequence_parallelism():
    layers = stack("GG*-")
    arrange_runs(layers, Config(sequence_parallel=True, tensor_model_parallel_size=2))
    assert hooked(layers) == [[], [], []]
    assert layers[0][0].slot == SLOTS["G"]


def test_rejects_redistribution_of_a_layer_in_no_stack(batch):
    (layer,) = stack("G", "redistribute")
    refused = "--linear-cp-mode: got 'redistribute'; .* in no stack of megatron_cp.megatron.specs"
    rejects(refused, layer_slots, layer)
    rejects(refused, layer[0].packed_plan, batch)
    arrange_runs([layer], Config())
    assert layer_slots(layer) == [layer[0].slot]
    assert layer[0].packed_plan(batch).redistribution is not None


def test_rejects_redistribution_with_sequence_parallelism():
    config = Config(sequence_parallel=True, tensor_model_parallel_size=2)
    says = "--linear-cp-mode: got 'redistribute'; allowed: headwise, chunkwise or auto"
    rejects(says, arrange_runs, stack("GG*-", "redistribute"), config)


def test_unpacked_batches_are_planned_layer_by_layer():
    layers = stack("GG*-")
    arrange_runs(layers, Config())
    plan = layers[0][0].plan_of(4096, 2, None)
    assert plan.redistribution is None
    assert plan.packing.lengths.tolist() == [4 * 4096] * 2
    layers = stack("GG*-", "redistribute")
    arrange_runs(layers, Config())
    rejects(r"--linear-cp-mode: got 'redistribute'; .* that are not packed", layers[0][0].plan_of, 16, 1, None)


@pytest.fixture
def batch():
    """Four documents' parameters, on rank 0."""
    layout = cp.Layout.zigzag(cp.Packing([30, 1, 13]), 4, align=8)
    return planned_params(BatchPlan(layout), 0, torch.device("cpu"))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_rejects_a_padding_mask_inside_a_redistributed_run(place, batch):
    layers = stack("G-G*", "redistribute")
    arrange_runs(layers, Config())
    inputs = {"hidden_states": torch.zeros(16, 1, 64), "packed_seq_params": batch, "padding_mask": torch.zeros(1, 16)}
    rejects("padding mask", layers[place], **inputs)


def test_layers_inside_of_a_run_are_given_its_layout_and_no_rows_of_the_batch(batch):
    slot = dataclasses.replace(SLOTS["G"], mode="redistribute", hidden_size=64)
    linear = Linear(slot)
    given = {"hidden_states": torch.zeros(16, 1, 64), "packed_seq_params": batch}
    _, kwargs = _RunHooks(linear).enter(linear, (), given, moves=False)
    inner = kwargs["packed_seq_params"]
    assert (inner.layout, batch.layout) == (slot.plan(batch.layout).layout, batch.plans.layout)
    assert inner.layout != batch.layout
    assert inner.positions is inner.stream is None
    assert inner.plans is batch.plans


def test_rejects_a_layer_of_a_redistributed_run_that_is_called_outside_of_it(batch):
    linear = Linear(dataclasses.replace(SLOTS["G"], mode="redistribute", hidden_size=64))
    inner = batch.within(linear.packed_plan(batch).layout)
    rows = int(inner.layout.row_counts[0])
    assert linear.plan_of(rows, 1, inner).layout == inner.layout
    rejects("--linear-cp-mode: got 'redistribute'; .* outside of its stack", linear.plan_of, rows, 1, batch)


@pytest.mark.parametrize(
    ("transport", "calls"),
    [
        (cp.Transport(), {"all_to_all": 2}),
        (cp.Transport("pairwise"), {"messages": 2 * 3}),
        (cp.Transport("hierarchical", (0, 1, 1, 0)), {"messages": 2 * 2}),
    ],
    ids=["collective", "pairwise", "hierarchical"],
)
def test_hidden_states_move_by_the_plans_transport(transport, calls):
    slot = dataclasses.replace(SLOTS["G"], mode="redistribute", transport=transport, hidden_size=64)
    plan = slot.plan(cp.Layout.zigzag(cp.Packing([30, 1, 13]), 4))

    def rank_main(inner):
        cp.compare_calls(inner, False)
        group, linear = CountingGroup(inner), Linear(slot)
        linear.ranks = group
        params = planned_params(BatchPlan(plan.hidden_layout), inner.rank, torch.device("cpu"))
        hidden = torch.randn(int(plan.hidden_layout.row_counts[inner.rank]), 1, 64)
        given = {"packed_seq_params": params}
        (inside,), kwargs = _RunHooks(linear).enter(linear, (hidden,), given, moves=True)
        assert len(inside) == plan.layout.row_counts[inner.rank]
        assert torch.equal(_RunHooks(linear).restore(linear, (), kwargs, inside), hidden)
        return dict(group.calls)

    assert run_ranks(rank_main, 4) == [calls] * 4
