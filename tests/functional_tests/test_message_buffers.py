"""What is sent is sent from the group's buffers: they are made in the first step, and none is taken after any."""

from dataclasses import replace

import pytest
import torch

import megatron_cp as cp
from megatron_cp.exchange.pack import pack_heads
from megatron_cp.executor import exchange
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned

LENGTHS = (7, 1, 130, 64, 2, 31)
STEPS = 3


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Checking(RankGroup):
    """Fails where something is sent that is in no buffer which the group has taken at the time.

    Exempt is what is set up once a batch, the agreement on plans, which is not part of a step; and `lying`, what a
    kernel left where the exchange would pack it, which so needs no message of its own.
    """

    def __init__(self, inner, lying):
        self.inner, self.rank, self.size, self.buffers = inner, inner.rank, inner.size, inner.buffers
        self.lying, self.sent = lying, 0

    def check(self, tensor, call):
        pooled = address(tensor) in self.buffers._taken
        assert pooled or address(tensor) in self.lying, f"{call} sends {tuple(tensor.shape)} from memory of its own"
        self.sent += pooled

    def start_all_to_all(self, received, sent, received_splits, sent_splits):
        self.check(sent, "all-to-all")
        return self.inner.start_all_to_all(received, sent, received_splits, sent_splits)

    def start_all_gather(self, received, sent):
        self.check(sent, "all-gather")
        return self.inner.start_all_gather(received, sent)

    def start_messages(self, sends, receives):
        for message in sends:
            self.check(message.tensor, "a message")
        return self.inner.start_messages(sends, receives)

    def barrier(self):
        self.inner.barrier()

    def host_all_gather(self, received, sent):
        self.inner.host_all_gather(received, sent)


@pytest.fixture
def lying(monkeypatch):
    """The addresses of messages that are the tensors which were to be packed, as they lie. They live while noted."""
    found = {}

    def noting(sections, at, buffers):
        message = pack_heads(sections, at, buffers)
        if any(section.numel() and address(section) == address(message) for section in sections):
            found[address(message)] = message
        return message

    monkeypatch.setattr(exchange, "pack_heads", noting)
    return found


def steps(group, step, lying):
    """What each step left taken, how many buffers there are after it, and the tensors that were sent from some."""
    checking, taken, made = Checking(group, lying), [], []
    with poisoned():  # whoever reads a buffer that was given back may find NaN
        for _ in range(STEPS):
            step(checking)
            taken.append(len(group.buffers._taken))
            made.append(group.buffers.allocations)
    return taken, made, checking.sent


def assert_steady(size, step, lying):
    for taken, made, sent in run_ranks(steps, size, step, lying):
        assert sent > 0
        assert taken == [0] * STEPS
        assert 0 < made[0] == made[-1]


ATTENTION = Case("attention", 3, LENGTHS, heads=12, groups=6, head_dim=8, value_head_dim=12)
LINEAR = Case("gdn", 3, LENGTHS, heads=12, groups=6, head_dim=8, value_head_dim=12)
CASES = {
    f"{case} over {case.nodes} hosts" if case.transport == "hierarchical" else f"{case}": case
    for case in (
        *(
            replace(ATTENTION, scheme=scheme, layout=layout, dtype=dtype)
            for scheme in ("a2a", "p2p", "all_gather", "exact")
            # Keys of contiguous shares arrive in the order of the stream, and are at hand as they arrive.
            for layout, dtype in (("zigzag", torch.bfloat16), ("contiguous", torch.float32), ("random", torch.float64))
        ),
        *(
            replace(ATTENTION, cp=4, scheme=scheme, layout=layout)
            for scheme in ("a2a+p2p", "a2a+all_gather")
            for layout in ("zigzag", "random")
        ),
        replace(ATTENTION, scheme="a2a", head_chunks=2),
        replace(ATTENTION, scheme="a2a", codec="int8"),
        replace(ATTENTION, scheme="all_gather", head_chunks=3),
        replace(ATTENTION, scheme="exact", head_chunks=3, layout="random"),
        replace(ATTENTION, cp=4, scheme="a2a+p2p", head_chunks=3, dtype=torch.bfloat16),
        replace(ATTENTION, scheme="p2p", lengths=(1, 1)),  # a rank without tokens
        replace(ATTENTION, scheme="exact", lengths=(1, 1)),
        *(
            replace(ATTENTION, cp=4, scheme=scheme, transport=transport)
            for scheme in ("a2a", "p2p", "all_gather", "exact", "a2a+p2p", "a2a+all_gather")
            for transport in ("pairwise", "hierarchical")
        ),
        *(
            replace(LINEAR, layer=layer, scheme=mode, layout=layout, hidden_size=64)
            for layer in ("gdn", "kda", "mamba", "conv1d")
            for mode, layout in (
                ("headwise", "zigzag"), ("headwise", "contiguous"), ("relay", "zigzag"),
                ("chunkwise", "zigzag"), ("chunkwise", "contiguous"),
            )
        ),
        replace(LINEAR, scheme="headwise", head_chunks=2),
        replace(LINEAR, scheme="chunkwise", lengths=(2,)),
        *(
            replace(LINEAR, cp=4, layer=layer, scheme=mode, transport=transport)
            for layer, mode in (("mamba", "headwise"), ("gdn", "chunkwise"))
            for transport in ("pairwise", "hierarchical")
        ),
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_layers_send_from_buffers_that_the_first_step_made(name, lying):
    assert_steady(CASES[name].cp, lambda group: run_layer(group, CASES[name]), lying)


PACKING = cp.Packing(LENGTHS)
SHAPES = [(), (5,), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_relayout_sends_from_buffers(shape, dtype, lying):
    source, target = cp.Layout.zigzag(PACKING, 4, align=4), cp.Layout.contiguous(PACKING, 4)

    def step(group):
        local = torch.ones(source.row_counts[group.rank], *shape, dtype=dtype, requires_grad=True)
        moved = cp.relayout(local, source, target, group)
        moved.backward(torch.ones_like(moved))
        held = source.token_counts[group.rank]
        assert bool((moved[: target.token_counts[group.rank]] == 1).all())
        assert bool((local.grad[:held] == 1).all())

    assert_steady(4, step, lying)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gather_sends_from_buffers(shape, dtype, lying):
    layout = cp.Layout.zigzag(PACKING, 3, align=4)

    def step(group):
        local = torch.ones(layout.row_counts[group.rank], *shape, dtype=dtype, requires_grad=True)
        stream = cp.gather(local, layout, group)
        stream.backward(torch.ones_like(stream))
        assert bool((stream == 1).all())
        assert bool((local.grad[: layout.token_counts[group.rank]] == group.size).all())

    assert_steady(3, step, lying)


def test_layers_that_take_turns_share_buffers(lying):
    """As in a model: several layers and a loss, in one step."""
    cases = [replace(ATTENTION, scheme="p2p"), replace(ATTENTION, scheme="a2a"), replace(LINEAR, scheme="chunkwise")]
    layout = cp.Layout.zigzag(PACKING, 3)

    def step(group):
        for case in (*cases, *cases[::-1]):
            out = run_layer(group, case)["out"]
        cp.gather(out, layout, group)

    assert_steady(3, step, lying)


def test_evaluation_leaves_nothing_taken(lying):
    """No backward will come."""
    case = replace(LINEAR, scheme="chunkwise")
    plan = case.plan()
    x = torch.ones(int(plan.layout.row_counts.max()), 12)
    conv = cp.plan_linear(PACKING, plan.layout, "conv1d", channels=12, mode="chunkwise")
    attention = replace(ATTENTION, scheme="all_gather", head_chunks=2).plan()

    def step(group):
        rows = int(plan.layout.row_counts[group.rank])
        q, kv = torch.ones(rows, 12, 8), torch.ones(rows, 6, 12)
        with torch.inference_mode():
            cp.causal_conv1d(x[:rows], torch.ones(12, 4), None, conv, group)
            cp.attention(q, kv[..., :8], kv, attention, group)

    assert_steady(3, step, lying)


# -- the checks --------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_noticed():
    def step(group):
        shares = [0] * group.size
        group.all_to_all(torch.empty(0), torch.empty(0), shares, shares)

    with pytest.raises(RankError, match="memory of its own"):
        assert_steady(2, step, {})
