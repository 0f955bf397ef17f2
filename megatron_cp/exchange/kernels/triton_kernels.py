"""The kernels behind `triton.py`: a program copies, adds up, codes or decodes a block of rows of a table's pieces.

Triton would make a kernel for each integer that is 1 and each that 16 divides, and take types from values: it is told
to do neither. A tile is `[units, rows, elements]` in this order, since Triton spreads the threads of a warp along the
first dimension after the elements, and only units lie side by side.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as in Triton's own

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from megatron_cp.exchange.kernels import pieces as tables

_TENSOR, _OFFSET, _START, _ROW, _PLACE, _MESSAGE, _HEAD_DIM, _SCALE, _KIND, _MORE, _EXTRA = (
    tl.constexpr(column)
    for column in (
        tables.TENSOR, tables.OFFSET, tables.START, tables.ROW, tables.PLACE, tables.MESSAGE, tables.HEAD_DIM,
        tables.SCALE, tables.KIND, tables.MORE, tables.EXTRA,
    )
)  # fmt: skip
_COMPUTED = tl.constexpr(tables.TYPE_STEP)  # kinds from here on are of elements that are computed with


@triton.jit(do_not_specialize=range(23))
def to_message_kernel(
    message: tl.int64,
    t0: tl.int64, t1: tl.int64, t2: tl.int64, t3: tl.int64, t4: tl.int64, t5: tl.int64, t6: tl.int64, t7: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    rows: tl.int64,
    index: tl.tensor,
    table: tl.tensor,
    entries: tl.int32,
    unit_blocks: tl.int32,
    head_blocks: tl.int32,
    LARGEST: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies or codes rows of tensors into a message."""
    tensors, strides = (t0, t1, t2, t3, t4, t5, t6, t7), (s0, s1, s2, s3, s4, s5, s6, s7)
    block = tl.program_id(0) % (unit_blocks + head_blocks)
    row = (tl.program_id(0) // (unit_blocks + head_blocks)).to(tl.int64) * ROWS
    if block < unit_blocks:
        first = table + block * UNITS
        _copy_to(first, entries, tensors, strides, index, message, rows, row, UNITS, ROWS)
    elif FORMAT is not None:
        first = table + unit_blocks * UNITS + (block - unit_blocks) * HEADS
        for start in range(0, ROWS, HEAD_ROWS):
            _encode_to(
                first, entries, tensors, strides, index, message, rows, row + start,
                HEAD_KINDS, FORMAT, LARGEST, HEAD_DIM, HEADS, HEAD_ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=range(32))
def from_message_kernel(
    m0: tl.int64, m1: tl.int64, m2: tl.int64, m3: tl.int64, m4: tl.int64, m5: tl.int64, m6: tl.int64, m7: tl.int64,
    t0: tl.int64, t1: tl.int64, t2: tl.int64, t3: tl.int64, t4: tl.int64, t5: tl.int64, t6: tl.int64, t7: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    rows: tl.int64,
    all_rows: tl.int64,
    index: tl.tensor,
    table: tl.tensor,
    entries: tl.int32,
    unit_blocks: tl.int32,
    head_blocks: tl.int32,
    most: tl.int32,
    SUM_KINDS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies, adds up or decodes rows of messages into tensors."""
    messages = (m0, m1, m2, m3, m4, m5, m6, m7)
    tensors, strides = (t0, t1, t2, t3, t4, t5, t6, t7), (s0, s1, s2, s3, s4, s5, s6, s7)
    block = tl.program_id(0) % (unit_blocks + head_blocks)
    row = (tl.program_id(0) // (unit_blocks + head_blocks)).to(tl.int64) * ROWS
    if block < unit_blocks:
        first = table + block * UNITS
        if tl.load(first + entries * _KIND) < _COMPUTED:
            _copy_from(first, entries, messages, tensors, strides, index, rows, all_rows, row, UNITS, ROWS)
        else:
            for start in range(0, ROWS, SUM_ROWS):
                _add_up(
                    table, first, entries, messages, tensors, strides, index, rows, all_rows, row + start, most,
                    SUM_KINDS, None, HEAD_DIM, UNITS, SUM_ROWS,
                )  # fmt: skip
    elif FORMAT is not None:
        first = table + unit_blocks * UNITS + (block - unit_blocks) * HEADS
        for start in range(0, ROWS, HEAD_ROWS):
            _add_up(
                table, first, entries, messages, tensors, strides, index, rows, all_rows, row + start, most,
                HEAD_KINDS, FORMAT, HEAD_DIM, HEADS, HEAD_ROWS,
            )  # fmt: skip


# -- where things are ------------------------------------------------------------------------------------------------


@triton.jit
def _live(entry: tl.tensor, entries: tl.tensor) -> tl.tensor:
    """`[units, 1]`: those that do not only fill up a block."""
    return (tl.load(entry + entries * _TENSOR) >= 0)[:, None]


@triton.jit
def _in_tensors(
    entry: tl.tensor, entries: tl.tensor, tensors: tl.tuple, strides: tl.tuple, row: tl.tensor
) -> tl.tensor:
    """`[units, rows]` addresses."""
    tensor = tl.load(entry + entries * _TENSOR)
    first = _chosen(tensor, tensors) + tl.load(entry + entries * _OFFSET)
    return first[:, None] + row[None, :] * _chosen(tensor, strides)[:, None]


@triton.jit
def _in_messages(
    entry: tl.tensor, entries: tl.tensor, messages: tl.tuple, rows: tl.tensor, row: tl.tensor
) -> tl.tensor:
    """`[units, rows]` addresses."""
    message = _chosen(tl.load(entry + entries * _MESSAGE), messages)
    return message[:, None] + _in_blocks(entry, entries, rows, row)


@triton.jit
def _in_blocks(entry: tl.tensor, entries: tl.tensor, rows: tl.tensor, row: tl.tensor) -> tl.tensor:
    """`[units, rows]`: bytes from the start of a message."""
    first = tl.load(entry + entries * _START).to(tl.int64) * rows + tl.load(entry + entries * _PLACE)
    return first[:, None] + row[None, :] * tl.load(entry + entries * _ROW)[:, None]


@triton.jit
def _chosen(number: tl.tensor, values: tl.tuple) -> tl.tensor:
    """`values[number]`, int64."""
    chosen = tl.zeros_like(number).to(tl.int64)
    for i in tl.static_range(len(values)):
        chosen = tl.where(number == i, values[i], chosen)
    return chosen


@triton.jit
def _indexed(row: tl.tensor, rows: tl.tensor, index: tl.tensor) -> tl.tensor:
    if index is None:
        return row
    else:  # noqa: RET505 - Triton compiles what follows an if
        return tl.load(index + row, mask=row < rows, other=0).to(tl.int64)


@triton.jit
def _elements(address: tl.tensor, TYPE: tl.constexpr, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Pointers to `ELEMENTS` elements from each address on, which is a multiple of `ALIGNED` of them."""
    elements = address.to(tl.pointer_type(TYPE))[:, :, None] + tl.arange(0, ELEMENTS)[None, None, :]
    return tl.multiple_of(elements, [1, 1, ALIGNED * TYPE.primitive_bitwidth // 8])


# -- copies ----------------------------------------------------------------------------------------------------------


@triton.jit
def _copy_to(
    first: tl.tensor,
    entries: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    index: tl.tensor,
    message: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    # Units of two words lie otherwise among the threads than others. In branches of their own each has its addresses,
    # and not both all of them in registers.
    kind = tl.load(first + entries * _KIND)
    if kind == 16:
        source, target, held = _ways_to(first, entries, tensors, strides, index, message, rows, row, UNITS, ROWS)
        _move(source, target, held, held, tl.int64, 2)
    else:
        source, target, held = _ways_to(first, entries, tensors, strides, index, message, rows, row, UNITS, ROWS)
        _move_words(kind, source, target, held, held)


@triton.jit
def _ways_to(
    first: tl.tensor, entries: tl.tensor, tensors: tl.tuple, strides: tl.tuple, index: tl.tensor, message: tl.tensor,
    rows: tl.tensor, row: tl.tensor, UNITS: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """`[units, rows]` addresses to read and to write, and which of them there are."""
    entry = first + tl.arange(0, UNITS)
    row += tl.arange(0, ROWS)
    source = _in_tensors(entry, entries, tensors, strides, _indexed(row, rows, index))
    target = message + _in_blocks(entry, entries, rows, row)
    return source, target, _live(entry, entries) & (row < rows)[None, :]


@triton.jit
def _copy_from(
    first: tl.tensor,
    entries: tl.tensor,
    messages: tl.tuple,
    tensors: tl.tuple,
    strides: tl.tuple,
    index: tl.tensor,
    rows: tl.tensor,
    all_rows: tl.tensor,
    row: tl.tensor,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    kind = tl.load(first + entries * _KIND)
    if kind == 16:  # in branches as above
        source, target, read, write = _ways_from(
            first, entries, messages, tensors, strides, index, rows, all_rows, row, UNITS, ROWS
        )
        _move(source, target, read, write, tl.int64, 2)
    else:
        source, target, read, write = _ways_from(
            first, entries, messages, tensors, strides, index, rows, all_rows, row, UNITS, ROWS
        )
        _move_words(kind, source, target, read, write)


@triton.jit
def _ways_from(
    first: tl.tensor, entries: tl.tensor, messages: tl.tuple, tensors: tl.tuple, strides: tl.tuple, index: tl.tensor,
    rows: tl.tensor, all_rows: tl.tensor, row: tl.tensor, UNITS: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """`[units, rows]` addresses to read and to write, and which of them are read and written."""
    entry = first + tl.arange(0, UNITS)
    row += tl.arange(0, ROWS)
    source = _in_messages(entry, entries, messages, rows, _indexed(row, rows, index))
    target = _in_tensors(entry, entries, tensors, strides, row)
    live = _live(entry, entries)
    return source, target, live & (row < rows)[None, :], live & (row < all_rows)[None, :]


@triton.jit
def _move_words(kind: tl.tensor, source: tl.tensor, target: tl.tensor, read: tl.tensor, write: tl.tensor) -> None:
    """Moves units of one word from addresses to addresses. What is not read is written as zero."""
    if kind == 8:
        _move(source, target, read, write, tl.int64, 1)
    elif kind == 4:
        _move(source, target, read, write, tl.int32, 1)
    elif kind == 2:
        _move(source, target, read, write, tl.int16, 1)
    else:
        _move(source, target, read, write, tl.int8, 1)


@triton.jit
def _move(
    source: tl.tensor, target: tl.tensor, read: tl.tensor, write: tl.tensor, TYPE: tl.constexpr, ELEMENTS: tl.constexpr
) -> None:
    moved = tl.load(_elements(source, TYPE, ELEMENTS, ELEMENTS), mask=read[:, :, None], other=0)
    tl.store(_elements(target, TYPE, ELEMENTS, ELEMENTS), moved, mask=write[:, :, None])


# -- sums and codes --------------------------------------------------------------------------------------------------


@triton.constexpr_function
def _type_of(kind: int) -> tl.dtype:
    return (tl.bfloat16, tl.float16, tl.float32, tl.float64)[kind // tables.TYPE_STEP - 1]


@triton.constexpr_function
def _elements_of(kind: int) -> int:
    """Those of one access."""
    return kind % tables.TYPE_STEP // tables.TYPES[kind // tables.TYPE_STEP - 1].itemsize


@triton.constexpr_function
def _sum_type_of(kind: int) -> tl.dtype:
    return tl.float64 if _type_of(kind) == tl.float64 else tl.float32


@triton.jit
def _add_up(
    table: tl.tensor,
    first: tl.tensor,
    entries: tl.tensor,
    messages: tl.tuple,
    tensors: tl.tuple,
    strides: tl.tuple,
    index: tl.tensor,
    rows: tl.tensor,
    all_rows: tl.tensor,
    row: tl.tensor,
    most: tl.tensor,
    KINDS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    entry = first + tl.arange(0, UNITS)
    row += tl.arange(0, ROWS)
    target = (tensors, strides, row)  # addresses are computed where they are written to, and not held until then
    live = _live(entry, entries)
    read, write = live & (row < rows)[None, :], live & (row < all_rows)[None, :]
    source = (table, entry, entries, most, messages, rows, _indexed(row, rows, index), read)
    kind = tl.load(first + entries * _KIND)
    for i in tl.static_range(len(KINDS)):
        if kind == KINDS[i]:
            _sum(source, target, write, KINDS[i], FORMAT, HEAD_DIM)


@triton.jit
def _sum(
    source: tl.tuple,
    target: tl.tuple,
    write: tl.tensor,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Adds up what stands in messages, in the order of the table, and rounds once."""
    table, entry, entries, most, messages, rows, row, read = source
    more, extra = tl.load(entry + entries * _MORE), tl.load(entry + entries * _EXTRA)
    total = _term(entry, entries, messages, rows, row, read, KIND, FORMAT, HEAD_DIM)
    for number in range(most):
        counts = number < more
        at = table + tl.where(counts, extra + number, 0)
        term = _term(at, entries, messages, rows, row, read & counts[:, None], KIND, FORMAT, HEAD_DIM)
        total = tl.where(counts[:, None, None], total + term, total)
    rounded = total.to(_type_of(KIND))
    tensors, strides, target_row = target
    address = _in_tensors(entry, entries, tensors, strides, target_row)
    if FORMAT is None:
        elements = _elements(address, _type_of(KIND), _elements_of(KIND), _elements_of(KIND))
        tl.store(elements, rounded, mask=write[:, :, None])
    else:
        elements = _elements(address, _type_of(KIND), HEAD_DIM, _elements_of(KIND))
        tl.store(elements, rounded, mask=write[:, :, None] & _in_head(entry, entries, _elements_of(KIND), HEAD_DIM))


@triton.jit
def _term(
    entry: tl.tensor,
    entries: tl.tensor,
    messages: tl.tuple,
    rows: tl.tensor,
    row: tl.tensor,
    read: tl.tensor,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """`[units, rows, elements]` elements of a message."""
    source = _in_messages(entry, entries, messages, rows, row)
    if FORMAT is None:
        elements = _elements(source, _type_of(KIND), _elements_of(KIND), _elements_of(KIND))
        return tl.load(elements, mask=read[:, :, None], other=0).to(_sum_type_of(KIND))
    else:  # noqa: RET505 - Triton compiles what follows an if
        elements = _elements(source, tl.int8, HEAD_DIM, _elements_of(KIND))
        inside = read[:, :, None] & _in_head(entry, entries, _elements_of(KIND), HEAD_DIM)
        code = tl.load(elements, mask=inside, other=0).to(FORMAT, bitcast=True).to(tl.float32)
        scale = tl.load(_scale(entry, entries, source), mask=read, other=0)
        return (code * scale[:, :, None]).to(_sum_type_of(KIND))


@triton.jit
def _encode_to(
    first: tl.tensor,
    entries: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    index: tl.tensor,
    message: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    KINDS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    entry = first + tl.arange(0, HEADS)
    row += tl.arange(0, ROWS)
    source = _in_tensors(entry, entries, tensors, strides, _indexed(row, rows, index))
    target = message + _in_blocks(entry, entries, rows, row)
    held = _live(entry, entries) & (row < rows)[None, :]
    kind = tl.load(first + entries * _KIND)
    for i in tl.static_range(len(KINDS)):
        if kind == KINDS[i]:
            _encode(entry, entries, source, target, held, KINDS[i], FORMAT, LARGEST, HEAD_DIM)


@triton.jit
def _encode(
    entry: tl.tensor,
    entries: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    held: tl.tensor,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Codes heads as `exchange.coding.encode` does."""
    inside = held[:, :, None] & _in_head(entry, entries, _elements_of(KIND), HEAD_DIM)
    x = tl.load(_elements(source, _type_of(KIND), HEAD_DIM, _elements_of(KIND)), mask=inside, other=0).to(tl.float32)
    # As integers, numbers without their signs have the same order, and NaN is the largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LARGEST)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays
    tl.store(_scale(entry, entries, target), scale, mask=held)  # before its address is in the way of the division
    code = tl.div_rn(x, scale[:, :, None])
    if FORMAT == tl.int8:  # noqa: SIM300
        code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to a whole number, halves to the even one
    code = code.to(FORMAT).to(tl.int8, bitcast=True)
    tl.store(_elements(target, tl.int8, HEAD_DIM, _elements_of(KIND)), code, mask=inside)


@triton.jit
def _in_head(entry: tl.tensor, entries: tl.tensor, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """`[heads, 1, HEAD_DIM]`: which elements a head has; so many as are a multiple of `ALIGNED`."""
    head_dim = tl.multiple_of(tl.load(entry + entries * _HEAD_DIM), [ALIGNED])
    return (tl.arange(0, HEAD_DIM)[None, :] < head_dim[:, None])[:, None, :]


@triton.jit
def _scale(entry: tl.tensor, entries: tl.tensor, head: tl.tensor) -> tl.tensor:
    """`[heads, rows]` pointers to the scales of heads at these addresses of a message."""
    return (head + tl.load(entry + entries * _SCALE)[:, None]).to(tl.pointer_type(tl.float32))
