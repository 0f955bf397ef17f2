"""Launches of the exchange's Triton kernels with any pieces: bit for bit, and nothing is written beside them.

That kernels do what the exchange by torch does is tested in `test_kernel_copies.py`. Triton's interpreter runs them on
the CPU, in a process of its own, since it changes Triton for good. Every byte that a kernel should write is 0xFF
before, and so is every one that it should not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_cp.exchange.codec import E4M3, E5M2, INT8, Format
from megatron_cp.exchange.coding import decode, encode
from megatron_cp.exchange.kernels.pieces import Piece, Pieces, alignment_of, copy_table
from tests.commands import run_code, run_module

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")


def test_interpreted():
    run_module("tests.unit_tests.exchange.test_triton_kernels", TRITON_INTERPRET="1")


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


def unwritten(size: int, first: int = 0) -> Tensor:
    """Bytes of 0xFF that begin `first` bytes after a multiple of 16, and have as many more on either side."""
    room = torch.full((size + first + 64,), 255, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + first
    return room[begin : begin + size]


def rows_of(rows: int, width: int, dtype: torch.dtype, *, first: int = 0, gap: int = 0) -> Tensor:
    """`[rows, width]` that begins `first` elements after a multiple of 16 bytes, its rows `gap` elements apart."""
    size, stride = dtype.itemsize, width + gap
    return unwritten(rows * stride * size, first * size).view(dtype).view(rows, stride)[:, :width]


def drawn(tensor: Tensor, seed: int) -> Tensor:
    """Numbers of every size, no two alike."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(tensor.shape, generator=draw, dtype=FP64)
    return tensor.copy_(values * torch.exp2(torch.randint(-6, 7, tensor.shape, generator=draw)))


def same(found: Tensor, expected: Tensor) -> bool:
    """Compares the memory of both tensors, with what is around them."""
    found, expected = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in (found, expected))
    return torch.equal(found, expected)


def table(pieces: Sequence[Piece], tensors: Sequence[Tensor], messages: Sequence[Tensor], **kind: bool) -> Pieces:
    types = [tensor.dtype for tensor in tensors]
    return copy_table(pieces, types=types, alignment=alignment_of(tensors, messages), device=CPU, **kind)


def launch(
    pieces: Sequence[Piece], tensors: Sequence[Tensor], messages: Sequence[Tensor], rows: int, *, to_tensors: bool,
    **more: Any,
) -> None:  # fmt: skip
    made = table(pieces, tensors, messages, to_tensors=to_tensors)
    Launch(tensors, messages, rows, made, **more)([x.data_ptr() for x in (*tensors, *messages)])


def copied(
    pieces: Sequence[Piece], tensors: Sequence[Tensor], messages: Sequence[Tensor], order: Tensor, *, to_tensors: bool
) -> None:
    """Copies pieces one after another. What several have of one element is added up, and rounded once."""
    rows, dtype = len(order), tensors[0].dtype
    wide = FP32 if dtype in (BF16, FP16) else dtype
    sums = [torch.zeros(rows, tensor.shape[1], dtype=wide) for tensor in tensors]
    written = [torch.zeros(tensor.shape[1], dtype=torch.bool) for tensor in tensors]
    for piece in pieces:
        block = messages[piece.message][rows * piece.start :][: rows * piece.row].view(rows, piece.row)
        in_message = block[:, piece.place : piece.place + piece.size]
        own = slice(piece.offset // dtype.itemsize, (piece.offset + piece.size) // dtype.itemsize)
        if not to_tensors:
            in_message.copy_(tensors[piece.tensor][order][:, own].contiguous().view(torch.uint8))
            continue
        total, again = sums[piece.tensor][:, own], written[piece.tensor][own]
        arrived = in_message.contiguous().view(dtype)[order].to(wide)
        total.copy_(torch.where(again, total + arrived, arrived))
        again.fill_(True)
    for tensor, total, is_written in zip(tensors, sums, written, strict=True) if to_tensors else ():
        tensor[:, is_written] = 0  # rows behind those of the messages
        tensor[:rows, is_written] = total[:, is_written].to(dtype)


def check_any_pieces() -> None:
    """Elements from anywhere to anywhere, drawn at random; bytes overlap in no tensor, since they are not added up."""
    draw = np.random.default_rng(0)

    def integer(*bounds: int) -> int:
        return int(draw.integers(*bounds))

    for number in range(10):
        dtype = (torch.uint8, BF16, FP16, FP32, FP64)[number % 5]
        item, rows, pad = dtype.itemsize, integer(1, 20), integer(3)
        places = [(integer(16), integer(40)) for _ in range(integer(1, 5))]  # of tensors, and gaps between rows
        pieces, begin, ends = [], [0] * len(places), [0] * integer(1, 4)
        for _ in range(8):
            tensor, message = integer(len(places)), integer(len(ends))
            offset = begin[tensor] + integer(20) // integer(1, 4) * int(draw.choice([1, 4, 16]))
            size, place = max(0, min(integer(70), 150 - offset)), int(draw.choice([0, 3, 4, 8, 16]))
            row = place + size + integer(4)
            pieces.append(Piece(tensor, *(item * each for each in (offset, size, ends[message], row, place)), message))
            begin[tensor], ends[message] = (offset + size if item == 1 else 0), ends[message] + row
        firsts = [item * integer(16 // item) for _ in ends]
        index = None if number % 3 == 0 else torch.randperm(rows).to(torch.int32 if number % 3 == 1 else torch.int64)
        order = torch.arange(rows) if index is None else index.long()

        def tensors(seed: int | None, rows: int = rows + pad, dtype: Any = dtype, places: Any = places) -> list[Tensor]:
            made = [rows_of(rows, 150, dtype, first=first, gap=gap) for first, gap in places]
            return made if seed is None else [drawn(x, seed + number) for number, x in enumerate(made)]

        def messages(rows: int = rows, item: int = item, ends: Any = ends, firsts: Any = firsts) -> list[Tensor]:
            return [unwritten(rows * item * size, first) for size, first in zip(ends, firsts, strict=True)]

        sources, found, right = tensors(0), messages(), messages()
        copied(pieces, sources, right, order, to_tensors=False)
        for message, sent in enumerate(found):
            own = [piece._replace(message=0) for piece in pieces if piece.message == message]
            launch(own, sources, [sent], rows, to_tensors=False, index=index)
        assert all(map(same, found, right)), pieces
        sent, found, right = [drawn(x.view(dtype), 9).view(torch.uint8) for x in found], tensors(None), tensors(None)
        launch(pieces, found, sent, rows, to_tensors=True, index=index)
        copied(pieces, right, sent, order, to_tensors=True)
        assert all(map(same, found, right)), pieces


def check_far_apart() -> None:
    """Rows and blocks that are more than 4 GiB apart, in memory of which next to nothing is touched."""
    rows, stride, start = 3, 2**31 + 16, 2**30 + 64
    memory = torch.frombuffer(mmap.mmap(-1, rows * (stride + start + 32)), dtype=torch.uint8)
    tensor, message = memory.as_strided((rows, 32), (stride, 1)), memory[rows * stride :]
    block = message[rows * start :].view(rows, 32)
    for to_tensors in (False, True):
        drawn(block if to_tensors else tensor, int(to_tensors))
        launch([Piece(0, 0, 32, start, row=32, place=0)], [tensor], [message], rows, to_tensors=to_tensors)
        assert torch.equal(block, tensor)


def coded_rows(coding: Format) -> Tensor:
    """Heads of zeros, of the smallest and the largest numbers, and of what is no number."""
    head = torch.tensor([1.0, -1.0, 0.5, 1 / 3, -0.0, 0.0, 2**-9, 2**-20])
    tiny = [2.0**-power * 1.37 * head for power in range(115, 150, 3)]
    bad = [head.where(torch.arange(8) != 3, number) for number in (float("nan"), float("inf"))]
    rows = torch.stack([*bad, head, 0 * head, *tiny, 1e-30 * head, 3e38 * head, head + 2**-15])
    return torch.cat([rows, torch.tensor([[coding.largest, 0.5, 1.5, 2.5, -3.5, 17.0, 19.0, 2**-10]])])


def check_coded_extremes() -> None:
    np.seterr(invalid="ignore")
    for coding in (E4M3, E5M2, INT8):
        rows, piece = coded_rows(coding), Piece(0, 0, 32, 0, row=16, place=0, head_dim=8, scale=8)
        message, right = (unwritten(len(rows) * 16) for _ in range(2))
        launch([piece], [rows], [message], len(rows), to_tensors=False, coding=coding)
        codes, scales = right.view(-1, 1, 16)[..., :8], right.view(-1, 16)[:, 8:12].view(FP32)
        encode(rows[:, None], coding, codes, scales)
        right[:32] = message[:32]  # what is no number may have any code
        assert same(message, right), coding
        found, decoded = rows_of(len(rows), 8, FP32), rows_of(len(rows), 8, FP32)
        launch([piece], [found], [message], len(rows), to_tensors=True, coding=coding)
        assert found[:2].isnan().any(1).all(), coding
        decoded.copy_(decode(codes, scales, coding).flatten(1))
        found[:2] = decoded[:2]
        assert same(found, decoded), coding


def check_refusals() -> None:
    tensor, message, piece = rows_of(4, 16, BF16), unwritten(4 * 32), Piece(0, 0, 32, 0, 32, 0)
    to, back = (table([piece], [tensor], [message], to_tensors=way) for way in (False, True))

    def refuses(says: str | None, call: Callable[..., object], *args: object, **more: object) -> None:
        with pytest.raises(AssertionError, match=says):
            call(*args, **more)

    part, far = piece._replace(offset=1, size=30), piece._replace(start=2**31)
    for says, pieces, tensors, to_tensors in (
        ("9 tensors and 1 messages: 8 fit", [piece], [tensor] * 9, False),
        ("no sums of all of", [piece, piece], [tensor.view(torch.int16)], True),
        ("a part of an element", [piece, part], [tensor], True), ("2 GiB", [far], [tensor], False),
    ):  # fmt: skip
        refuses(says, table, pieces, tensors, [message], to_tensors=to_tensors)
    for says, other, made, more in (
        ("aligned to", rows_of(4, 16, BF16, first=1), to, {}), ("not dense", rows_of(4, 32, BF16)[:, ::2], to, {}),
        ("pieces reach 32 bytes", rows_of(4, 8, BF16, gap=8), to, {}), (None, tensor[:3], to, {}),
        (None, tensor[:3], back, {}), (None, tensor.view(FP16), to, {}),
        (None, tensor, to, {"index": torch.arange(3)}), ("0 blocks of coded heads", tensor, to, {"coding": E4M3}),
    ):  # fmt: skip
        refuses(says, Launch, [other], [message], 4, made, **more)
    refuses("in a message of 112", Launch, [tensor], [message[:-16]], 4, to)


if __name__ == "__main__":
    from tests.unit_tests.exchange.test_kernel_copies import interpret

    interpret()
    from megatron_cp.exchange.kernels.triton import Launch

    check_any_pieces()
    check_far_apart()
    check_coded_extremes()
    check_refusals()
