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
from megatron_cp.exchange.kernels.pieces import GROUP, HEADS, MOST, ROWS, Pieces, alignment_of
from megatron_cp.exchange.kernels.triton_kernels import from_message_kernel, to_message_kernel
from megatron_cp.torch_private import current_device

CODED = 2048  # elements of heads in registers at a time


class Launch:
    """A prepared kernel launch that lacks only the addresses: of other tensors and messages with the same form.

    The first launch with a table goes through Triton, which compiles the kernel or finds it. Later ones, of all layers
    and batches, call the compiled kernel directly, which takes a tenth of the host's time. Triton's own hooks do not
    see those; CUDA's profilers do.

    Args:
        kernel: the kernel to launch.
        programs: the number of programs of one launch.
        num_tensors: the number of addresses that are tensors'.
        most_messages: the number of message arguments of the kernel.
        pieces: the table.
        numbers: the kernel's arguments between the addresses and the index.
        index: `[rows]` row indices, or None.
        constants: the kernel's arguments after the table.
        options: options of the compilation.
    """

    def __init__(
        self, kernel: Any, programs: int, num_tensors: int, most_messages: int, pieces: Pieces, numbers: Sequence[int],
        index: Tensor | None, constants: Sequence[Any], **options: Any,
    ) -> None:  # fmt: skip
        self.kernel, self._programs, self._pieces, self._options = kernel, programs, pieces, options
        self._num_tensors, self._most_messages = num_tensors, most_messages
        self._rest = (*numbers, index, *_table(pieces), *constants)
        self._numbers = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in self._rest)
        self._device = pieces.table.device
        self._variant = (kernel, None if index is None else index.dtype, tuple(map(str, constants)))

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Queues the kernel on the current stream, and returns True.

        Args:
            addresses: addresses of the tensors, then of the messages.
        """
        if not self._programs:
            return True
        if self._device.type == "cuda" and current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(addresses)
        order_tables(self._device)  # the cached table may have been made by another stream
        tensors, messages = addresses[: self._num_tensors], addresses[self._num_tensors :]
        given = (
            *messages, *(0,) * (self._most_messages - len(messages)), *tensors, *(0,) * (MOST - len(tensors)),
        )  # fmt: skip
        compiled = self._pieces.compiled.get(self._variant)
        if compiled is None:
            compiled = self.kernel[(self._programs,)](*given, *self._rest, **self._options)
            if compiled is not None:  # None under Triton's interpreter
                self._pieces.compiled[self._variant] = compiled
            return True
        stream = current_stream(self._device)
        compiled.run(
            self._programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *given, *self._numbers,
        )  # fmt: skip
        return True


def to_message(
    tensors: Sequence[Tensor], message: Tensor, rows: int, pieces: Pieces, *, index: Tensor | None = None,
    coding: Format | None = None,
) -> Launch:  # fmt: skip
    """Prepares a launch that writes every piece to its place in a message, coding the coded ones.

    Args:
        tensors: `[at least rows, ...]` each; a row is dense, and rows are any distance apart.
        message: `[bytes]`.
        rows: rows of each block of the message.
        pieces: a table for these tensors and this message.
        index: `[rows]` int32 or int64: the tensors' row for each row of the message; the same one if left out.
        coding: the format of coded pieces. FP8 needs a GPU of compute capability 8.9 or higher: for others Triton has
            no E4M3, and rounds twice to E5M2.
    """
    assert not pieces.to_tensors, "a table for copies from messages"
    assert index is not None or all(tensor.shape[0] >= rows for tensor in tensors)
    _check(tensors, [message], rows, pieces, index, coding)
    programs = triton.cdiv(rows, GROUP) * pieces.programs[-1]
    constants = _constants(pieces, coding)
    return Launch(
        to_message_kernel, programs, len(tensors), 1, pieces, [*_strides(tensors), rows], index,
        [coding.largest if coding else None, *constants.values()],
    )  # fmt: skip


def from_messages(
    messages: Sequence[Tensor], tensors: Sequence[Tensor], rows: int, pieces: Pieces, *, index: Tensor | None = None,
    coding: Format | None = None,
) -> Launch:  # fmt: skip
    """Prepares a launch that writes every piece, or sum of pieces, to its place in a tensor, decoding the coded ones.

    Sums run in the order of the pieces, in float32, or in float64 for float64 tensors, and are rounded once.

    Args:
        messages: `[bytes]` each.
        tensors: `[at least rows, ...]` each; a row is dense, and rows are any distance apart. Rows from `rows` on
            become zero, where there are pieces.
        rows: rows of each block of the messages.
        pieces: a table for these tensors and messages.
        index: `[rows]` int32 or int64: the messages' row for each row of the tensors; the same one if left out.
        coding: the format of coded pieces.
    """
    assert pieces.to_tensors, "a table for copies to messages"
    all_rows = max((tensor.shape[0] for tensor in tensors), default=0)
    assert all(tensor.shape[0] == all_rows >= rows for tensor in tensors)
    _check(tensors, messages, rows, pieces, index, coding)
    programs = triton.cdiv(all_rows, GROUP) * pieces.programs[-1]
    constants = _constants(pieces, coding)
    return Launch(
        from_message_kernel, programs, len(tensors), MOST, pieces, [*_strides(tensors), rows, all_rows], index,
        [pieces.most, len(messages), *constants.values()],
        enable_fp_fusion=False,  # products are rounded before they are added
    )  # fmt: skip


def _check(
    tensors: Sequence[Tensor],
    messages: Sequence[Tensor],
    rows: int,
    pieces: Pieces,
    index: Tensor | None,
    coding: Format | None,
) -> None:
    """Checks that the kernels read and write only memory that exists."""
    assert tuple(tensor.dtype for tensor in tensors) == pieces.types
    alignment = alignment_of(tensors, messages)
    assert alignment == pieces.alignment, f"tensors and messages are aligned to {alignment}, not {pieces.alignment}"
    for tensor, reach in zip(tensors, pieces.tensor_bytes, strict=True):
        assert _row_bytes(tensor) >= reach, f"pieces reach {reach} bytes into rows of {tensor.shape}, {tensor.dtype}"
    for message, row in zip(messages, pieces.message_bytes, strict=True):
        assert message.is_contiguous()
        assert message.nbytes >= rows * row, f"{rows} rows of {row} bytes in a message of {message.nbytes}"
    assert index is None or (index.is_contiguous() and index.shape == (rows,)), index
    assert (coding is not None) == (pieces.head_blocks > 0), f"{coding} for {pieces.head_blocks} blocks of coded heads"


def _row_bytes(tensor: Tensor) -> int:
    """Returns the bytes of one row, which must be dense."""
    if 0 in tensor.shape[1:]:
        return 0
    size = 1
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        assert length == 1 or stride == size, f"rows of {tensor.shape} with strides {tensor.stride()} are not dense"
        size *= length
    return size * tensor.element_size()


def _strides(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the bytes from row to row of each tensor."""
    return [tensor.stride(0) * tensor.element_size() for tensor in tensors] + [0] * (MOST - len(tensors))


def _table(pieces: Pieces) -> tuple[Tensor, int, int, int, int]:
    return pieces.table, pieces.table.shape[1], *pieces.programs


def _constants(pieces: Pieces, coding: Format | None) -> dict[str, Any]:
    head_dim = triton.next_power_of_2(max(pieces.head_dim, 1))
    return {
        "TENSORS": len(pieces.types),
        "KINDS": pieces.kinds,
        "FORMAT": _FORMATS[coding.dtype] if coding else None,
        "HEAD_KINDS": pieces.head_kinds,
        "HEAD_DIM": head_dim,
        "HEAD_ROWS": min(max(CODED // (HEADS * head_dim), 1), ROWS),
    }


_FORMATS = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5, "int8": tl.int8}
