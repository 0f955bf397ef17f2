"""Launches of the Triton kernels for a table of `Pieces`: each call is one launch.

A program takes `ROWS` rows of `UNITS` units of one kind, `GROUP` rows of `FEW` of them, or `ROWS` rows of `HEADS` coded
heads. It looks them up in the table; then each thread moves the same unit of several rows. Tensors and messages come as
addresses, and lengths, strides and places as plain numbers: one kernel serves all of them. The kinds of units that a
table has, how many tensors and messages there are, what is computed with (the types of sums, the format and size of
coded heads) and whether there is an index make another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from megatron_cp.exchange.codec import Format
from megatron_cp.exchange.device import current_stream, order_tables
from megatron_cp.exchange.kernels.pieces import GROUP, HEADS, MOST, ROWS, Pieces, alignment_of, has_dense_rows
from megatron_cp.exchange.kernels.triton_kernels import from_message_kernel, to_message_kernel
from megatron_cp.torch_private import current_device

CODED = 2048  # elements of heads in registers at a time


class Launch:
    """A prepared kernel launch that lacks only the addresses: of other tensors and messages with the same form.

    With a table for writing to messages it writes every piece to its place in the only message, coding the coded ones.
    With one for writing to tensors it writes every piece, or sum of pieces, to its place in a tensor, decoding the
    coded ones. Sums run in the order of the pieces, in float32, or for float64 tensors in float64, and are rounded
    once.

    The first launch with a table goes through Triton, which compiles the kernel or finds it. Later ones, of all layers
    and batches, call the compiled kernel directly, which takes a tenth of the host's time. Triton's own hooks do not
    see those; CUDA's profilers do.

    Args:
        tensors: `[at least rows, ...]` each; a row is dense, and rows are any distance apart. Where they are written,
            rows from `rows` on become zero, where there are pieces.
        messages: `[bytes]` each.
        rows: rows of each block of the messages.
        index: `[rows]` int32 or int64: for each row that is written, the row that is read; the same one if left out.
        coding: the format of coded pieces. Coding in FP8 needs a GPU of compute capability 8.9 or higher: for others
            Triton has no E4M3, and rounds twice to E5M2.
    """

    def __init__(
        self, tensors: Sequence[Tensor], messages: Sequence[Tensor], rows: int, pieces: Pieces, *,
        index: Tensor | None = None, coding: Format | None = None,
    ) -> None:  # fmt: skip
        all_rows = max((len(tensor) for tensor in tensors), default=0) if pieces.to_tensors else rows
        _check(tensors, messages, rows, all_rows, pieces, index, coding)
        head_dim = triton.next_power_of_2(max(pieces.head_dim, 1))
        constants: list[Any] = [
            len(tensors), pieces.kinds, _FORMATS[coding.dtype] if coding else None, pieces.head_kinds, head_dim,
            min(max(CODED // (HEADS * head_dim), 1), ROWS),
        ]  # fmt: skip
        numbers = [
            *(tensor.stride(0) * tensor.element_size() for tensor in tensors),
            *(0,) * (MOST - len(tensors)),
            rows,
        ]
        if pieces.to_tensors:
            self.kernel, most_messages = from_message_kernel, MOST
            numbers.append(all_rows)
            constants = [pieces.most, len(messages), *constants]
            self._options = {"enable_fp_fusion": False}  # products are rounded before they are added
        else:
            self.kernel, most_messages = to_message_kernel, 1
            constants = [coding.largest if coding else None, *constants]
            self._options = {}
        self._programs, self._pieces = triton.cdiv(all_rows, GROUP) * pieces.programs[-1], pieces
        self._num_tensors = len(tensors)
        self._spare = (0,) * (most_messages - len(messages)), (0,) * (MOST - len(tensors))
        self._rest = (*numbers, index, pieces.table, pieces.table.shape[1], *pieces.programs, *constants)
        self._numbers = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in self._rest)
        self._device = pieces.table.device
        self._variant = (self.kernel, None if index is None else index.dtype, tuple(map(str, constants)))

    def __call__(self, addresses: Sequence[int]) -> None:
        """Queues the kernel on the current stream."""
        if not self._programs:
            return
        if self._device.type == "cuda" and current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self(addresses)
            return
        order_tables(self._device)  # the cached table may have been made by another stream
        tensors, messages = addresses[: self._num_tensors], addresses[self._num_tensors :]
        no_messages, no_tensors = self._spare
        given = (*messages, *no_messages, *tensors, *no_tensors)
        compiled = self._pieces.compiled.get(self._variant)
        if compiled is None:
            compiled = self.kernel[(self._programs,)](*given, *self._rest, **self._options)
            if compiled is not None:  # None under Triton's interpreter
                self._pieces.compiled[self._variant] = compiled
            return
        stream = current_stream(self._device)
        compiled.run(
            self._programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *given, *self._numbers,
        )  # fmt: skip


def _check(
    tensors: Sequence[Tensor], messages: Sequence[Tensor], rows: int, all_rows: int, pieces: Pieces,
    index: Tensor | None, coding: Format | None,
) -> None:  # fmt: skip
    """Checks that the kernels read and write only memory that exists."""
    if pieces.to_tensors:
        assert all(len(tensor) == all_rows >= rows for tensor in tensors)
    else:
        assert index is not None or all(len(tensor) >= rows for tensor in tensors)
    assert tuple(tensor.dtype for tensor in tensors) == pieces.types
    alignment = alignment_of(tensors, messages)
    assert alignment == pieces.alignment, f"tensors and messages are aligned to {alignment}, not {pieces.alignment}"
    for tensor, reach in zip(tensors, pieces.tensor_bytes, strict=True):
        assert has_dense_rows(tensor), f"rows of {tensor.shape} with strides {tensor.stride()} are not dense"
        row = tensor.shape[1:].numel() * tensor.element_size()
        assert row >= reach, f"pieces reach {reach} bytes into rows of {tensor.shape}, {tensor.dtype}"
    for message, row in zip(messages, pieces.message_bytes, strict=True):
        assert message.is_contiguous()
        assert message.nbytes >= rows * row, f"{rows} rows of {row} bytes in a message of {message.nbytes}"
    assert index is None or (index.is_contiguous() and index.shape == (rows,)), index
    assert (coding is not None) == (pieces.head_blocks > 0), f"{coding} for {pieces.head_blocks} blocks of coded heads"


_FORMATS = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5, "int8": tl.int8}
