"""Ranges: the names that a profiler sees of every scheme, the same on all ranks, and that nothing is made without."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.profiler import profile

import megatron_cp as cp
from megatron_cp.executor import communicator, run
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.executor.trace import NO_RANGE, layer_operation, layer_scope, profiling, range_name, traced_work
from megatron_cp.testing.parity import Case, draw, run_linear

SMALL = {"heads": 8, "groups": 4, "head_dim": 4, "value_head_dim": 4}
CASES = {
    "a2a in chunks": Case("attention", 4, (9, 20, 3), scheme="a2a", heads=8, groups=8, head_chunks=2),
    "p2p": Case("attention", 4, (9, 20, 3), scheme="p2p", **SMALL),
    "exact": Case("attention", 4, (9, 20, 3), scheme="exact", head_chunks=1, **SMALL),
    "a2a+p2p": Case("attention", 4, (9, 20, 3), scheme="a2a+p2p", ulysses_degree=2, **SMALL),
    "a2a+all_gather": Case("attention", 4, (9, 20, 3), scheme="a2a+all_gather", ulysses_degree=2, **SMALL),
    "projected in chunks": Case("attention", 4, (9, 20, 3), scheme="a2a", heads=8, groups=8, head_chunks=2),
    "gdn headwise": Case("gdn", 4, (9, 20, 3), scheme="headwise", **SMALL),
    "mamba redistribute": Case("mamba", 4, (9, 20, 3), scheme="redistribute", hidden_size=64, **SMALL),
    "a rank without tokens": Case("kda", 4, (2, 1), "contiguous", scheme="chunkwise", **SMALL),
}


def step_of(group, case, *, projected=False):
    """Forward and backward of a case on one rank: the output and the gradients."""
    problem, plan = draw(case), case.plan()
    layout = plan.hidden_layout or plan.layout
    inputs = {name: layout.shard(x, group.rank).requires_grad_() for name, x in problem.inputs.items()}
    parameters = {name: x.clone().requires_grad_() for name, x in problem.parameters.items()}
    gradient = layout.shard(problem.output_gradient, group.rank)

    def forward():
        if projected:
            q, k, v = inputs.values()
            of_heads = lambda heads, kv_heads: (q[:, heads], k[:, kv_heads], v[:, kv_heads])  # noqa: E731
            return cp.projected_attention(of_heads, plan, group)
        if case.layer == "attention":
            return cp.attention(*inputs.values(), plan, group)
        return run_linear(group, case, plan, inputs, parameters)

    def backward(out):
        return [out.detach(), *torch.autograd.grad(out, [*inputs.values(), *parameters.values()], gradient)]

    return forward, backward


def names_in(found):
    ranges = [event for event in found.kineto_results.events() if event.name().startswith("cp ")]
    return [event.name() for event in sorted(ranges, key=lambda event: event.start_ns())]


def seen(group, cases):
    """Returns, for each case, the names in this rank's profiler, and True if the numbers are those without it.

    Once more with a profiler on rank 0 alone: others would notice another order of steps.
    """
    torch.set_num_threads(1)
    found = {}
    for name, case in cases.items():
        forward, backward = step_of(group, case, projected="projected" in name)
        expected = backward(forward())
        group.barrier()
        with profile() as record:
            with layer_scope(12):
                out = forward()
            results = backward(out)
        with nullcontext() if group.rank else profile():
            results += backward(forward())
        found[name] = names_in(record), all(map(torch.equal, results, expected * 2))
    return found


@pytest.fixture(scope="module")
def ranks():
    """Returns each rank's names. Ranks are processes, since a process has one profiler."""
    return run_ranks(seen, 4, CASES, kind="processes")


# What is done, in order, without "cp", the scheme and the layer; "<" stands for backward.

CHUNKS = ("chunk 1/2", "chunk 2/2")


def exchanged(step, what, way=""):
    return [f"{step} {what}{way}", f"{step} wait {what}{way}", f"{step} unpack {what}{way}"]


def in_an_exchange(inner, inner_backward):
    return [
        *exchanged("to_heads", "q,k,v"), *inner, *exchanged("to_tokens", "out"),
        *exchanged("to_heads", "out", " <"), *inner_backward, *exchanged("to_tokens", "q,k,v", " <"),
    ]  # fmt: skip


def ring(size):
    forward, backward = [], []
    for stage in range(1, size + 1):
        here, following = f"stage {stage}/{size}", f"stage {stage + 1}/{size}"
        for steps, way in ((forward, ""), (backward, " <")):
            steps += [f"send k,v {here}{way}"] if stage == 1 else [f"wait k,v {here}{way}"]
            steps += [f"send k,v {following}{way}"] * (stage < size) + [f"attend {here}{way}"]
        backward += [f"wait dk,dv {here} <"] * (stage > 1) + [f"send dk,dv {here} <"]
    return forward, [*backward, f"wait dk,dv stage {size}/{size} <"]


def fetched_in_two_chunks(way=""):
    one, two = (f"{chunk}{way}" for chunk in CHUNKS)
    first = [f"send k,v {one}", f"wait k,v {one}", f"send k,v {two}", f"unpack k,v {one}", f"attend {one}"]
    second = [f"wait k,v {two}", f"unpack k,v {two}", f"attend {two}"]
    if not way:
        return [*first, *second]
    summed = [f"wait dk,dv {one}", f"sum dk,dv {one}", f"send dk,dv {two}", f"wait dk,dv {two}", f"sum dk,dv {two}"]
    return [*first, f"send dk,dv {one}", *second, *summed]


FETCHED = fetched_in_two_chunks(), fetched_in_two_chunks(" <")
SCAN = ["rule", *(f"scan {what}" for what in ("leave", "send", "meanwhile", "wait", "fold", "finish"))]
CHUNKWISE = ["conv", "halo send", "halo wait", "gates", *SCAN]
CHUNKWISE_BACKWARD = [f"{step} <" for step in (*SCAN, "gates", "conv", "halo send", "halo wait")]
RELAYOUT = ["relayout", "relayout wait"]
GDN = "q,k,v,beta,alpha"
A2A_IN_CHUNKS = [  # up to the gradients, which are unpacked together, or for each chunk where it was projected
    *(f"to_heads q,k,v {chunk}" for chunk in CHUNKS),
    *(f"{step} {chunk}" for chunk in CHUNKS
      for step in ("to_heads wait q,k,v", "to_heads unpack q,k,v", "attend", "to_tokens out")),
    *(f"to_tokens wait out {chunk}" for chunk in CHUNKS), "to_tokens unpack out",
    *(f"to_heads out {chunk} <" for chunk in reversed(CHUNKS)),
    *(f"{step} {chunk} <" for chunk in reversed(CHUNKS)
      for step in ("to_heads wait out", "to_heads unpack out", "attend", "to_tokens q,k,v")),
]  # fmt: skip
EXPECTED = {
    "a2a in chunks": [
        *A2A_IN_CHUNKS, *(f"to_tokens wait q,k,v {chunk} <" for chunk in reversed(CHUNKS)), "to_tokens unpack q,k,v <",
    ],
    "p2p": [step for way in ring(4) for step in way],
    "exact": [
        "send k,v", "wait k,v", "unpack k,v", "attend",
        "send k,v <", "wait k,v <", "unpack k,v <", "attend <", "send dk,dv <", "wait dk,dv <", "sum dk,dv <",
    ],
    "a2a+p2p": in_an_exchange(*ring(2)),
    "a2a+all_gather": in_an_exchange(*FETCHED),
    "projected in chunks": [
        *A2A_IN_CHUNKS,
        *(f"to_tokens {what} q,k,v {chunk} <" for chunk in reversed(CHUNKS) for what in ("wait", "unpack")),
    ],
    "gdn headwise": [
        *exchanged("to_heads", GDN), "conv", "gates", "rule", *exchanged("to_tokens", "out"),
        *exchanged("to_heads", "out", " <"), "rule <", "gates <", "conv <", *exchanged("to_tokens", GDN, " <"),
    ],
    "mamba redistribute": [
        *RELAYOUT * 2, *CHUNKWISE, *RELAYOUT,
        *(f"{step} <" for step in RELAYOUT), *CHUNKWISE_BACKWARD, *(f"{step} <" for step in RELAYOUT * 2),
    ],
    "a rank without tokens": [*CHUNKWISE, *CHUNKWISE_BACKWARD],
}  # fmt: skip


def spelled(case, step):
    """The whole name."""
    scheme = {"redistribute": "chunkwise"}.get(case.scheme, case.scheme)
    start = "cp" if step.startswith("relayout") else f"cp {scheme}"
    return f"{start} {step.replace('<', 'backward')} layer 12"


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_a_range_on_every_rank_and_no_bit_changes(ranks, name):
    assert ranks[0][name][0] == [spelled(CASES[name], step) for step in EXPECTED[name]]
    assert [rank[name][0] for rank in ranks[1:]] == [ranks[0][name][0]] * 3
    assert [rank[name][1] for rank in ranks] == [True] * 4


def made(*_, **__):
    raise AssertionError("made though no profiler is on")


def both_ways(group, cases):
    for case in cases:
        forward, backward = step_of(group, case)
        backward(forward())
        layout = case.plan().layout
        rows = torch.ones(int(layout.row_counts[group.rank]), 2, requires_grad=True)
        cp.gather(rows, layout, group).sum().backward()
    return profiling()


def test_no_name_is_built_without_a_profiler(monkeypatch):
    for where, name in ((communicator, "range_name"), (communicator, "record_function"), (run, "traced_work")):
        monkeypatch.setattr(where, name, made)
    monkeypatch.setattr(communicator.Communicator, "traced", made)
    monkeypatch.setattr(communicator.copy, "copy", made)  # of a communicator, for a chunk
    assert run_ranks(both_ways, 4, list(CASES.values())) == [False] * 4


def test_what_is_entered_without_a_profiler_is_nothing():
    with NO_RANGE:
        pass
    with pytest.raises(ValueError, match="goes through"), NO_RANGE:
        raise ValueError("goes through")


def test_a_profiler_sees_ranks_that_are_threads_only_if_they_started_it():
    with profile() as record:
        assert profiling()
        assert run_ranks(both_ways, 2, [Case("attention", 2, (5, 3), scheme="a2a", **SMALL)]) == [False] * 2
    assert names_in(record) == []
    found, case = {}, Case("gdn", 1, (5, 3), "contiguous", scheme="headwise", **SMALL)
    thread = threading.Thread(target=lambda: found.update(seen(one_rank(), {"gdn": case})))
    thread.start()
    thread.join()
    assert found["gdn"] == ([f"cp headwise {step} layer 12" for step in ALONE], True)


ALONE = ["conv", "gates", "rule", "rule backward", "gates backward", "conv backward"]  # nothing moves on one rank


def one_rank():
    return ThreadGroup.create(1)[0]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_profiler_may_come_or_go_between_forward_and_backward(way):
    case = Case("gdn", 1, (5, 3), "contiguous", scheme="headwise", **SMALL)
    forward, backward = step_of(one_rank(), case)
    expected = backward(forward())
    if way == "forward":
        with profile() as record:
            out = forward()
        results = backward(out)
    else:
        out = forward()
        with profile() as record:
            results = backward(out)
    assert names_in(record) == ([f"cp headwise {step}" for step in ALONE[:3]] if way == "forward" else [])
    assert all(map(torch.equal, results, expected))


def test_gather_has_a_range_forward_and_backward():
    layout, group = cp.Layout.contiguous(cp.Packing([5]), 1), one_rank()
    rows = torch.ones(5, 2, requires_grad=True)
    with profile() as record:
        with layer_scope(3):
            stream = cp.gather(rows, layout, group)
        stream.sum().backward()
    names = ["cp gather", "cp gather wait"]
    assert names_in(record) == [f"{name}{way} layer 3" for way in ("", " backward") for name in names]


def test_what_needs_no_gradient_gets_none_and_results_may_be_written_to():
    x, frozen, weight = torch.ones(3, requires_grad=True), torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
    arrived, made_of = [], []

    def work(*tensors):
        arrived.extend(tensors)
        return [tensors[0] * weight, tensors[1] + 1]

    def range_of(forward):
        made_of.append(forward)
        return torch.profiler.record_function("a range")

    with profile():
        out, untouched = traced_work(work, [x, frozen], range_of)
        assert made_of == [True]
        assert [tensor.requires_grad for tensor in arrived] == [True, False]
        assert not untouched.requires_grad
        out.mul_(3)
        out.sum().backward(retain_graph=True)
        out.sum().backward(retain_graph=True)
    assert made_of == [True, False, False]
    out.sum().backward()
    assert made_of == [True, False, False]
    assert (x.grad.tolist(), weight.grad.tolist()) == ([18.0] * 3, [9.0] * 3)


@pytest.mark.parametrize("grad", [True, False])
def test_work_without_gradients_has_a_range_forward_alone(grad):
    with profile() as record, torch.set_grad_enabled(grad):
        weight = torch.ones(2, requires_grad=True)
        (out,) = traced_work(
            lambda x: [x * weight], [torch.ones(2)], lambda forward: torch.profiler.record_function(f"cp {forward}")
        )
        if grad:
            out.sum().backward()
    assert names_in(record) == ["cp True"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("a2a", "to_heads", "q,k,v", (0, 1), (0, 1), True, 12), "cp a2a to_heads q,k,v layer 12"),
        (("p2p", "attend", "", (0, 1), (1, 4), False, 0), "cp p2p attend stage 2/4 backward layer 0"),
        (("", "gather", "", (1, 2), (0, 1), True, None), "cp gather chunk 2/2"),
        (("p2p", "attend", "", (0, 2), (1, 4), True, None), "cp p2p attend chunk 1/2 stage 2/4"),
    ],
)
def test_a_name_leaves_out_what_is_not_known_and_what_there_is_one_of(given, name):
    scheme, step, what, chunk, stage, forward, layer = given
    assert range_name(scheme, step, what, chunk=chunk, stage=stage, forward=forward, layer=layer) == name


def test_layers_may_lie_in_layers_and_parts_of_ranks_are_of_theirs():
    group = one_rank()
    with layer_scope(1):
        with layer_scope(None):
            assert communicator.Communicator(group).layer is None
        assert communicator.Communicator(group).layer == 1
    assert communicator.Communicator(group).layer is None
    with layer_scope(4):
        comm = communicator.Communicator(ThreadGroup.create(4)[0], scheme="p2p")
    part = comm.chunk_comm(1, 2).part(range(0, 4, 2))
    assert (part.layer, part.chunk, part.scheme) == (4, (1, 2), "p2p")
    assert comm.chunk_comm(0, 1) is comm


def test_torch_compile_compiles_what_stands_around_an_operation_of_a_layer(monkeypatch):
    """The operation is the one break: a context there would leave all that follows it uncompiled."""
    # Threads that leave modes in another order than they entered them leave these flags of torch set for the process,
    # as tests do whose ranks are threads. Up to torch 2.10 nothing is compiled then.
    for flag in ("_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals"):
        monkeypatch.setattr(torch.utils._python_dispatch, flag, False, raising=False)
    operation = no_compile(lambda x: x * 3)

    def layer(x):
        return layer_operation(12, operation)(x + 1) - 1

    with torch.no_grad():
        found = torch._dynamo.explain(layer)(torch.ones(2))
    assert (found.graph_count, found.graph_break_count) == (2, 1), found.break_reasons
