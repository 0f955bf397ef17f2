"""Head-side messages are sent as they lie where they may be, and packed where they may not.

What the messages mean is tested end to end in `test_head_exchange.py`; here are the copies that are, or are not, made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.exchange.buffers import Buffers
from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.geometry import Geometry
from megatron_cp.exchange.messages import keeps_message, like_rows, pack_heads, section_views, unpack_heads
from megatron_cp.exchange.sections import Section, Sections
from megatron_cp.layout import Layout, Packing

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

PACKING = Packing([7, 1, 13, 0, 2])
LAYOUTS = {"in stream order": Layout.contiguous(PACKING, 3), "shuffled": Layout.zigzag(PACKING, 3)}
MIXED = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float64)


@pytest.fixture(params=LAYOUTS)
def layout(request) -> Layout:
    return LAYOUTS[request.param]


def geometry(
    layout: Layout, *, rank: int = 1, batch: int | None = None, dtypes: tuple[torch.dtype, ...] = MIXED
) -> Geometry:
    """Returns the geometry of one of 3 ranks with 1 or 2 of five q heads, a k and a v head; rank 2 has no `a`."""
    q, kv, a = ((0, 2), (2, 4), (4, 5)), ((0, 1), (0, 1), (1, 2)), ((0, 1), (1, 2), (2, 2))
    sections = Sections((Section("q", 5, 3, q), Section("k", 2, 5, kv), Section("v", 2, 5, kv), Section("a", 2, 1, a)))
    return Geometry(Exchange(layout, sections), rank, dtypes, batch, torch.device("cpu"))


def normal(at: Geometry, seed: int = 0) -> list[Tensor]:
    """Every section's `[T, (b,) h, d]` on the head side."""
    draw = torch.Generator().manual_seed(seed)
    lead = (PACKING.total,) if at.batch is None else (PACKING.total, at.batch)
    return [
        torch.randn(*lead, block.heads_on(at.rank), block.head_dim, generator=draw).to(dtype)
        for block, dtype in zip(at.exchange.sections.blocks, at.dtypes, strict=True)
    ]


def finished(at: Geometry) -> list[Tensor]:
    """Values that a kernel wrote where its inputs stood."""
    received = pack_heads(normal(at, seed=1), at, Buffers())
    written = like_rows(*unpack_heads(received, at))
    for tensor, value in zip(written, normal(at), strict=True):
        tensor.copy_(value)
    return written


def carries(message: Tensor, sections: list[Tensor], at: Geometry) -> bool:
    """Does the message hold the sections' rows, in the order in which the ranks hold the tokens?"""
    order = torch.tensor(at.layout.order)
    found = section_views(message.view(PACKING.total, -1), at)
    return all(torch.equal(rows, section[order]) for rows, section in zip(found, sections, strict=True))


class CountCopies(TorchDispatchMode):
    """Counts the operations that move data."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "clone", "cat", "stack", "index", "index_select", "gather", "take"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [None, 2], ids=["thd", "sbhd"])
def test_finished_tables_are_sent_as_they_lie_or_shuffled_by_one_gather(batch: int | None):
    at = geometry(LAYOUTS["in stream order"], batch=batch)
    sections = finished(at)
    with CountCopies() as moved:
        message = pack_heads(sections, at, Buffers())
    assert moved.counts == Counter()
    assert message.data_ptr() == sections[0].data_ptr()
    assert carries(message, sections, at)
    at = geometry(LAYOUTS["shuffled"], batch=batch)
    sections = finished(at)
    assert at.order is not None  # made once for a batch
    with CountCopies() as moved:
        message = pack_heads(sections, at, Buffers())
    assert moved.counts == Counter(index_select=1)
    assert carries(message, sections, at)


def test_table_inside_a_larger_buffer_is_adopted():
    at = geometry(LAYOUTS["in stream order"])
    row = at.format.row_bytes[at.rank]
    sections = at_bytes(at, row_bytes=row, start=2 * row)
    with CountCopies() as moved:
        message = pack_heads(sections, at, Buffers())
    assert moved.counts == Counter()
    assert carries(message, sections, at)


def at_bytes(
    at: Geometry, *, row_bytes: int, start: int = 0, offsets: tuple[int, ...] | None = None, spare: int = 64
) -> list[Tensor]:
    """Sections at given byte offsets in the rows of one buffer, which has room before and after."""
    values = normal(at)
    buffer = torch.zeros(start + PACKING.total * row_bytes + spare, dtype=torch.uint8)
    buffer = buffer[: buffer.numel() // 8 * 8]
    sections = []
    for value, offset in zip(values, offsets or at.format.offsets[at.rank], strict=True):
        size = value.itemsize
        strides = (row_bytes // size, value.shape[-1], 1)
        view = buffer.view(value.dtype).as_strided(value.shape, strides, (start + offset) // size)
        sections.append(view.copy_(value))
    return sections


def _swapped(at: Geometry) -> list[Tensor]:
    q, k, v, a = at.format.offsets[at.rank]
    row = at.format.row_bytes[at.rank]
    return at_bytes(at, row_bytes=row, offsets=(q, v, k, a), spare=row)


def _rotated(at: Geometry) -> list[Tensor]:
    _, k, v, a = at.format.offsets[at.rank]
    row = at.format.row_bytes[at.rank]
    return at_bytes(at, row_bytes=row, offsets=(row - k, 0, v - k, a - k), spare=row)


NOT_TABLES: dict[str, Callable[[Geometry], list[Tensor]]] = {
    "plain tensors": normal,
    "first is plain": lambda at: [finished(at)[0].clone(), *finished(at)[1:]],
    "last is plain": lambda at: [*finished(at)[:3], normal(at)[3]],
    "two tables": lambda at: [*finished(at)[:1], *finished(at)[1:]],
    "k and v swapped": _swapped,
    "q after the others": _rotated,
    "wider rows": lambda at: at_bytes(at, row_bytes=at.format.row_bytes[at.rank] + 16),
    "every second row": lambda at: at_bytes(at, row_bytes=2 * at.format.row_bytes[at.rank]),
    "table that lacks its last bytes": lambda at: at_bytes(at, row_bytes=at.format.row_bytes[at.rank], spare=-5),
    "expanded over tokens": lambda at: [section[:1].expand_as(section) for section in normal(at)],
    "expanded scalar": lambda at: [torch.ones((), dtype=x.dtype).expand_as(x) for x in normal(at)],
    "heads last to first": lambda at: [section.flip(-2).transpose(0, -1).contiguous().transpose(0, -1)
                                       for section in normal(at)],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TABLES)
def test_what_is_no_finished_table_is_packed(name: str, layout: Layout):
    at = geometry(layout)
    sections = NOT_TABLES[name](at)
    values = [section.clone() for section in sections]
    message = pack_heads(sections, at, Buffers())
    assert carries(message, values, at)
    storages = {section.untyped_storage().data_ptr() for section in sections}
    assert message.untyped_storage().data_ptr() not in storages


def test_rank_without_heads_of_one_section_packs_the_others(layout: Layout):
    at = geometry(layout, rank=2)
    sections = finished(at)
    assert sections[-1].numel() == 0
    assert carries(pack_heads(sections, at, Buffers()), normal(at), at)


@pytest.mark.parametrize("first_byte", [4, 20], ids=lambda byte: f"from byte {byte}")
def test_views_that_start_between_elements_of_another_type_are_packed(first_byte: int, layout: Layout):
    """A gradient of fp32 that starts 4 bytes into a buffer, beside one of float64."""
    at = geometry(layout, dtypes=(torch.float32, torch.float64, torch.float64, torch.float64))
    sections = normal(at)
    room = torch.zeros(sections[0].numel() + 64 * PACKING.total)
    sections[0] = room[first_byte // 4 :][: sections[0].numel()].view(sections[0].shape).copy_(sections[0])
    assert carries(pack_heads(sections, at, Buffers()), sections, at)


def test_one_section_without_gaps_is_sent_as_it_lies():
    layout, ranges = LAYOUTS["in stream order"], ((0, 4), (4, 8), (8, 12))
    exchange = Exchange(layout, Sections((Section("out", 12, 2, ranges),)))
    at = Geometry(exchange, 1, (torch.bfloat16,), None, torch.device("cpu"))
    out = torch.randn(PACKING.total, 4, 2).bfloat16()
    assert pack_heads([out], at, Buffers()).data_ptr() == out.data_ptr()


def test_a_message_is_kept_where_heads_are_views_of_it(layout: Layout):
    at = geometry(layout)
    message = pack_heads(normal(at), at, Buffers())
    memory = message.untyped_storage().data_ptr()
    are_views = {view.untyped_storage().data_ptr() == memory for view in unpack_heads(message, at)}
    assert are_views == {keeps_message(at)}


@pytest.mark.parametrize("batch", [None, 2], ids=["thd", "sbhd"])
def test_like_rows_lie_to_each_other_as_the_originals_in_memory_of_their_own(batch: int | None, layout: Layout):
    at = geometry(layout, batch=batch)
    views = unpack_heads(pack_heads(normal(at), at, Buffers()), at)
    copies = like_rows(*views)
    for number, (view, copy) in enumerate(zip(views, copies, strict=True)):
        assert (copy.shape, copy.dtype, copy.stride()) == (view.shape, view.dtype, view.stride())
        assert copy.data_ptr() - copies[0].data_ptr() == view.data_ptr() - views[0].data_ptr()
        copy.fill_(number)
    assert all((copy == number).all() for number, copy in enumerate(copies))
    assert all(torch.equal(view, value) for view, value in zip(views, normal(at), strict=True))


def test_like_rows_of_no_table_are_apart_and_of_few_rows_are_few():
    originals = [torch.ones(4, 3).t(), torch.ones(4, 6)[:, ::2], torch.ones(2, dtype=torch.bfloat16)]
    copies = like_rows(*originals)
    assert [(x.shape, x.dtype) for x in copies] == [(x.shape, x.dtype) for x in originals]
    assert all(copy.is_contiguous() for copy in copies)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*originals, *copies)}) == 6
    rows = torch.zeros(100_000, 6, 4)[1000:1010]
    copies = like_rows(rows[:, :2], rows[:, 2:])
    assert copies[0].untyped_storage().nbytes() == rows.nbytes
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
    table = torch.zeros(5, 24, dtype=torch.uint8)
    copies = like_rows(table[:, 8:24].view(torch.float64)[..., None], table[:, 4:8].view(torch.float32)[..., None])
    assert copies[0].untyped_storage().data_ptr() != copies[1].untyped_storage().data_ptr()
    assert all(copy.is_contiguous() for copy in copies)


BUFFER = torch.zeros(5, 3, 2)
OVERLAPPING = {
    "one tensor twice": (BUFFER, BUFFER),
    "heads in common": (BUFFER[:, :2], BUFFER[:, 1:]),
    "values are a part of keys": (BUFFER, BUFFER[..., :1]),
    "expanded over tokens": (BUFFER[:1].expand(5, 3, 2), BUFFER[1:2].expand(5, 3, 2)),
    "expanded over heads": (BUFFER[:, :1].expand(5, 3, 2), BUFFER[:, 1:2].expand(5, 3, 2)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_like_rows_never_share_an_element(name: str):
    """Gradients of inputs that overlap must not overlap: each is written whole, and autograd adds them."""
    copies = like_rows(*OVERLAPPING[name])
    values = [torch.randn(copy.shape) for copy in copies]
    for copy, value in zip(copies, values, strict=True):
        copy.copy_(value)
    assert all(torch.equal(copy, value) for copy, value in zip(copies, values, strict=True))
