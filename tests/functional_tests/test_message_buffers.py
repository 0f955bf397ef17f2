"""Tests that messages are sent from the group's buffers, which are made in the first step and all free after any."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import megatron_cp as cp
from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.messages import pack_heads
from megatron_cp.executor import head_exchange
from megatron_cp.executor.groups import Pending, RankGroup, ThreadGroup
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.planner.predict.memory import buffer_bytes
from megatron_cp.testing.parity import Case, run_layer
from megatron_cp.testing.poison import poisoned
from tests.covering import covering
from tests.limits import limit
from tests.random_tiles import TILED, assign_at_random

LENGTHS = (7, 1, 130, 64, 2, 31)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Watched(Buffers):
    """Fails where a buffer is given back that is under way, and wipes what it takes back: its views must be dead."""

    def __init__(self):
        super().__init__()
        self.under_way = Counter()

    def release(self, *tensors):
        for tensor in tensors:
            assert not self.under_way[address(tensor)], "a buffer is given back while it is under way"
            if (kept := self._taken.get(address(tensor))) is not None:
                storage = kept.buffer.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(0xFF)
        super().release(*tensors)


class InFlight(Pending):
    """A transfer whose memory must not be used until the wait, as if a network card read it only then."""

    def __init__(self, pending, buffers, sent, received):
        self.pending, self.buffers, self.sent = pending, buffers, sent
        self.copies = [raw(tensor).clone() for tensor in sent]
        self.addresses = [address(tensor) for tensor in (*sent, *received)]
        buffers.under_way.update(self.addresses)

    def wait(self):
        for tensor, copy in zip(self.sent, self.copies, strict=True):
            assert torch.equal(raw(tensor), copy), "what is under way was written"
        self.pending.wait()
        self.buffers.under_way.subtract(self.addresses)
        self.sent, self.copies, self.addresses = [], [], []


def raw(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


class Checking(RankGroup):
    """Fails where something is sent that is in no buffer which the group has taken at the time, or is given back early.

    Exempt is what is set up once a batch, the agreement on plans, which is not part of a step; and `lying`, what a
    kernel left where the exchange would pack it, which so needs no message of its own.
    """

    def __init__(self, inner, lying):
        self.inner, self.rank, self.size, self.buffers = inner, inner.rank, inner.size, Watched()
        self.agreed, self.lying, self.sent = inner.agreed, lying, 0

    def check(self, tensor, call):
        pooled = address(tensor) in self.buffers._taken
        assert pooled or address(tensor) in self.lying, f"{call} sends {tuple(tensor.shape)} from memory of its own"
        self.sent += pooled

    def start_all_to_all(self, received, sent, received_splits, sent_splits, split_counts=None):
        self.check(sent, "all-to-all")
        pending = self.inner.start_all_to_all(received, sent, received_splits, sent_splits)
        return InFlight(pending, self.buffers, [sent], [received])

    def start_all_gather(self, received, sent):
        self.check(sent, "all-gather")
        return InFlight(self.inner.start_all_gather(received, sent), self.buffers, [sent], [received])

    def start_messages(self, sends, receives):
        for message in sends:
            self.check(message.tensor, "a message")
        sent, received = ([message.tensor for message in messages] for messages in (sends, receives))
        return InFlight(self.inner.start_messages(sends, receives), self.buffers, sent, received)

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

    monkeypatch.setattr(head_exchange, "pack_heads", noting)
    return found


def steps(group, step, lying):
    """Runs two steps and returns the bytes of all buffers; the second must take what the first has made."""
    checking = Checking(group, lying)
    buffers = checking.buffers
    with poisoned():  # whoever reads a buffer that was given back may find NaN
        step(checking)
        made = buffers.allocations
        assert not buffers._taken
        step(checking)
    assert checking.sent > 0
    assert not buffers._taken
    assert 0 < made == buffers.allocations
    assert not any(buffers.under_way.values())
    return buffers.size


def assert_steady(size, step, lying):
    return run_ranks(steps, size, step, lying, timeout=limit(120))


def assert_case_is_steady(case, lying):
    """Its buffers also have the size that a formula says, where nothing is staged and no hidden states move besides."""
    plan = case.plan()
    sizes = assert_steady(case.cp, lambda group: run_layer(group, case), lying)
    low, high = (0.99, 1.01) if case.layer == "attention" else (0.85, 1.2) if case.scheme == "headwise" else (0.5, 1.5)
    is_counted = case.transport == "collective" and case.scheme != "redistribute"
    for rank, size in enumerate(sizes if is_counted else ()):
        formula = buffer_bytes(plan, rank, case.dtype.itemsize)
        assert low * formula <= size <= high * formula, (size, formula)


ATTENTION = Case("attention", 3, LENGTHS, heads=12, groups=6, head_dim=8, value_head_dim=12)
LINEAR = Case("gdn", 3, LENGTHS, heads=12, groups=6)
CASES = (
    *(
        replace(ATTENTION, scheme=scheme, layout=layout, dtype=dtype)
        for scheme in (name for name, record in SCHEMES.items() if not record.is_product)
        # Keys of contiguous shares arrive in the order of the stream, and are at hand as they arrive.
        for layout, dtype in (("zigzag", torch.bfloat16), ("contiguous", torch.float32), ("random", torch.float64))
    ),
    *(
        replace(ATTENTION, cp=4, scheme=scheme, layout=layout)
        for scheme in (name for name, record in SCHEMES.items() if record.is_product)
        for layout in ("zigzag", "random")
    ),
    replace(ATTENTION, scheme="a2a", head_chunks=2),
    # Queries and keys come in two messages, whose gradients do not lie as these do; rows of 20 bytes have gaps.
    replace(ATTENTION, scheme="a2a", layout="contiguous", lengths=(7, 1, 40, 13, 2), kv_lengths=(9, 3, 20, 30, 5),
            kv_layout="contiguous", heads=3, groups=3, head_dim=5, value_head_dim=5, dtype=torch.float32),
    *(replace(ATTENTION, scheme=scheme, codec="int8") for scheme in ("a2a", "p2p", "exact", "tiled")),
    replace(ATTENTION, scheme="all_gather", head_chunks=3),
    replace(ATTENTION, scheme="exact", head_chunks=3, layout="random"),
    replace(ATTENTION, cp=4, scheme="a2a+p2p", head_chunks=3, dtype=torch.bfloat16),
    replace(ATTENTION, scheme="p2p", lengths=(1, 1)),  # a rank without tokens
    replace(ATTENTION, scheme="exact", lengths=(1, 1)),
    *(
        replace(ATTENTION, cp=4, scheme=scheme, transport=transport)
        for scheme in SCHEMES
        for transport in ("pairwise", "hierarchical")
    ),
    *(
        replace(LINEAR, layer=layer, scheme=mode, layout=layout, hidden_size=64)
        for layer in ("gdn", "kda", "mamba", "conv1d")
        for mode, layout in (
            ("headwise", "zigzag"), ("headwise", "contiguous"), ("redistribute", "zigzag"),
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
)  # fmt: skip


def features(case):
    """Returns the features that a selection of cases should cover."""
    changes = case.head_chunks, case.codec, case.lengths, case.kv_lengths
    return case.layer, case.scheme, case.layout, case.dtype, case.transport, changes


@pytest.mark.filterwarnings("ignore:.*compute nothing here.*:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.few(of=features)
def test_layers_send_from_buffers_that_the_first_step_made(case, lying, monkeypatch):
    assign_at_random(monkeypatch)  # each rank plans in each step: a search for tiles would take most of the time
    assert_case_is_steady(case, lying)


@pytest.mark.parametrize("transport", ["collective", "pairwise", "hierarchical"])
@pytest.mark.parametrize("scheme", TILED)
@pytest.mark.few
def test_assigned_tiles_send_head_chunks_from_buffers(scheme, transport, lying, monkeypatch):
    assign_at_random(monkeypatch)
    case = replace(ATTENTION, cp=4, scheme=scheme, head_chunks=3, transport=transport, dtype=torch.bfloat16)
    assert case.plan().attend.moves_queries(forward=False)
    assert_case_is_steady(case, lying)


PACKING = cp.Packing(LENGTHS)


@pytest.mark.parametrize(
    ("shape", "dtype", "transport"),
    covering(((), (5,), (2, 3)), (torch.bfloat16, torch.float64), ("collective", "pairwise", "hierarchical")),
    ids=str,
)
@pytest.mark.few
def test_rows_that_only_move_are_sent_from_buffers(shape, dtype, transport, lying):
    source, target = cp.Layout.zigzag(PACKING, 4, align=4), cp.Layout.contiguous(PACKING, 4)
    by = cp.Transport.even_hosts(transport, 4, 2)

    def step(group):
        local = torch.ones(source.row_counts[group.rank], *shape, dtype=dtype, requires_grad=True)
        moved = cp.relayout(local, source, target, group, transport=by)
        stream = cp.gather(local, source, group, transport=by)
        torch.autograd.backward([moved, stream], [torch.ones_like(moved), torch.ones_like(stream)])
        assert bool((moved[: target.token_counts[group.rank]] == 1).all())
        assert bool((stream == 1).all())
        assert bool((local.grad[: source.token_counts[group.rank]] == 1 + group.size).all())

    assert_steady(4, step, lying)


def test_layers_that_take_turns_share_buffers(lying):
    """A step has several layers and a loss, as a model does."""
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


def test_fresh_memory_is_noticed():
    def step(group):
        shares = [0] * group.size
        group.all_to_all(torch.empty(0), torch.empty(0), shares, shares)

    with pytest.raises(RankError, match="memory of its own"):
        assert_steady(2, step, {})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_code_shares_buffers_of_several_sizes():
    """A compiler that looked into the pool would take a buffer's size, when it first saw it, for its size for ever."""
    layout, other = cp.Layout.zigzag(PACKING, 1), cp.Layout.contiguous(PACKING, 1)
    (group,) = ThreadGroup.create(1)

    def gathered(x):
        return cp.gather(x * 2, layout, group) + 1

    def moved(x):
        return cp.relayout(x * 2, layout, other, group) + 1

    for function, width, dtype in (
        (gathered, 8, torch.float32), (moved, 8, torch.float64), (gathered, 5, torch.float64), (moved, 7, torch.float32)
    ):  # fmt: skip
        x = torch.randn(PACKING.total, width, dtype=dtype, requires_grad=True)
        expected = function(x)
        compiled = torch.compile(function, backend="aot_eager")(x)
        compiled.sum().backward()
        assert torch.equal(compiled, expected)
        assert bool((x.grad == 2).all())
