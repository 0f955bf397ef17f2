"""`torch.compile` of functions that hold an operation: one break of the graph, the same numbers, no complaint."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from tests.compile_cases import (
    DIM,
    FUNCTIONS,
    HIDDEN,
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

CASES = [(operation, mode) for operation, modes in OPERATIONS.items() for mode in modes]
# Each operation in each mode on one rank and on two, with the other of two backends.
BACKENDS = ("eager", "aot_eager")
ON_RANKS = {ranks: [(*case, BACKENDS[(number + ranks) % 2]) for number, case in enumerate(CASES)] for ranks in (1, 2)}
WORDS = 32
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


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(compare, 2, ON_RANKS[2], kind="processes", timeout=limit(240))


def assert_as_uncompiled(found):
    assert found.complaints == ()
    assert found.breaks == 1
    assert found.graphs[0] == 2  # what stands before the operation, and what stands after it
    assert found.difference <= TOLERANCE


# All modes of an operation are in one function that no compiler looks into.
@pytest.mark.parametrize("case", ON_RANKS[1], ids=str)
@pytest.mark.few(of=lambda case: (case[0], case[2]))
def test_an_operation_is_one_break_of_the_graph(case):
    assert_as_uncompiled(compare(ThreadGroup.create(1)[0], [case])[case])


@pytest.mark.parametrize("case", ON_RANKS[2], ids=str)
@pytest.mark.thorough
def test_an_operation_of_two_processes_is_one_break_of_the_graph(case, on_two_ranks):
    for of_rank in on_two_ranks:
        assert_as_uncompiled(of_rank[case])


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


def checkpointed(group, operation, mode):
    """Largest difference of a compiled operation that is computed again in backward, over several packs."""
    function, layer, found = FUNCTIONS[operation], Layer(operation), []
    compiled = partial(checkpoint, compiled_on_the_last(group, function), use_reentrant=False)
    for number, lengths in enumerate(PACKS[:2]):
        batch = plans(operation, mode, lengths, group.size)
        x = drawn(batch, number, group.rank)
        expected, had = (results(run, layer, x, batch, given(group)) for run in (function, compiled))
        found.append(difference(had, expected))
    return max(found)


def in_flight(group, operation, mode):
    """Runs every forward before the first backward, and backward in the opposite order."""
    function, layer = FUNCTIONS[operation], Layer(operation)
    compiled, under_way, found = compiled_on_the_last(group, function), [], []
    for number, lengths in enumerate(PACKS[:2]):
        batch = plans(operation, mode, lengths, group.size)
        x = drawn(batch, number, group.rank)
        expected = results(function, layer, x, batch, given(group))
        leaf = x.clone().requires_grad_()
        under_way.append((compiled(layer, leaf, batch, given(group)), leaf, expected))
    for out, leaf, expected in reversed(under_way):
        gradients = torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()], allow_unused=True)
        had = [out.detach(), *(gradient for gradient in gradients if gradient is not None)]
        found.append(difference(had, expected))
    return max(found)


def compiled_on_the_last(group, function):
    return torch.compile(function, backend="aot_eager") if is_last(group) else function


def checkpointed_and_in_flight(group, cases):
    with complaints() as found:
        worst = [run(group, *case) for run in (checkpointed, in_flight) for case in cases]
    return worst, found


def test_compiled_operations_can_be_checkpointed_and_wait_for_their_backward():
    cases = [("attention", "a2a, 2 chunks"), ("kda_mixer", "chunkwise")]
    for worst, found in run_ranks(checkpointed_and_in_flight, 2, cases, kind="processes", timeout=limit(240)):
        assert max(worst) <= TOLERANCE
        assert found == []


@pytest.mark.parametrize(
    ("operation", "mode"),
    [("attention", "p2p"), ("gated_delta_net", "chunkwise"), ("kda_mixer", "headwise"), ("mamba2_mixer", "chunkwise"),
     ("gather", ""), ("relayout", "")],
)  # fmt: skip
def test_a_compiled_step_has_none_of_our_backward_in_its_graphs(operation, mode):
    """Autograd runs the backward of a CPU on the thread that asked for it, where a compiler looks at every call."""
    function, layer, (group,) = FUNCTIONS[operation], Layer(operation), ThreadGroup.create(1)
    batch, graphs = plans(operation, mode, PACKS[0], 1), []
    x = drawn(batch, 0, 0)

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    @partial(torch.compile, backend=backend)
    def step(x):
        function(layer, x, batch, group).square().sum().backward()

    expected = results(function, layer, x, batch, group)[1:]
    leaf = x.clone().requires_grad_()
    with complaints() as found:
        step(leaf)
    had = [leaf.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]
    assert difference(had, expected) <= TOLERANCE
    assert found == []
    ours = str(Path(cp.__file__).parent)
    traced = [node.stack_trace or "" for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert any("compile_cases" in place for place in traced)
    assert not any(ours in place for place in traced)


def test_a_compiled_step_has_none_of_the_loss_in_its_graphs():
    batch = cp.shard_batch(torch.arange(9), cp.Layout.contiguous(cp.Packing([5, 4]), 1))
    graphs = []

    def step(x):
        losses = torch.tanh(x).square().sum(1)
        loss = 2 * cp.token_loss(losses, batch)
        loss.backward()
        return loss.detach()

    def results(run):
        x = torch.linspace(-1, 1, 27, dtype=torch.float64).view(9, 3).requires_grad_()
        return run(x), x.grad

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    expected = results(step)
    with complaints() as found:
        had = results(torch.compile(step, backend=backend))
    assert difference(had, expected) <= TOLERANCE
    assert found == []
    ours = str(Path(cp.__file__).parent)
    traced = [node.stack_trace or "" for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert any("tanh" in place for place in traced)
    assert not any(ours in place for place in traced)


class Stack(torch.nn.Module):
    """Layers in a loop, as models have them."""

    def __init__(self, operations):
        super().__init__()
        self.layers = torch.nn.ModuleList(Within(operation) for operation in operations)

    def forward(self, x, batches, group):
        for layer in self.layers:
            x = x + layer(x, batches[layer.operation], group)
        return x


class Within(torch.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation, self.layer = operation, Layer(operation)

    def forward(self, x, batch, group):
        return FUNCTIONS[self.operation](self.layer, x, batch, group)


def test_a_model_is_compiled_once_for_all_of_its_layers():
    """Six layers of two kinds: two graphs each, and one more of the first, whose input needs no gradient."""
    modes, (group,) = {"attention": "a2a", "kda_mixer": "headwise"}, ThreadGroup.create(1)
    model, graphs = Stack([*modes] * 3), []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with complaints() as found:
        for number, lengths in enumerate(PACKS):
            batches = {name: plans(name, mode, lengths, 1) for name, mode in modes.items()}
            x = drawn(batches["attention"], number, 0)
            expected, had = (run(x, batches, group) for run in (model, compiled))
            assert difference([had.detach()], [expected.detach()]) <= TOLERANCE
            assert len(graphs) == (5 if number == 0 else 10)
    assert found == []


class Model(torch.nn.Module):
    """Tokens to loss, with each operation called in `forward`; `projected` and `finished` hold none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN, dtype=torch.float64)
        self.softmax, self.linear = Layer("attention"), Layer("gated_delta_net")
        self.head = torch.nn.Linear(HIDDEN, WORDS, dtype=torch.float64)

    def forward(self, batch, softmax_plan, linear_plan, group):
        x = self.embedding(batch.tokens)
        q, k, v = (y.unflatten(1, (-1, DIM)) for y in self.softmax.projected(x))
        x = x + self.softmax.finished(cp.attention(q, k, v, softmax_plan, group))
        parameters = {"conv": self.linear.conv, "A_log": self.linear.heads, "dt_bias": self.linear.heads}
        x = x + self.linear.finished(cp.gated_delta_net(*self.linear.projected(x), linear_plan, group, **parameters))
        losses = torch.nn.functional.cross_entropy(self.head(x), batch.labels, reduction="none")
        return cp.token_loss(losses, batch, group)


def trained(group, run_of, scheme, mode):
    """The loss of each step, and the graph breaks of the first."""
    model, losses, breaks = Model(), [], 0
    run, optimizer = run_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for lengths in (*PACKS[:2], (1,), PACKS[2]):  # one token: the other rank has no row
        softmax, linear = (
            plans(*case, lengths, group.size) for case in (("attention", scheme), ("gated_delta_net", mode))
        )
        batch = cp.shard_batch(torch.arange(sum(lengths)) % WORDS, softmax.layout, given(group))
        loss = run(batch, softmax.plan, linear.plan, given(group))
        optimizer.zero_grad()
        loss.backward()
        cp.reduce_gradients(model.parameters(), given(group))
        optimizer.step()
        losses.append(loss.detach().item())
        breaks = breaks or sum(counters["graph_break"].values())
    return losses, breaks


def trained_compiled_first(group, cases, backends):
    """Trains a program that compiles from its first step, before any operation has run or been looked up in `cp`."""
    for name in ("attention", "gated_delta_net", "token_loss"):
        vars(cp).pop(name, None)
    found = []
    for case, backend in zip(cases, backends, strict=True):
        torch._dynamo.reset()
        counters.clear()
        with complaints() as complained:
            compiled = trained(group, partial(torch.compile, backend=backend), *case)
        found.append((compiled, trained(group, lambda model: model, *case)[0], complained))
    return found


@pytest.mark.thorough
def test_a_compiled_model_is_trained_to_the_same_losses():
    cases = [("a2a, 2 chunks", "chunkwise"), ("p2p", "headwise")]
    for of_rank in run_ranks(trained_compiled_first, 2, cases, BACKENDS[::-1], kind="processes", timeout=limit(240)):
        for (losses, breaks), expected, complained in of_rank:
            assert losses == pytest.approx(expected, rel=TOLERANCE)
            assert breaks == 3  # attention, Gated DeltaNet and the loss
            assert complained == []


def test_rejects_one_whole_graph_with_the_reason():
    layer, (group,) = Layer("gather"), ThreadGroup.create(1)
    batch = plans("gather", "", PACKS[0], 1)
    with pytest.raises(Unsupported, match="operations exchange tensors between ranks"):
        torch.compile(FUNCTIONS["gather"], backend="eager", fullgraph=True)(layer, drawn(batch, 0, 0), batch, group)


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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=limit(120))
