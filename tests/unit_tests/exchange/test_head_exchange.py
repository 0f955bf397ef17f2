"""The head exchange between ranks, against slices of the full tensors, for ragged layouts and any partition of heads.

All values are exact (whole numbers where sums are taken), so every comparison is for equality. Every uninitialised
tensor is filled with NaN, and so are pad rows: what equals the expected numbers was never computed from either.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.errors import ArgumentError
from megatron_cp.exchange import messages
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.head_exchange import to_heads, to_tokens
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.counting_group import CountingGroup
from tests.drawing import drawn
from tests.refusals import rejects

NAN = float("nan")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FEW, MANY = 30, 100  # cases of each test


pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


@pytest.fixture(autouse=True, scope="module")
def few_rows_at_a_time():
    """Else nothing here were large enough to be cut in turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "_CUT_AT_A_TIME", 200)
        yield


@st.composite
def layouts(draw) -> Layout:
    packing = Packing(draw(st.lists(st.integers(0, 1) | st.integers(2, 23), min_size=1, max_size=5)))
    cp_size, align = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "fragments"]))
    if kind != "fragments":
        return getattr(Layout, kind)(packing, cp_size, align=align)
    cuts = sorted({0, packing.total, *draw(st.lists(st.integers(0, packing.total), max_size=8))})
    fragments = draw(st.permutations(list(itertools.pairwise(cuts))))
    holders = draw(st.lists(st.integers(0, cp_size - 1), min_size=len(fragments), max_size=len(fragments)))
    assigned = [[fragment for fragment, holder in zip(fragments, holders, strict=True) if holder == rank]
             for rank in range(cp_size)]  # fmt: skip
    return Layout.from_fragments(packing, assigned, align=align)


@st.composite
def head_ranges(draw, num_heads: int, cp_size: int) -> tuple[tuple[int, int], ...]:
    """Draws any ranges that `Sections` allows: uneven, empty, overlapping their neighbours."""
    ranges, before = [], (0, 0)
    for rank in range(cp_size):
        lo = draw(st.integers(*before))
        hi = num_heads if rank == cp_size - 1 else draw(st.integers(before[1], num_heads))
        before = (lo, hi)
        ranges.append(before)
    return tuple(ranges)


@st.composite
def sections(draw, cp_size: int) -> Sections:
    groups, per_group = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    partition = partition_heads(groups * per_group, groups, cp_size)
    others = draw(st.integers(1, 5))
    return Sections((
        Section("q", groups * per_group, draw(st.integers(1, 5)), partition.heads),
        Section("k", groups, draw(st.integers(1, 5)), partition.groups),
        Section("beta", groups * per_group, 1, partition.heads),
        Section("any", others, draw(st.integers(1, 9)), draw(head_ranges(others, cp_size))),
    ))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    exchange: Exchange
    batch: int | None  # None: THD
    dtypes: tuple[torch.dtype, ...]  # of each section
    fused: tuple[bool, ...]  # does the section share a tensor with the one before it?
    stride: str  # how the token side's tensors lie in memory

    @property
    def layout(self) -> Layout:
        return self.exchange.layout

    @property
    def blocks(self) -> tuple[Section, ...]:
        return self.exchange.sections.blocks

    @property
    def cp_size(self) -> int:
        return self.layout.cp_size

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.layout.packing.total,) if self.batch is None else (self.layout.packing.total, self.batch)

    def held(self, rank: int) -> torch.Tensor:
        return torch.tensor(self.layout.tokens(rank))

    def token_side(self, full: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's input rows of the full `[T, (b,) h, d]` sections: pad rows NaN, neighbours of its columns NaN."""
        rows = [section[self.held(rank)].flatten(-2) for section in full]
        tensors: list[list[torch.Tensor]] = []
        for columns, joined in zip(rows, self.fused, strict=True):
            if not joined:
                tensors.append([])
            tensors[-1].append(columns)
        return [self._laid_out(torch.cat(parts, -1), int(self.layout.pad_rows[rank])) for parts in tensors]

    def _laid_out(self, tensor: torch.Tensor, pad: int) -> torch.Tensor:
        padded = torch.cat([tensor, tensor.new_full((pad, *tensor.shape[1:]), NAN)])
        if self.stride == "transposed":
            return padded.transpose(0, -1).contiguous().transpose(0, -1)
        if self.stride == "sliced":
            wide = padded.new_full((*padded.shape[:-1], padded.shape[-1] + 3), NAN)
            wide[..., 1:-2] = padded
            return wide[..., 1:-2]
        return padded

    def heads(self, full: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Returns a rank's values on the head side."""
        return [section[..., slice(*block.ranges[rank]), :] for section, block in zip(full, self.blocks, strict=True)]

    def summed(self, head_side: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """`[T, (b,) h, d]` sums over the ranks that hold each head of what every rank has for its heads."""
        totals = self.whole_numbers(0, 0)
        for rank, sections_ in enumerate(head_side):
            for total, own in zip(self.heads(totals, rank), sections_, strict=True):
                total.add_(own)
        return totals

    def normal(self, seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return [torch.randn(*self.lead, b.num_heads, b.head_dim, generator=draw, dtype=torch.float64).to(dtype)
                for b, dtype in zip(self.blocks, self.dtypes, strict=True)]  # fmt: skip

    def whole_numbers(self, seed: int, largest: int = 9) -> list[torch.Tensor]:
        """Small enough that no sum here rounds, in any of the types."""
        draw = torch.Generator().manual_seed(seed)
        return [
            torch.randint(-largest, largest + 1, (*self.lead, b.num_heads, b.head_dim), generator=draw).to(dtype)
            for b, dtype in zip(self.blocks, self.dtypes, strict=True)
        ]


@st.composite
def cases(draw) -> Case:
    layout = draw(layouts())
    exchange = Exchange(layout, draw(sections(layout.cp_size)), section_major=draw(st.booleans()))
    dtypes, fused = [draw(st.sampled_from(DTYPES))], [False]
    for _ in exchange.sections.blocks[1:]:
        fused.append(draw(st.booleans()))
        dtypes.append(dtypes[-1] if fused[-1] else draw(st.sampled_from(DTYPES)))
    batch = draw(st.none() | st.integers(1, 3))
    stride = draw(st.sampled_from(["contiguous", "sliced", "transposed"]))
    return Case(exchange, batch, tuple(dtypes), tuple(fused), stride)


of_drawn_cases = drawn(FEW, MANY, cases())


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    assert [x.shape for x in got] == [x.shape for x in expected]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))  # also false where a is NaN


@of_drawn_cases
def test_to_heads_slices_the_heads_of_the_full_stream(case: Case):
    full = case.normal(0)
    got = run_ranks(lambda group: to_heads(case.exchange, group, *case.token_side(full, group.rank)), case.cp_size)
    for rank in range(case.cp_size):
        assert_same(got[rank], case.heads(full, rank))


@of_drawn_cases
def test_gradient_of_to_heads_sums_over_the_ranks_that_hold_a_head(case: Case):
    full = case.normal(0)
    gradients = [case.heads(case.whole_numbers(1 + rank), rank) for rank in range(case.cp_size)]

    def rank_main(group: RankGroup) -> list[torch.Tensor]:
        leaves = [x.requires_grad_() for x in case.token_side(full, group.rank)]
        torch.autograd.backward(to_heads(case.exchange, group, *leaves), gradients[group.rank])
        return [leaf.grad for leaf in leaves]

    expected = case.summed(gradients)
    for rank, got in enumerate(run_ranks(rank_main, case.cp_size)):
        wanted = case.token_side(expected, rank)
        assert_same(got, [x.nan_to_num(nan=0.0) for x in wanted])  # pad rows have no gradient


@of_drawn_cases
def test_to_tokens_sums_over_the_ranks_that_hold_a_head_and_zeroes_pad_rows(case: Case):
    case = dataclasses.replace(case, fused=(False,) * 4, stride="contiguous")
    own = [case.heads(case.whole_numbers(1 + rank), rank) for rank in range(case.cp_size)]
    got = run_ranks(lambda group: to_tokens(case.exchange, group, *own[group.rank]), case.cp_size)
    for rank in range(case.cp_size):
        assert_same(got[rank], [x.nan_to_num(nan=0.0) for x in case.token_side(case.summed(own), rank)])


@of_drawn_cases
def test_gradient_of_to_tokens_is_to_heads_and_ignores_pad_rows(case: Case):
    case = dataclasses.replace(case, fused=(False,) * 4)
    inputs, gradient = case.normal(0), case.normal(1)

    def rank_main(group: RankGroup) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in case.heads(inputs, group.rank)]
        outputs = to_tokens(case.exchange, group, *leaves)
        torch.autograd.backward(outputs, case.token_side(gradient, group.rank))
        return [leaf.grad for leaf in leaves]

    for rank, got in enumerate(run_ranks(rank_main, case.cp_size)):
        assert_same(got, case.heads(gradient, rank))


def test_the_drawn_cases_reach_what_they_are_for():
    seen: Counter[str] = Counter()

    @given(cases())
    @settings(max_examples=300)  # twice as many as the tests above draw together: rare cases are in some of them
    def look(case: Case) -> None:
        layout, q = case.layout, case.blocks[0]
        seen.update({
            "heads on more than two ranks": max(
                sum(lo <= head < hi for lo, hi in b.ranges) for b in case.blocks for head in range(b.num_heads)
            ) > 2,
            "ranks without heads": any(hi == lo for lo, hi in q.ranges),
            "uneven heads": len({q.heads_on(rank) for rank in range(case.cp_size)}) > 1,
            "ranks without tokens": bool((layout.token_counts == 0).any()),
            "pad rows": bool(layout.pad_rows.any()),
            "no tokens at all": layout.packing.total == 0,
            "one rank, shuffled": case.cp_size == 1 and not layout.in_stream_order,
            "one rank, in order": case.exchange.is_local,
            "mixed types in one message": case.cp_size > 1 and len(set(case.dtypes)) > 1,
            "everything fused": all(case.fused[1:]),
            "columns of several ranks in one copy": any(
                columns.num_ranks > 1 for columns in case.exchange.sections.row_format([2] * 4).head_copies
            ),
        })  # fmt: skip

    look()
    missing = [name for name, count in seen.items() if count == 0]
    assert not missing


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=["bfloat16", "float16"]
)
def test_short_gradients_of_a_shared_head_are_summed_in_fp32(dtype: torch.dtype, large: float):
    ranks = 5
    layout = Layout.contiguous(Packing([3, 1, 7]), ranks)
    exchange = Exchange(layout, Sections((Section("k", 1, 2, ((0, 1),) * ranks),)))
    contributions = [large, 1.0, 1.0, 1.0, 1.0]
    running = torch.zeros((), dtype=dtype)
    for value in contributions:
        running += value
    assert running == large  # in the short type the ones are lost

    def rank_main(group: RankGroup) -> torch.Tensor:
        (out,) = to_tokens(exchange, group, torch.full((11, 1, 2), contributions[group.rank], dtype=dtype))
        return out

    for out in run_ranks(rank_main, ranks):
        assert out.dtype == dtype
        assert (out == large + 4).all()


def _qkv(cp_size: int) -> Sections:
    partition = partition_heads(6, 2, cp_size)
    return Sections(
        (
            Section("q", 6, 4, partition.heads),
            Section("k", 2, 4, partition.groups),
            Section("v", 2, 3, partition.groups),
        )
    )


def _round_trip_calls(layout: Layout) -> list[list[Counter[str]]]:
    """Returns, for each rank, the calls in each direction forward, and in both directions backward."""
    exchange = Exchange(layout, _qkv(layout.cp_size))

    def rank_main(inner: RankGroup) -> list[Counter[str]]:
        group = CountingGroup(inner)
        rows = int(layout.row_counts[group.rank])
        tensors = [torch.ones(rows, block.width, requires_grad=True) for block in exchange.sections.blocks]
        calls = []
        on_heads = to_heads(exchange, group, *tensors)
        calls.append(group.calls)
        group.calls = Counter()
        on_tokens = to_tokens(exchange, group, *on_heads)
        calls.append(group.calls)
        group.calls = Counter()
        sum(x.sum() for x in on_tokens).backward()
        return [*calls, group.calls]

    return run_ranks(rank_main, layout.cp_size)


PACKING = Packing([7, 1, 13, 0, 2])


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_each_direction_is_one_all_to_all(kind: str, cp_size: int):
    once = Counter(all_to_all=1)
    calls = _round_trip_calls(getattr(Layout, kind)(PACKING, cp_size))
    assert calls == [[once, once, Counter(all_to_all=2)]] * cp_size


def test_one_rank_in_stream_order_sends_and_copies_nothing():
    assert _round_trip_calls(Layout.contiguous(PACKING, 1)) == [[Counter()] * 3]
    fused = torch.ones(PACKING.total, _qkv(1).width)
    group = ThreadGroup.create(1)[0]
    exchange = Exchange(Layout.contiguous(PACKING, 1), _qkv(1))
    on_heads = to_heads(exchange, group, fused)
    assert {x.untyped_storage().data_ptr() for x in on_heads} == {fused.untyped_storage().data_ptr()}


@pytest.mark.parametrize("align", [1, 4])
def test_one_rank_with_shuffled_tokens_gets_stream_order(align: int):
    layout = Layout.from_fragments(PACKING, [[(9, 23), (0, 9)]], align=align)
    exchange = Exchange(layout, Sections((Section("x", 2, 1, ((0, 2),)),)))
    stream = torch.randn(PACKING.total, 2)
    group = ThreadGroup.create(1)[0]
    (on_heads,) = to_heads(exchange, group, layout.shard(stream, 0))
    (on_tokens,) = to_tokens(exchange, group, on_heads)
    assert torch.equal(on_heads, stream.view(-1, 2, 1))
    assert torch.equal(on_tokens, layout.shard(stream, 0))


@pytest.mark.parametrize("to_head_side", [True, False], ids=["to_heads", "to_tokens"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_bytes_sent_are_the_bytes_that_travel(kind: str, to_head_side: bool):
    layout = getattr(Layout, kind)(PACKING, 3)
    exchange = Exchange(layout, _qkv(3))

    def rank_main(inner: RankGroup) -> int:
        group = CountingGroup(inner)
        if to_head_side:
            to_heads(exchange, group, torch.ones(int(layout.row_counts[group.rank]), exchange.sections.width))
        else:
            heads = [(b.heads_on(group.rank), b.head_dim) for b in exchange.sections.blocks]
            to_tokens(exchange, group, *(torch.ones(PACKING.total, h, d) for h, d in heads))
        return group.bytes_sent

    assert run_ranks(rank_main, 3) == exchange.bytes_sent(4, to_heads=to_head_side)


@pytest.mark.parametrize("to_head_side", [True, False], ids=["to_heads", "to_tokens"])
def test_rejects_second_derivatives(to_head_side: bool):
    """They would leave out, without a word, whatever passes through the exchange."""
    layout = Layout.contiguous(PACKING, 2)
    exchange = Exchange(layout, Sections((Section("x", 2, 3, ((0, 1), (1, 2))),)))

    def rank_main(group: RankGroup) -> None:
        move, shape = (to_heads, (int(layout.row_counts[group.rank]), 6)) if to_head_side else (to_tokens, (23, 1, 3))
        x = torch.ones(shape, requires_grad=True)
        loss = move(exchange, group, x)[0].square().sum()
        with pytest.raises(ArgumentError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)

    run_ranks(rank_main, 2)


ROWS, WIDTH = 12, 6 * 4 + 2 * 4 + 2 * 3  # rank 0 of 2


def _refused(*shapes: tuple[int, ...]) -> str:
    group = ThreadGroup.create(2, timeout=1.0)[0]
    with pytest.raises(ArgumentError) as caught:
        to_heads(Exchange(Layout.zigzag(PACKING, 2), _qkv(2)), group, *(torch.ones(shape) for shape in shapes))
    return caught.value.argument


def test_rejects_wrong_rows():
    assert _refused((ROWS + 1, WIDTH)) == "tensors[0]"
    assert _refused((ROWS, 24), (ROWS - 1, 14)) == "tensors[1]"
    assert _refused((ROWS, 2, 24), (ROWS, 3, 14)) == "tensors[1]"


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1, 1, WIDTH)], ids=["1 axis", "4 axes"])
def test_rejects_wrong_number_of_axes(shape: tuple[int, ...]):
    assert _refused(shape) == "tensors[0]"


@pytest.mark.parametrize(
    "widths",
    [(WIDTH - 1,), (WIDTH + 1,), (24, 8), (24, 8, 6, 1), (23, 9, 6), (24, 14, 24)],
    ids=lambda widths: "+".join(map(str, widths)),
)
def test_rejects_wrong_features(widths: tuple[int, ...]):
    assert _refused(*((ROWS, width) for width in widths)) == "tensors"


@pytest.mark.parametrize(
    "wrong", [(22, 1, 4), (23, 2, 4), (23, 1, 5), (23, 4), (23, 1, 1, 4)], ids=lambda shape: "x".join(map(str, shape))
)
def test_rejects_wrong_heads(wrong: tuple[int, ...]):
    group = ThreadGroup.create(2, timeout=1.0)[0]
    shapes = [(23, 3, 4), wrong, (23, 1, 3)]
    with pytest.raises(ArgumentError, match=r"^section 'k': got "):
        to_tokens(Exchange(Layout.zigzag(PACKING, 2), _qkv(2)), group, *(torch.ones(shape) for shape in shapes))


def test_rejects_heads_assigned_to_another_number_of_ranks():
    rejects(r"^sections: got ", Exchange, Layout.contiguous(PACKING, 3), _qkv(2))
