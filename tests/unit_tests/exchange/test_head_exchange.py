"""The head exchange between ranks, against slices of the full tensors, for ragged layouts and any partition of heads.

All values are exact (whole numbers where sums are taken), so every comparison is for equality. Every uninitialised
tensor is filled with NaN, and so are pad rows: what equals the expected numbers was never computed from either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import Section, Sections, partition_heads
from megatron_cp.executor.groups import RankGroup, ThreadGroup
from megatron_cp.executor.head_exchange import to_heads, to_tokens
from megatron_cp.executor.launch import run_ranks
from megatron_cp.layout import Layout, Packing
from tests.counting_group import CountingGroup
from tests.drawing import drawn
from tests.fuzz_cases import LAYOUTS, layout_named
from tests.refusals import rejects

NAN = float("nan")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FEW, MANY = 30, 100  # cases of each test


pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


@st.composite
def layouts(draw) -> Layout:
    packing = Packing(draw(st.lists(st.integers(0, 1) | st.integers(2, 23), min_size=1, max_size=5)))
    name, cp_size = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8))
    return layout_named(name, packing, cp_size, align=draw(st.integers(1, 4)), seed=draw(st.integers(0, 99)))


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
    exchange = Exchange(layout, draw(sections(layout.cp_size)))
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
def test_to_heads_slices_the_full_stream_and_its_gradient_sums_over_the_ranks_that_hold_a_head(case: Case):
    full = case.normal(0)
    gradients = [case.heads(case.whole_numbers(1 + rank), rank) for rank in range(case.cp_size)]

    def rank_main(group: RankGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.requires_grad_() for x in case.token_side(full, group.rank)]
        outputs = to_heads(case.exchange, group, *leaves)
        torch.autograd.backward(outputs, gradients[group.rank])
        return [x.detach() for x in outputs], [leaf.grad for leaf in leaves]

    expected = case.summed(gradients)
    for rank, (outputs, got) in enumerate(run_ranks(rank_main, case.cp_size)):
        assert_same(outputs, case.heads(full, rank))
        wanted = case.token_side(expected, rank)
        assert_same(got, [x.nan_to_num(nan=0.0) for x in wanted])  # pad rows have no gradient


@of_drawn_cases
def test_to_tokens_sums_over_the_ranks_that_hold_a_head_and_its_gradient_is_to_heads(case: Case):
    """Its pad rows are zero, and those of its gradient are ignored."""
    case = dataclasses.replace(case, fused=(False,) * 4)
    own = [case.heads(case.whole_numbers(1 + rank), rank) for rank in range(case.cp_size)]
    dense, gradient = dataclasses.replace(case, stride="contiguous"), case.normal(1)

    def rank_main(group: RankGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_() for x in own[group.rank]]
        outputs = to_tokens(case.exchange, group, *leaves)
        torch.autograd.backward(outputs, case.token_side(gradient, group.rank))
        return [x.detach() for x in outputs], [leaf.grad for leaf in leaves]

    for rank, (outputs, got) in enumerate(run_ranks(rank_main, case.cp_size)):
        assert_same(outputs, [x.nan_to_num(nan=0.0) for x in dense.token_side(case.summed(own), rank)])
        assert_same(got, case.heads(gradient, rank))


PACKING = Packing([7, 1, 13, 0, 2])


def of_qkv(cp_size: int) -> Exchange:
    partition = partition_heads(6, 2, cp_size)
    sizes = {"q": (6, 4, partition.heads), "k": (2, 4, partition.groups), "v": (2, 3, partition.groups)}
    return Exchange(Layout.zigzag(PACKING, cp_size), Sections(tuple(Section(n, *each) for n, each in sizes.items())))


def test_one_rank_in_stream_order_sends_and_copies_nothing():
    exchange, group = of_qkv(1), CountingGroup(ThreadGroup.create(1)[0])
    fused = torch.ones(PACKING.total, exchange.sections.width, requires_grad=True)
    on_heads = to_heads(exchange, group, fused)
    assert {x.untyped_storage().data_ptr() for x in on_heads} == {fused.untyped_storage().data_ptr()}
    sum(x.sum() for x in to_tokens(exchange, group, *on_heads)).backward()
    assert not group.calls


ROWS, WIDTH = 12, 6 * 4 + 2 * 4 + 2 * 3  # rank 0 of 2
TO_HEADS = [
    (r"tensors\[0\]", (ROWS + 1, WIDTH)), (r"tensors\[0\]", (ROWS,)), (r"tensors\[0\]", (ROWS, 1, 1, WIDTH)),
    (r"tensors\[1\]", (ROWS, 24), (ROWS - 1, 14)), (r"tensors\[1\]", (ROWS, 2, 24), (ROWS, 3, 14)),
    *(("tensors", *((ROWS, width) for width in widths))
      for widths in ((WIDTH - 1,), (WIDTH + 1,), (24, 8), (24, 8, 6, 1), (23, 9, 6), (24, 14, 24))),
]  # fmt: skip
TO_TOKENS = [
    *(("section 'k'", (23, 3, 4), wrong, (23, 1, 3))
      for wrong in ((22, 1, 4), (23, 2, 4), (23, 1, 5), (23, 4), (23, 1, 1, 4))),
    ("sections", (23, 3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("move", "says", "shapes"),
    [*((to_heads, says, shapes) for says, *shapes in TO_HEADS),
     *((to_tokens, says, shapes) for says, *shapes in TO_TOKENS)],
)  # fmt: skip
def test_rejects_tensors_that_do_not_fit(move: Callable[..., object], says: str, shapes: list[tuple[int, ...]]):
    group = ThreadGroup.create(2, timeout=1.0)[0]
    rejects(f"^{says}: got ", move, of_qkv(2), group, *(torch.ones(shape) for shape in shapes))


def test_rejects_heads_assigned_to_another_number_of_ranks():
    rejects("^sections: got 'heads assigned to 2 ranks'", Exchange, Layout.contiguous(PACKING, 3), of_qkv(2).sections)
