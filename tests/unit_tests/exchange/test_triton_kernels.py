"""The Triton kernels of a head exchange, bit for bit against slices of the full tensors.

Triton's interpreter runs them on the CPU, in processes of their own, since it changes Triton for good. Every byte that
a kernel should write is 0xFF before, and so is every one that it should not.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.codec import E4M3, E5M2, INT8, Format
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.kernels.pieces import FEW, KIND, TENSOR, UNITS, Piece, Pieces, alignment_of, copy_table
from megatron_cp.exchange.sections import partition_heads
from tests.forked_commands import run_code, run_module

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")
CHECKS = [  # each list in one process
    ["copies", "sums", "far_apart", "refusals"],
    pytest.param(["any_pieces"], marks=pytest.mark.thorough),
    pytest.param(["coded"], marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("checks", CHECKS, ids=" ".join)
def test_interpreted(checks: list[str]):
    run_module("tests.unit_tests.exchange.test_triton_kernels", *checks, TRITON_INTERPRET="1")


def test_tables_need_no_triton():
    program = """if True:
        import sys
        sys.modules["triton"] = None
        import megatron_cp, torch
        from megatron_cp.exchange.kernels.pieces import Piece, copy_table
        kind = dict(types=[torch.float32], alignment=(16, 16), device=torch.device("cpu"), to_tensors=True)
        assert copy_table([Piece(0, 0, 16, 0, 16, 0)], **kind).few_blocks == 1
    """
    run_code(program)


def widths(pieces: Sequence[Piece], *alignment: int, types: Sequence[torch.dtype] = (FP32,)) -> dict[int, int]:
    """Returns the number of units of each kind."""
    made = copy_table(pieces, types=types, alignment=alignment, device=CPU, to_tensors=len(pieces) > 1)
    units = made.table[:, : made.unit_blocks * UNITS + made.few_blocks * FEW]
    kinds = units[KIND][units[TENSOR] >= 0]
    return {int(kind): int((kinds == kind).sum()) for kind in kinds.unique()}


def test_units_are_as_wide_as_alignment_allows():
    piece = Piece(0, offset=32, size=256, start=48, row=512, place=16)
    assert widths([piece], 16, 16) == {16: 16}
    assert widths([piece], 4, 16) == {4: 64}
    assert widths([piece], 16, 8) == {8: 32}
    assert widths([piece._replace(start=24)], 16, 16) == {8: 32}
    assert widths([piece._replace(row=514)], 16, 16) == {2: 128}
    assert widths([piece._replace(offset=33)], 16, 16) == {1: 256}
    room = unwritten(4096)
    table = room.view(BF16).view(-1, 64)
    starts = [table, table[:, 8:], table[:, 4:], table[:, 1:], table.view(-1, 16)[:, :1], table.view(-1, 4)]
    assert alignment_of(starts, [room, room[8:], room[1:]]) == (16, 16, 8, 2, 16, 8, 16, 8, 1)
    assert widths([Piece(0, 12, 43, 0, 64, 12)], 16, 16) == {16: 2, 4: 2, 2: 1, 1: 1}
    assert widths([Piece(0, 1, 9, 0, 64, 33)], 16, 16) == {1: 1, 2: 2, 4: 1}
    assert widths([Piece(0, 6, 4, 0, 64, 6)], 16, 16) == {2: 2}


def test_few_units_of_a_kind_are_no_whole_program():
    def blocks(*counts: int, width: int = 16) -> tuple[int, int]:
        pieces = [Piece(0, 16 * width * number, count * width, 0, 4096, 16 * width * number)
                  for number, count in enumerate(counts)]  # fmt: skip
        made = copy_table(pieces, types=[FP32], alignment=(width, 16), device=CPU, to_tensors=False)
        return made.unit_blocks, made.few_blocks

    assert blocks(1) == blocks(8) == (0, 1)
    assert blocks(8, 8, 8, 8) == (0, 4)  # half of a program
    assert blocks(8, 8, 8, 9) == (1, 0)
    assert blocks(64) == (1, 0)
    assert blocks(64, width=4) == (1, 0)
    assert blocks(65) == (1, 1)
    both = copy_table([Piece(0, 0, 1048, 0, 2048, 0)], types=[FP32], alignment=(16, 16), device=CPU, to_tensors=False)
    assert (both.kinds, both.unit_blocks, both.few_blocks) == ((16, 8), 1, 2)
    assert both.programs == (8, 10, 10)


def test_only_what_pieces_share_is_summed():
    first, second = Piece(0, 0, 64, 0, 64, 0), Piece(0, 48, 64, 64, 64, 0)
    assert widths([first, second], 16, 16) == {16: 6, 3 * 32 + 16: 1}
    assert widths([first, second._replace(place=4, row=80)], 16, 16) == {16: 3, 4: 12, 3 * 32 + 4: 4}


def test_heads_are_coded_in_wide_accesses_if_both_sides_are_aligned():
    def kinds(piece: Piece, *alignment: int) -> tuple[int, ...]:
        return copy_table([piece], types=[BF16], alignment=alignment, device=CPU, to_tensors=False).head_kinds

    piece = Piece(0, 16, 96, 32, 64, 8, head_dim=24, scale=56)
    assert kinds(piece, 16, 16) == (32 + 16,)
    unaligned = [piece._replace(**change) for change in ({"offset": 18}, {"start": 4}, {"row": 60}, {"place": 4})]
    assert [kinds(piece, 16, 16) for piece in unaligned] == [(32 + 2,)] * 4
    assert kinds(piece, 2, 16) == kinds(piece, 16, 4) == (32 + 2,)
    assert kinds(piece._replace(head_dim=12), 16, 16) == (32 + 2,)


class Block(NamedTuple):
    """A section: its heads on each rank, and the tensor that it stands in."""

    heads: tuple[tuple[int, int], ...]
    dim: int
    dtype: torch.dtype
    tensor: int = 0
    coded: bool = False

    @property
    def width(self) -> int:
        return max(hi for _, hi in self.heads) * self.dim

    def on(self, rank: int) -> int:
        lo, hi = self.heads[rank]
        return hi - lo

    def in_message(self, rank: int) -> int:
        if not self.coded:
            return self.on(rank) * self.dim * self.dtype.itemsize
        return self.scales(rank) + self.on(rank) * 4

    def scales(self, rank: int) -> int:
        return up(self.on(rank) * self.dim, 4)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Form:
    """The bytes of a token, for blocks of heads, and a message's parts as tensors."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.ranks = len(blocks[0].heads)
        self.places, self.row_bytes = [], []
        for rank in range(self.ranks):
            sizes = [up(block.in_message(rank), 16) for block in blocks]
            self.places.append([sum(sizes[:number]) for number in range(len(sizes))])
            self.row_bytes.append(sum(sizes))
        self.starts = [sum(self.row_bytes[:rank]) for rank in range(self.ranks)]

    @property
    def types(self) -> list[torch.dtype]:
        return [
            next(block.dtype for block in self.blocks if block.tensor == tensor)
            for tensor in range(max(block.tensor for block in self.blocks) + 1)
        ]

    def columns(self, number: int) -> tuple[int, int]:
        """A section's place in its tensor, and the tensor's width."""
        tensor = self.blocks[number].tensor
        before = sum(block.width for block in self.blocks[:number] if block.tensor == tensor)
        return before, sum(block.width for block in self.blocks if block.tensor == tensor)

    def pieces(self, ranks: Sequence[int] | None = None) -> list[Piece]:
        """Returns the pieces of the messages of some ranks; for a head side, of one rank alone."""
        pieces = []
        for number, block in enumerate(self.blocks):
            for rank in ranks or range(self.ranks):
                size, (lo, _) = block.dim * block.dtype.itemsize, block.heads[rank]
                place = self.places[rank][number]
                coded = {"head_dim": block.dim, "scale": place + block.scales(rank)} if block.coded else {}
                offset = self.columns(number)[0] * block.dtype.itemsize + lo * size
                start, row = self.starts[rank], self.row_bytes[rank]
                pieces.append(Piece(block.tensor, offset, block.on(rank) * size, start, row, place, **coded))
        return pieces

    def part(self, message: Tensor, rank: int, number: int, rows: int) -> Tensor | tuple[Tensor, Tensor]:
        """`[rows, heads, d]` of one rank and section; bytes and scales where it is coded."""
        block, row, place = self.blocks[number], self.row_bytes[rank], self.places[rank][number]
        table = message[rows * self.starts[rank] :][: rows * row].view(rows, row)
        heads = (block.on(rank), block.dim)
        if not rows * block.on(rank):
            return torch.empty(rows, *heads, dtype=block.dtype)
        if not block.coded:
            return table[:, place : place + block.in_message(rank)].view(block.dtype).unflatten(1, heads)
        payload = table[:, place : place + block.on(rank) * block.dim].unflatten(1, heads)
        return payload, table[:, place + block.scales(rank) : place + block.in_message(rank)].view(FP32)

    def section(self, tensors: Sequence[Tensor], number: int) -> Tensor:
        """`[rows, heads, d]`."""
        block, (first, _) = self.blocks[number], self.columns(number)
        return tensors[block.tensor][:, first : first + block.width].unflatten(1, (-1, block.dim))


def unwritten(size: int, first: int = 0) -> Tensor:
    """Bytes of 0xFF that begin `first` bytes after a multiple of 16, and have as many more on either side."""
    room = torch.full((size + first + 64,), 255, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + first
    return room[begin : begin + size]


def rows_of(rows: int, width: int, dtype: torch.dtype, *, first: int = 0, gap: int = 0) -> Tensor:
    """`[rows, width]` that begins `first` elements after a multiple of 16 bytes, its rows `gap` elements apart."""
    size, stride = dtype.itemsize, width + gap
    return (
        unwritten(max(rows * stride * size, 1), first * size)[: rows * stride * size]
        .view(dtype)
        .view(rows, stride)[:, :width]
    )


def drawn(tensor: Tensor, seed: int) -> Tensor:
    """Numbers of every size, no two alike."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(tensor.shape, generator=draw, dtype=FP64)
    return tensor.copy_(values * torch.exp2(torch.randint(-6, 7, tensor.shape, generator=draw)))


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def bytes_around(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def table(pieces: Sequence[Piece], tensors: Sequence[Tensor], messages: Sequence[Tensor], **kind: bool) -> Pieces:
    types = [tensor.dtype for tensor in tensors]
    return copy_table(pieces, types=types, alignment=alignment_of(tensors, messages), device=CPU, **kind)


def check(
    form: Form,
    rows: int,
    *,
    first: int = 0,
    gap: int = 0,
    pad: int = 0,
    index: Tensor | None = None,
    message_first: int = 0,
    coding: Format | None = None,
) -> None:
    """Both directions, for tensors that begin, and rows that lie, so far apart, and for a message likewise."""
    case = (form.blocks, rows, first, gap, pad, index, message_first, coding)
    widths = [sum(block.width for block in form.blocks if block.tensor == tensor) for tensor in range(len(form.types))]
    size, order = rows * sum(form.row_bytes), torch.arange(rows) if index is None else index.long()

    def tensors() -> list[Tensor]:
        made = zip(widths, form.types, strict=True)
        return [rows_of(rows + pad, width, dtype, first=first, gap=gap) for width, dtype in made]

    sources, message, expected = tensors(), unwritten(size, message_first), unwritten(size, message_first)
    for number, source in enumerate(sources):
        drawn(source, number)
    for rank in range(form.ranks):
        for number, block in enumerate(form.blocks):
            sent = form.section(sources, number)[order, slice(*block.heads[rank])]
            part = form.part(expected, rank, number, rows)
            part.copy_(sent) if isinstance(part, Tensor) else encode(sent, coding, *part)
    pieces = table(form.pieces(), sources, [message], to_tensors=False)
    copy_to_message(sources, message, rows, pieces, index=index, coding=coding)
    assert same(bytes_around(message), bytes_around(expected)), case

    found, summed = tensors(), tensors()
    for target in summed:
        target[rows:].zero_()
    for number, block in enumerate(form.blocks):
        wide = FP64 if block.dtype == FP64 else block.dtype if not block.dtype.is_floating_point else FP32
        total = torch.empty(rows, block.width // block.dim, block.dim, dtype=wide)
        written = 0
        for rank, (lo, hi) in enumerate(block.heads):
            part = form.part(message, rank, number, rows)
            sent = drawn(torch.empty(rows, hi - lo, block.dim, dtype=block.dtype), 1000 * number + rank)
            part.copy_(sent) if isinstance(part, Tensor) else encode(sent, coding, *part)
            arrived = part if isinstance(part, Tensor) else decode(*part, coding)
            shared = max(0, min(written, hi) - lo)
            total[:, lo : lo + shared] += arrived[:, :shared]
            total[:, lo + shared : hi] = arrived[:, shared:].to(wide)
            written = max(written, hi)
        form.section(summed, number)[:rows] = total[order].to(block.dtype)
    pieces = table(form.pieces(), found, [message], to_tensors=True)
    copy_from_message([message], found, rows, pieces, index=index, coding=coding)
    for tensor, right in zip(found, summed, strict=True):
        assert same(bytes_around(tensor), bytes_around(right)), case


def copy_to_message(tensors: Sequence[Tensor], message: Tensor, *how: Any, **more: Any) -> None:
    Launch(tensors, [message], *how, **more)([x.data_ptr() for x in (*tensors, message)])


def copy_from_message(messages: Sequence[Tensor], tensors: Sequence[Tensor], *how: Any, **more: Any) -> None:
    Launch(tensors, messages, *how, **more)([x.data_ptr() for x in (*tensors, *messages)])


def ranges(heads: int, groups: int, ranks: int) -> tuple[tuple, tuple]:
    partition = partition_heads(heads, groups, ranks)
    return partition.heads, partition.groups


def shuffled(rows: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(dtype)


def whole(width: int, dtype: torch.dtype, tensor: int = 0) -> Block:
    """A section of a head side."""
    return Block(((0, 1),), width, dtype, tensor)


def check_copies() -> None:
    heads, groups = ranges(8, 8, 3)
    joint = Form([Block(heads, 32, BF16), Block(groups, 16, BF16), Block(heads, 1, BF16)])
    for rows in (0, 1, 7, 130):
        check(joint, rows)
    check(joint, 7, first=1)
    check(joint, 7, first=4, gap=4)
    check(joint, 7, gap=3, pad=2)
    heads, groups = ranges(5, 5, 4)
    mixed = Form([
        Block(heads, 3, FP32), Block(heads, 8, BF16, 1), Block(groups, 5, BF16, 1), Block(heads, 2, FP64, 2),
        Block(heads, 1, torch.uint8, 3), Block(groups, 4, FP16, 4),
    ])  # fmt: skip
    check(mixed, 7, pad=18)
    check(mixed, 19, first=1, gap=1)
    check(mixed, 7, message_first=8)
    check(Form([Block(((0, 3),), 8, BF16)]), 5)
    check(Form([Block(((0, 0), (0, 2), (2, 2)), 8, BF16)]), 5)  # ranks without heads
    check(Form([Block(((0, 1), (1, 2)), 4, FP32, tensor) for tensor in range(8)]), 3)
    # Whole programs of units and, of two kinds, few that take more rows; rows end inside of a group of them.
    few = Form([Block(((0, 2), (2, 4)), 264, BF16), Block(((0, 2), (2, 4)), 1, FP32, 1)])
    for rows in (16, 128, 137):
        check(few, rows)
    check(few, 130, pad=140, index=shuffled(130))
    # The head side: rows of a table, and sections of their own, by an index.
    for dtype in (torch.int32, torch.int64):
        check(Form([whole(48, torch.uint8)]), 130, index=shuffled(130, dtype))
        check(Form([whole(24, BF16), whole(3, FP32, 1), whole(1, FP64, 2)]), 21, index=shuffled(21, dtype), gap=1)


def check_any_pieces() -> None:
    """Bytes from anywhere to anywhere, drawn at random."""
    draw = np.random.default_rng(0)
    for _ in range(12):
        rows, num_tensors, num_messages = int(draw.integers(1, 20)), int(draw.integers(1, 5)), int(draw.integers(1, 4))
        tensors = [
            drawn(rows_of(rows, 150, torch.uint8, first=int(draw.integers(16)), gap=int(draw.integers(40))), number)
            for number in range(num_tensors)
        ]
        pieces, begin, ends = [], [0] * num_tensors, [0] * num_messages
        for _ in range(8):
            number, message = int(draw.integers(num_tensors)), int(draw.integers(num_messages))
            offset = begin[number] + int(draw.integers(20)) // int(draw.integers(1, 4)) * int(draw.choice([1, 4, 16]))
            size, place = int(draw.integers(70)), int(draw.choice([0, 3, 4, 8, 16]))
            size = max(0, min(size, 150 - offset))
            row = place + size + int(draw.integers(4))
            pieces.append(Piece(number, offset, size, ends[message], row, place, message))
            begin[number], ends[message] = offset + size, ends[message] + row
        for to_tensors in (False, True):
            messages = [
                drawn(unwritten(rows * size, int(draw.integers(16))), number) for number, size in enumerate(ends)
            ]
            right = [tensor.clone() for tensor in (messages if not to_tensors else tensors)]
            for piece in pieces:
                message = (right if not to_tensors else messages)[piece.message]
                block = message[rows * piece.start :][: rows * piece.row].view(rows, piece.row)
                in_message = block[:, piece.place : piece.place + piece.size]
                in_tensor = (right if to_tensors else tensors)[piece.tensor][:, piece.offset :][:, : piece.size]
                in_tensor.copy_(in_message) if to_tensors else in_message.copy_(in_tensor)
            if to_tensors:
                copy_from_message(messages, tensors, rows, table(pieces, tensors, messages, to_tensors=True))
            else:
                for number, message in enumerate(messages):
                    own = [piece._replace(message=0) for piece in pieces if piece.message == number]
                    copy_to_message(tensors, message, rows, table(own, tensors, [message], to_tensors=False))
            found = tensors if to_tensors else messages
            assert all(torch.equal(tensor, expected) for tensor, expected in zip(found, right, strict=True)), pieces


def check_sums() -> None:
    heads, groups = ranges(4, 2, 4)
    for dtype in (BF16, FP16, FP32, FP64):
        joint = Form([Block(heads, 16, dtype), Block(groups, 16, dtype), Block(groups, 8, dtype)])
        check(joint, 7)
        check(joint, 3, first=1, pad=1)
    check(Form([Block(heads, 8, BF16), Block(groups, 280, BF16)]), 130, pad=7)  # whole programs of sums, and few
    heads, groups = ranges(10, 2, 5)  # ranks whose heads begin and end inside groups
    check(Form([Block(heads, 2, FP32), Block(groups, 3, BF16, 1), Block(groups, 4, FP64, 2)]), 18, gap=2)
    heads, groups = ranges(5, 1, 5)
    check(Form([Block(groups, 8, BF16), Block(heads, 8, BF16), Block(groups, 1, FP32, 1)]), 7, index=shuffled(7))
    check(Form([Block(((0, 2), (1, 3), (1, 4)), 3, FP16)]), 5)
    check_sums_of_several_messages()


def check_sums_of_several_messages() -> None:
    """Parts of every rank's heads that came one after another; a sum is in the order of ranks all the same."""
    rows, first, second = 7, Form([Block(((0, 1), (0, 1)), 8, BF16)]), Form([Block(((0, 1), (0, 1)), 8, BF16)])
    messages = [unwritten(rows * sum(form.row_bytes)) for form in (first, second)]
    parts = [form.part(message, rank, 0, rows) for form, message in zip((first, second), messages, strict=True)
             for rank in range(2)]  # fmt: skip
    for number, part in enumerate(parts):
        drawn(part, number)
    in_parts = [*first.pieces(), *(piece._replace(message=1) for piece in second.pieces())]
    order = [2, 0, 3, 1]
    target = rows_of(rows, 8, BF16)
    pieces = table([in_parts[number] for number in order], [target], messages, to_tensors=True)
    copy_from_message(messages, [target], rows, pieces)
    total = parts[order[0]].float()
    for number in order[1:]:
        total += parts[number]
    assert same(target, total.to(BF16).flatten(1))


def check_far_apart() -> None:
    """Rows and blocks that are more than 4 GiB apart, in memory of which next to nothing is touched."""
    rows, stride, start = 3, 2**31 + 16, 2**30 + 64
    memory = torch.frombuffer(mmap.mmap(-1, rows * (stride + start + 32)), dtype=torch.uint8)
    tensor, message = memory.as_strided((rows, 32), (stride, 1)), memory[rows * stride :]
    block = message[rows * start :].view(rows, 32)
    piece = Piece(0, 0, 32, start, row=32, place=0)
    drawn(tensor, 0)
    copy_to_message([tensor], message, rows, table([piece], [tensor], [message], to_tensors=False))
    assert torch.equal(block, tensor)
    drawn(block, 1)
    copy_from_message([message], [tensor], rows, table([piece], [tensor], [message], to_tensors=True))
    assert torch.equal(block, tensor)


def check_coded() -> None:
    heads, groups = ranges(3, 1, 2)
    for coding in (E4M3, E5M2, INT8):
        for dtype in (BF16, FP16, FP32):
            check(Form([Block(heads, 16, dtype, coded=True), Block(groups, 8, dtype, coded=True)]), 5, coding=coding)
        odd = Form([Block(heads, 5, BF16, coded=True), Block(heads, 3, BF16), Block(groups, 6, FP64, 1, coded=True)])
        check(odd, 19, first=1, pad=3, coding=coding)
        check(odd, 5, index=shuffled(5), message_first=4, coding=coding)
    check(Form([Block(((0, 6),), 24, BF16, coded=True), Block(((0, 1),), 96, BF16, 1, coded=True)]), 3, coding=E4M3)
    check_coded_extremes()


def check_coded_extremes() -> None:
    """Heads of zeros, of the smallest and the largest numbers, and of what is no number."""
    form = Form([Block(((0, 1),), 8, FP32, coded=True)])
    np.seterr(invalid="ignore")
    for coding in (E4M3, E5M2, INT8):
        head = torch.tensor([1.0, -1.0, 0.5, 1 / 3, -0.0, 0.0, 2**-9, 2**-20])
        tiny = [2.0**-power * 1.37 * head for power in range(115, 150, 3)]
        rows = torch.stack([head, 0 * head, *tiny, 1e-30 * head, 3e38 * head, head + 2**-15])
        rows = torch.cat([rows, torch.tensor([[coding.largest, 0.5, 1.5, 2.5, -3.5, 17.0, 19.0, 2**-10]])])
        message, expected = unwritten(len(rows) * 16), unwritten(len(rows) * 16)
        encode(rows.unflatten(1, (1, 8)), coding, *form.part(expected, 0, 0, len(rows)))
        pieces = table(form.pieces(), [rows], [message], to_tensors=False)
        copy_to_message([rows], message, len(rows), pieces, coding=coding)
        assert same(message, expected), coding

        for bad in (float("nan"), float("inf")):
            rows = head.where(torch.arange(8) != 3, bad)[None].contiguous()
            message, found = unwritten(16), torch.zeros(1, 8)
            pieces = table(form.pieces(), [rows], [message], to_tensors=False)
            copy_to_message([rows], message, 1, pieces, coding=coding)
            pieces = table(form.pieces(), [found], [message], to_tensors=True)
            copy_from_message([message], [found], 1, pieces, coding=coding)
            assert found.isnan().any(), (coding, bad)


def check_refusals() -> None:
    def refuses(match: str | None, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        with pytest.raises(AssertionError, match=match):
            call(*args, **kwargs)

    tensor, message = rows_of(4, 16, BF16), unwritten(4 * 32)
    piece = Piece(0, 0, 32, 0, 32, 0)
    to, back = (table([piece], [tensor], [message], to_tensors=way) for way in (False, True))
    refuses("9 tensors and 1 messages: 8 fit", table, [piece], [tensor] * 9, [message], to_tensors=False)
    refuses("no sums of all of", table, [piece, piece], [tensor.view(torch.int16)], [message], to_tensors=True)
    refuses("a part of an element", table, [piece, piece._replace(offset=1, size=30)], [tensor], [message],
            to_tensors=True)  # fmt: skip
    refuses("2 GiB", table, [piece._replace(start=2**31)], [tensor], [message], to_tensors=False)
    refuses("aligned to", copy_to_message, [rows_of(4, 16, BF16, first=1)], message, 4, to)
    refuses("in a message of 112", copy_to_message, [tensor], message[:-16], 4, to)
    refuses("not dense", copy_to_message, [rows_of(4, 32, BF16)[:, ::2]], message, 4, to)
    refuses("pieces reach 32 bytes", copy_to_message, [rows_of(4, 8, BF16, gap=8)], message, 4, to)
    refuses(None, copy_to_message, [tensor[:3]], message, 4, to)
    refuses(None, copy_from_message, [message], [tensor[:3]], 4, back)
    refuses(None, copy_to_message, [tensor.view(FP16)], message, 4, to)
    refuses(None, copy_to_message, [tensor], message, 4, to, index=torch.arange(3))
    refuses("0 blocks of coded heads", copy_to_message, [tensor], message, 4, to, coding=E4M3)


def refuse_unaligned_accesses() -> None:
    """A GPU does not make an access that is not aligned as it was told."""
    from triton.runtime import interpreter

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def make(self: Any, pointers: Any, *rest: Any) -> Any:
            multiple = pointers.attr.get("tt.divisibility", [1])[-1]
            first = pointers.data[..., :1][rest[mask_at].data[..., :1]]
            assert not (first % multiple).any(), f"an access is not aligned to {multiple} bytes"
            return access(self, pointers, *rest)

        return make

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = checked(builder.create_masked_load, 0)
    builder.create_masked_store = checked(builder.create_masked_store, 1)


if __name__ == "__main__":
    from tools.triton_interpreter import interpret_triton, round_as_hardware_does

    interpret_triton()
    round_as_hardware_does()
    refuse_unaligned_accesses()
    from megatron_cp.exchange.kernels.triton import Launch

    for name in sys.argv[1:]:
        globals()[f"check_{name}"]()
