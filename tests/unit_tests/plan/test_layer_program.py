"""Every rank's forward, and autograd's backward, are the plan's two programs, instruction for instruction."""

import threading
from collections import defaultdict
from dataclasses import replace

import pytest

from megatron_cp.executor import halo, head_exchange, scan
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.layer_program import Local, Move, Project
from megatron_cp.softmax import on_rank
from megatron_cp.softmax.attention import projected_attention
from megatron_cp.testing.parity import Case, draw, run_layer

LENGTHS = (7, 1, 40, 13)
ATTENTION = Case("attention", 4, LENGTHS, heads=16, groups=16, head_dim=4, value_head_dim=4)
LINEAR = Case("gdn", 2, LENGTHS, heads=6, groups=6, head_dim=4, value_head_dim=4, scheme="headwise", hidden_size=16)
CASES = {
    "a2a": replace(ATTENTION, scheme="a2a"),
    "a2a in chunks": replace(ATTENTION, scheme="a2a", head_chunks=4),
    "a2a, keys apart": replace(ATTENTION, scheme="a2a", head_chunks=2, kv_lengths=(9, 3, 20, 1)),
    "a2a+p2p in chunks": replace(ATTENTION, scheme="a2a+p2p", head_chunks=2),
    "a2a+exact": replace(ATTENTION, scheme="a2a+exact"),
    "p2p": replace(ATTENTION, scheme="p2p"),
    "headwise": LINEAR,
    "headwise in chunks": replace(LINEAR, head_chunks=3),
    "chunkwise": replace(LINEAR, scheme="chunkwise"),
    "chunkwise, one rank": replace(LINEAR, scheme="chunkwise", cp=1),
    "headwise, one rank": replace(LINEAR, cp=1),
    "convolution alone": replace(LINEAR, layer="conv1d", scheme="chunkwise"),
}


def expected(plan, *, projected=False):
    """Returns the instructions of both directions, without the steps that compute for a linear layer."""
    found = []
    for forward in (True, False):
        for do in plan.program(forward=forward, projected=projected):
            match do:
                case Project(chunk):
                    found.append(("project", chunk))
                case Local(steps):
                    found += [type(step).__name__ for step in steps if type(step).__name__ != "Compute"]
                case Move(step, to_heads, starts, parts) if not step.exchange.is_local:
                    names = [block.name for block in step.exchange.sections.blocks]
                    # What is projected of a chunk travels by itself.
                    alone = projected and names[0] != "out"
                    found.append((to_heads, starts, names, [0] if alone else list(parts)))
    return found


@pytest.fixture
def events(monkeypatch):
    """Records what each rank does, by its thread."""
    found = defaultdict(list)

    def note(owner, name, describe):
        original = getattr(owner, name)

        def noted(*args, **options):
            found[threading.get_ident()].append(describe(*args))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    def move(*, starts):
        def describe(in_flight, to_heads, parts, *_):
            blocks = in_flight.at[True].exchange.sections.blocks
            return to_heads, starts, [block.name for block in blocks], list(parts)

        return describe

    note(head_exchange.InFlightExchange, "start", move(starts=True))
    note(head_exchange.InFlightExchange, "finish", move(starts=False))
    note(on_rank, "attend", lambda *_: "Attend")
    note(on_rank, "attend_backward", lambda *_: "Attend")
    note(halo.InFlightHalo, "start", lambda *_: "Halo")
    note(scan._Maps, "fold", lambda *_: "Scan")
    return found


@pytest.mark.parametrize("name", CASES)
def test_forward_and_autograd_follow_the_programs(name, events):
    case = CASES[name]

    def rank_main(group):
        run_layer(group, case)
        return events[threading.get_ident()]

    assert run_ranks(rank_main, case.cp) == [expected(case.plan())] * case.cp


@pytest.mark.parametrize("name", ["a2a", "a2a in chunks", "a2a, keys apart", "a2a+p2p in chunks", "p2p"])
def test_chunks_are_projected_while_earlier_ones_travel(name, events):
    case = CASES[name]
    plan, problem = case.plan(), draw(case)
    layouts = plan.layout, plan.kv_layout, plan.kv_layout

    def rank_main(group):
        found, chunks = events[threading.get_ident()], iter(range(plan.head_chunks))
        tensors = [
            layout.shard(x, group.rank).requires_grad_()
            for layout, x in zip(layouts, problem.inputs.values(), strict=True)
        ]

        def project(heads, groups):
            chunk = next(chunks)
            found.append(("project", chunk))
            made = [x[:, numbers] * 2 for x, numbers in zip(tensors, (heads, groups, groups), strict=True)]
            made[0].register_hook(lambda _: found.append(("project", chunk)))
            return made

        out = projected_attention(project, plan, group)
        out.backward(plan.layout.shard(problem.output_gradient, group.rank))
        return found

    assert run_ranks(rank_main, case.cp) == [expected(plan, projected=True)] * case.cp
