"""`torch.compile` of functions that hold an operation: one break of the graph, the same numbers, no complaint."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from tests.commands import run_code
from tests.compile_cases import (
    OPERATIONS,
    PACKS,
    TOLERANCE,
    Layer,
    compile_and_compare,
    complaints,
    difference,
    drawn,
    given,
    plans,
    results,
)
from tests.limits import limit

MODES = [(operation, mode) for operation, modes in OPERATIONS.items() for mode in modes]
# Each operation in each mode, with one of two backends.
CASES = [(*mode, backend) for mode, backend in zip(MODES, itertools.cycle(("aot_eager", "eager")), strict=False)]
RAGGED = [("attention", "exact"), ("projected_attention", "a2a, 2 chunks"), ("mamba2_mixer", "chunkwise")]


@pytest.fixture(autouse=True)
def nothing_compiled_remains():
    yield
    torch._dynamo.reset()


def compare(group, cases, packs=PACKS[:1], compiles=True):
    """Runs cases one after the other: starting ranks takes longer."""
    found = {}
    for case in cases:
        try:
            found[case] = compile_and_compare(group, *case, packs, compiles)
        except Exception as error:
            error.add_note(f"This was {case}.")
            raise
    return found


def compare_on_the_last(group, cases, packs):
    return compare(group, cases, packs, compiles=is_last(group))


def is_last(group):
    """True on the rank that compiles where one is enough: compiling takes long, and the other runs it as it is."""
    return group.rank == group.size - 1


def assert_as_uncompiled(found):
    assert found.complaints == ()
    assert found.breaks == 1
    assert found.graphs[0] == 2  # what stands before the operation, and what stands after it
    assert found.difference <= TOLERANCE


# All modes of an operation are in one function that no compiler looks into.
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.few(of=lambda case: (case[0], case[2]))
def test_an_operation_is_one_break_of_the_graph(case):
    assert_as_uncompiled(compare(ThreadGroup.create(1)[0], [case])[case])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [("attention", "a2a"), ("gated_delta_net", "chunkwise")], ids=str)
@pytest.mark.thorough
def test_inductor_compiles_around_an_operation(case):
    """It runs on one rank: the first graph takes 30 s, and processes would take them together."""
    with torch._inductor.config.patch(compile_threads=1):  # no processes of its own
        assert_as_uncompiled(compile_and_compare(ThreadGroup.create(1)[0], *case, "inductor"))


def test_packs_of_any_lengths_compile_twice_at_most():
    """The operation compiles for the first lengths, and again for any lengths."""
    cases = [(*case, "eager") for case in RAGGED]
    other, compiled = run_ranks(compare_on_the_last, 2, cases, PACKS, kind="processes", timeout=limit(240))
    for found in compiled.values():
        assert_as_uncompiled(found)
        assert found.graphs[1:] == (4, 4, 4, 4)
    assert max(found.difference for found in other.values()) <= TOLERANCE


def checkpointed_and_in_flight(group, cases):
    """Runs every checkpointed forward before the first backward, and backward in the opposite order."""
    worst = []
    with complaints() as found:
        for operation, mode in cases:
            layer, under_way = Layer(operation), []
            run = torch.compile(layer, backend="aot_eager") if is_last(group) else layer
            for number, lengths in enumerate(PACKS[:2]):
                batch = plans(operation, mode, lengths, group.size)
                x = drawn(batch, number, group.rank)
                expected = results(layer, layer, x, batch, given(group))
                leaf = x.clone().requires_grad_()
                out = checkpoint(run, leaf, batch, given(group), use_reentrant=False)
                under_way.append((out, leaf, expected))
            for out, leaf, expected in reversed(under_way):
                gradients = torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()], allow_unused=True)
                had = [out.detach(), *(gradient for gradient in gradients if gradient is not None)]
                worst.append(difference(had, expected))
    return max(worst), found


def test_compiled_operations_can_be_checkpointed_and_wait_for_their_backward():
    cases = [("attention", "a2a, 2 chunks"), ("kda_mixer", "chunkwise")]
    for worst, found in run_ranks(checkpointed_and_in_flight, 2, cases, kind="processes", timeout=limit(240)):
        assert worst <= TOLERANCE
        assert found == []


def with_graphs(step, *inputs):
    """Returns what a compiled step returns, and the places of the code that its graphs have been traced from."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    with complaints() as found:
        out = torch.compile(step, backend=backend)(*inputs)
    assert found == []
    return out, [node.stack_trace or "" for graph in graphs for node in graph.nodes if node.op == "call_function"]


def assert_none_is_ours(places, of_caller):
    assert any(of_caller in place for place in places)
    assert not any(str(Path(cp.__file__).parent) in place for place in places)


@pytest.mark.parametrize(
    ("operation", "mode"),
    [("attention", "p2p"), ("gated_delta_net", "chunkwise"), ("kda_mixer", "headwise"), ("mamba2_mixer", "chunkwise"),
     ("gather", ""), ("relayout", "")],
)  # fmt: skip
def test_a_compiled_step_has_none_of_our_backward_in_its_graphs(operation, mode):
    """Autograd runs the backward of a CPU on the thread that asked for it, where a compiler looks at every call."""
    layer, (group,) = Layer(operation), ThreadGroup.create(1)
    batch = plans(operation, mode, PACKS[0], 1)
    x = drawn(batch, 0, 0)
    expected = results(layer, layer, x, batch, group)[1:]
    leaf = x.clone().requires_grad_()
    _, places = with_graphs(lambda x: layer(x, batch, group).square().sum().backward(), leaf)
    had = [leaf.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]
    assert difference(had, expected) <= TOLERANCE
    assert_none_is_ours(places, "compile_cases")


def test_a_compiled_step_has_none_of_the_loss_in_its_graphs():
    batch = cp.shard_batch(torch.arange(9), cp.Layout.contiguous(cp.Packing([5, 4]), 1))

    def step(x):
        losses = torch.tanh(x).square().sum(1)
        loss = 2 * cp.token_loss(losses, batch)
        loss.backward()
        return loss.detach()

    right, x = (torch.linspace(-1, 1, 27, dtype=torch.float64).view(9, 3).requires_grad_() for _ in range(2))
    expected = step(right)
    loss, places = with_graphs(step, x)
    assert difference([loss, x.grad], [expected, right.grad]) <= TOLERANCE
    assert_none_is_ours(places, "tanh")


class Stack(torch.nn.Module):
    """Layers in a loop, as models have them."""

    def __init__(self, operations):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(operation) for operation in operations)

    def forward(self, x, batches, group):
        for layer in self.layers:
            x = x + layer(x, batches[layer.name], group)
        return x


def test_a_model_is_compiled_once_for_all_of_its_layers():
    """Six layers of two kinds: two graphs of each kind for the first lengths, and again for any lengths."""
    modes, (group,) = {"attention": "a2a", "kda_mixer": "headwise"}, ThreadGroup.create(1)
    model, graphs, counts = Stack([*modes] * 3), [], []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with complaints() as found:
        for number, lengths in enumerate(PACKS):
            batches = {name: plans(name, mode, lengths, 1) for name, mode in modes.items()}
            x = drawn(batches["attention"], number, 0)
            expected, had = (run(x, batches, group) for run in (model, compiled))
            assert difference([had.detach()], [expected.detach()]) <= TOLERANCE
            counts.append(len(graphs))
    assert counts == [4, 8, 8, 8, 8]
    assert found == []


def test_rejects_one_whole_graph_with_the_reason():
    layer, (group,) = Layer("gather"), ThreadGroup.create(1)
    batch = plans("gather", "", PACKS[0], 1)
    with pytest.raises(Unsupported, match="operations exchange tensors between ranks"):
        torch.compile(layer, backend="eager", fullgraph=True)(drawn(batch, 0, 0), batch, group)


def test_who_compiles_nothing_does_not_import_the_compiler():
    program = """if True:
        import sys
        import megatron_cp as cp
        assert "torch" not in sys.modules
        packing = cp.Packing([3, 1])
        layout = cp.Layout.contiguous(packing, cp_size=1)
        plan = cp.plan_linear(packing, layout, "conv1d", channels=2)
        import torch
        x = torch.ones(4, 2, requires_grad=True)
        cp.gather(cp.causal_conv1d(x, torch.ones(2, 4), None, plan), layout, None).sum().backward()
        assert "torch._dynamo" not in sys.modules
    """
    run_code(program)
