"""The kernels behind `triton.py`: a program copies, adds up, codes or decodes a block of rows of a table's pieces.

Triton would make a kernel for each integer that is 1 and each that 16 divides, and take types from values: it is told
to do neither. What a table has is constant, so that only that is compiled: the kinds of its units, and how many tensors
and messages there are.

A tile is `[units, steps, elements]` in this order, since Triton spreads the threads of a warp along the first dimension
after the elements, and only units lie side by side. Of copies and sums, that dimension is a program's threads: each has
one unit and takes a row of it at each step, and others have the same unit for other rows. So a program's shape is
numbers, and none is compiled for it.
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
_COMPUTED = tl.constexpr(tables.TYPE_STEP)  # kinds from here on have elements that are computed with
_UNITS, _ROWS, _FEW, _GROUP, _PARTS, _HEADS = (
    tl.constexpr(number) for number in (tables.UNITS, tables.ROWS, tables.FEW, tables.GROUP, tables.PARTS, tables.HEADS)
)
THREADS = 128  # threads of a program: Triton's four warps
_THREADS, _STEPS = tl.constexpr(THREADS), tl.constexpr(tables.UNITS * tables.ROWS // THREADS)
# Logarithm, to base 2, of the rows between two steps of a thread: with `UNITS` and with `FEW` units.
_APART, _FEW_APART = (tl.constexpr((THREADS // units).bit_length() - 1) for units in (tables.UNITS, tables.FEW))
# Sums are in registers. With more at a time, fewer programs of copies would fit a multiprocessor.
_SUM_STEPS = tl.constexpr(2)


@triton.jit(do_not_specialize=range(24))
def to_message_kernel(
    message: tl.int64,
    t0: tl.int64, t1: tl.int64, t2: tl.int64, t3: tl.int64, t4: tl.int64, t5: tl.int64, t6: tl.int64, t7: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    rows: tl.int64,
    index: tl.tensor,
    table: tl.tensor,
    entries: tl.int32,
    wide: tl.int32,
    units: tl.int32,
    programs: tl.int32,
    LARGEST: tl.constexpr,
    TENSORS: tl.constexpr,
    KINDS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies or codes rows of tensors into a message."""
    tensors = (t0, t1, t2, t3, t4, t5, t6, t7)[:TENSORS]
    strides = (s0, s1, s2, s3, s4, s5, s6, s7)[:TENSORS]
    number = tl.program_id(0) % programs
    row = (tl.program_id(0) // programs).to(tl.int64) * _GROUP
    if number < units:
        entry, at = _units_of(table, number, wide, row)
        kind = _kind_of(table + number * _FEW, entries, KINDS)
        for i in tl.static_range(len(KINDS)):
            if kind == KINDS[i]:
                _copy_to(entry, entries, tensors, strides, index, message, rows, at, KINDS[i])
    elif FORMAT is not None:
        first, row = _heads_of(table, number, units, row)
        kind = _kind_of(first, entries, HEAD_KINDS)
        for start in range(0, _ROWS, HEAD_ROWS):
            for i in tl.static_range(len(HEAD_KINDS)):
                if kind == HEAD_KINDS[i]:
                    entry, at = _block_of(first, row + start)
                    _encode_to(
                        entry, entries, tensors, strides, index, message, rows, at,
                        HEAD_KINDS[i], FORMAT, LARGEST, HEAD_DIM, HEAD_ROWS,
                    )  # fmt: skip


@triton.jit(do_not_specialize=range(33))
def from_message_kernel(
    m0: tl.int64, m1: tl.int64, m2: tl.int64, m3: tl.int64, m4: tl.int64, m5: tl.int64, m6: tl.int64, m7: tl.int64,
    t0: tl.int64, t1: tl.int64, t2: tl.int64, t3: tl.int64, t4: tl.int64, t5: tl.int64, t6: tl.int64, t7: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    rows: tl.int64,
    all_rows: tl.int64,
    index: tl.tensor,
    table: tl.tensor,
    entries: tl.int32,
    wide: tl.int32,
    units: tl.int32,
    programs: tl.int32,
    most: tl.int32,
    MESSAGES: tl.constexpr,
    TENSORS: tl.constexpr,
    KINDS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies, adds up or decodes rows of messages into tensors."""
    messages = (m0, m1, m2, m3, m4, m5, m6, m7)[:MESSAGES]
    tensors = (t0, t1, t2, t3, t4, t5, t6, t7)[:TENSORS]
    strides = (s0, s1, s2, s3, s4, s5, s6, s7)[:TENSORS]
    number = tl.program_id(0) % programs
    row = (tl.program_id(0) // programs).to(tl.int64) * _GROUP
    if number < units:
        entry, at = _units_of(table, number, wide, row)
        kind = _kind_of(table + number * _FEW, entries, KINDS)
        for i in tl.static_range(len(KINDS)):
            if kind == KINDS[i]:
                if KINDS[i] < _COMPUTED:
                    _copy_from(entry, entries, messages, tensors, strides, index, rows, all_rows, at, KINDS[i])
                else:
                    for start in range(0, _STEPS, _SUM_STEPS):
                        _add_up(
                            table, entry, entries, messages, tensors, strides, index, rows, all_rows,
                            _later(at, start), most, KINDS[i], None, HEAD_DIM, _SUM_STEPS,
                        )  # fmt: skip
    elif FORMAT is not None:
        first, row = _heads_of(table, number, units, row)
        kind = _kind_of(first, entries, HEAD_KINDS)
        for start in range(0, _ROWS, HEAD_ROWS):
            for i in tl.static_range(len(HEAD_KINDS)):
                if kind == HEAD_KINDS[i]:
                    entry, at = _block_of(first, row + start)
                    _add_up(
                        table, entry, entries, messages, tensors, strides, index, rows, all_rows, at, most,
                        HEAD_KINDS[i], FORMAT, HEAD_DIM, HEAD_ROWS,
                    )  # fmt: skip


# At a step, a unit's row is `row + own + (step << apart)`. `at` is these: `row` a number, `own` one for each unit.


@triton.jit
def _kind_of(entry: tl.tensor, entries: tl.tensor, KINDS: tl.constexpr) -> tl.tensor:
    if len(KINDS) == 1:
        return KINDS[0]
    else:  # noqa: RET505 - Triton compiles what follows an if
        return tl.load(entry + entries * _KIND)


@triton.jit
def _units_of(table: tl.tensor, number: tl.tensor, wide: tl.tensor, row: tl.tensor) -> tl.tuple:
    """Returns each thread's unit in the table, and `at` of the program."""
    thread, is_wide = tl.arange(0, _THREADS), number < wide
    first = tl.where(is_wide, number // _PARTS * _UNITS, number * _FEW)
    unit = tl.where(is_wide, thread % _UNITS, thread % _FEW)
    row += tl.where(is_wide, number % _PARTS * _ROWS, 0)
    own = tl.where(is_wide, thread // _UNITS, thread // _FEW)
    return table + first + unit, (row, own, tl.where(is_wide, _APART, _FEW_APART))


@triton.jit
def _later(at: tl.tuple, steps: tl.tensor) -> tl.tuple:
    row, own, apart = at
    return row + (steps << apart), own, apart


@triton.jit
def _heads_of(table: tl.tensor, number: tl.tensor, units: tl.tensor, row: tl.tensor) -> tl.tuple:
    """Returns a program's first head in the table, and its first row."""
    number -= units
    return table + units * _FEW + number // _PARTS * _HEADS, row + number % _PARTS * _ROWS


@triton.jit
def _block_of(first: tl.tensor, row: tl.tensor) -> tl.tuple:
    """Returns heads in the table, and `at`: each head has every row."""
    return first + tl.arange(0, _HEADS), (row, tl.zeros([_HEADS], tl.int32), 0)


@triton.jit
def _held(live: tl.tensor, rows: tl.tensor, at: tl.tuple, STEPS: tl.constexpr) -> tl.tensor:
    """Returns `[units, steps]`: True for rows that exist, of units that are not padding."""
    row, own, apart = at
    left = tl.minimum(tl.maximum(rows - row, 0), _GROUP).to(tl.int32)
    steps = tl.where(live, (left - own + (1 << apart) - 1) >> apart, 0)
    return tl.arange(0, STEPS)[None, :] < steps[:, None]


@triton.jit
def _indexed(index: tl.tensor, held: tl.tensor, at: tl.tuple, STEPS: tl.constexpr) -> tl.tensor:
    """Returns `[units, steps]`: the rows that an index has instead."""
    row, own, apart = at
    return tl.load(index + (row + own[:, None] + (tl.arange(0, STEPS) << apart)[None, :]), mask=held, other=0)


@triton.jit
def _live(entry: tl.tensor, entries: tl.tensor) -> tl.tensor:
    """Returns `[units]`: True for units that are not padding."""
    return tl.load(entry + entries * _TENSOR) >= 0


@triton.jit
def _in_tensors(
    entry: tl.tensor, entries: tl.tensor, tensors: tl.tuple, strides: tl.tuple, indexed: tl.tensor, at: tl.tuple,
    STEPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns `[units, steps]` addresses."""
    tensor = tl.load(entry + entries * _TENSOR)
    first = _chosen(tensor, tensors) + tl.load(entry + entries * _OFFSET)
    return _spread(first, _chosen(tensor, strides), indexed, at, STEPS)


@triton.jit
def _in_messages(
    entry: tl.tensor, entries: tl.tensor, messages: tl.tuple, rows: tl.tensor, indexed: tl.tensor, at: tl.tuple,
    STEPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns `[units, steps]` addresses."""
    message = _chosen(tl.load(entry + entries * _MESSAGE), messages)
    first = message + tl.load(entry + entries * _START).to(tl.int64) * rows + tl.load(entry + entries * _PLACE)
    return _spread(first, tl.load(entry + entries * _ROW).to(tl.int64), indexed, at, STEPS)


@triton.jit
def _chosen(number: tl.tensor, values: tl.tuple) -> tl.tensor:
    """Returns `values[number]`, int64."""
    chosen = tl.zeros_like(number).to(tl.int64) + values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(number == i, values[i], chosen)
    return chosen


@triton.jit
def _spread(first: tl.tensor, stride: tl.tensor, indexed: tl.tensor, at: tl.tuple, STEPS: tl.constexpr) -> tl.tensor:
    """Returns `[units, steps]` addresses of rows from the first address and the stride."""
    if indexed is None:
        row, own, apart = at
        return (first + (row + own) * stride)[:, None] + (stride << apart)[:, None] * tl.arange(0, STEPS)[None, :]
    else:  # noqa: RET505 - Triton compiles what follows an if
        return first[:, None] + indexed.to(tl.int64) * stride[:, None]


@triton.jit
def _elements(address: tl.tensor, TYPE: tl.constexpr, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Returns pointers to `ELEMENTS` elements from each address on, which is a multiple of `ALIGNED` of them."""
    elements = address.to(tl.pointer_type(TYPE))[:, :, None] + tl.arange(0, ELEMENTS)[None, None, :]
    return tl.multiple_of(elements, [1, 1, ALIGNED * TYPE.primitive_bitwidth // 8])


@triton.jit
def _copy_to(
    entry: tl.tensor, entries: tl.tensor, tensors: tl.tuple, strides: tl.tuple, index: tl.tensor, message: tl.tensor,
    rows: tl.tensor, at: tl.tuple, KIND: tl.constexpr,
) -> None:  # fmt: skip
    held = _held(_live(entry, entries), rows, at, _STEPS)
    indexed = None if index is None else _indexed(index, held, at, _STEPS)
    source = _in_tensors(entry, entries, tensors, strides, indexed, at, _STEPS)
    target = _in_messages(entry, entries, (message,), rows, None, at, _STEPS)
    _move(source, target, held, held, KIND)


@triton.jit
def _copy_from(
    entry: tl.tensor, entries: tl.tensor, messages: tl.tuple, tensors: tl.tuple, strides: tl.tuple, index: tl.tensor,
    rows: tl.tensor, all_rows: tl.tensor, at: tl.tuple, KIND: tl.constexpr,
) -> None:  # fmt: skip
    live = _live(entry, entries)
    read, write = _held(live, rows, at, _STEPS), _held(live, all_rows, at, _STEPS)
    indexed = None if index is None else _indexed(index, read, at, _STEPS)
    source = _in_messages(entry, entries, messages, rows, indexed, at, _STEPS)
    target = _in_tensors(entry, entries, tensors, strides, None, at, _STEPS)
    _move(source, target, read, write, KIND)


@triton.jit
def _move(source: tl.tensor, target: tl.tensor, read: tl.tensor, write: tl.tensor, KIND: tl.constexpr) -> None:
    """Moves units from addresses to addresses. Units that are not read are written as zero."""
    words = _elements(source, _word_of(KIND), _words_of(KIND), _words_of(KIND))
    moved = tl.load(words, mask=read[:, :, None], other=0)
    tl.store(_elements(target, _word_of(KIND), _words_of(KIND), _words_of(KIND)), moved, mask=write[:, :, None])


@triton.constexpr_function
def _word_of(kind: int) -> tl.dtype:
    return {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[min(kind, 8)]


@triton.constexpr_function
def _words_of(kind: int) -> int:
    return max(kind // 8, 1)


@triton.constexpr_function
def _type_of(kind: int) -> tl.dtype:
    return (tl.bfloat16, tl.float16, tl.float32, tl.float64)[kind // tables.TYPE_STEP - 1]


@triton.constexpr_function
def _elements_of(kind: int) -> int:
    return kind % tables.TYPE_STEP // tables.TYPES[kind // tables.TYPE_STEP - 1].itemsize


@triton.constexpr_function
def _sum_type_of(kind: int) -> tl.dtype:
    return tl.float64 if _type_of(kind) == tl.float64 else tl.float32


@triton.jit
def _add_up(
    table: tl.tensor, entry: tl.tensor, entries: tl.tensor, messages: tl.tuple, tensors: tl.tuple, strides: tl.tuple,
    index: tl.tensor, rows: tl.tensor, all_rows: tl.tensor, at: tl.tuple, most: tl.tensor,
    KIND: tl.constexpr, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up message elements in the order of the table, and rounds once."""
    live = _live(entry, entries)
    read = _held(live, rows, at, STEPS)
    indexed = None if index is None else _indexed(index, read, at, STEPS)
    extra = tl.load(entry + entries * _EXTRA)
    end = extra + tl.load(entry + entries * _MORE)
    total = _term(entry, entries, messages, rows, indexed, at, read, KIND, FORMAT, HEAD_DIM, STEPS)
    for number in range(most):
        counts = extra + number < end
        further, counted = table + tl.where(counts, extra + number, 0), read & counts[:, None]
        term = _term(further, entries, messages, rows, indexed, at, counted, KIND, FORMAT, HEAD_DIM, STEPS)
        total = tl.where(counts[:, None, None], total + term, total)
    rounded = total.to(_type_of(KIND))
    # Computed only here, so that it takes no registers before.
    address, write = _in_tensors(entry, entries, tensors, strides, None, at, STEPS), _held(live, all_rows, at, STEPS)
    if FORMAT is None:
        elements = _elements(address, _type_of(KIND), _elements_of(KIND), _elements_of(KIND))
        tl.store(elements, rounded, mask=write[:, :, None])
    else:
        elements = _elements(address, _type_of(KIND), HEAD_DIM, _elements_of(KIND))
        tl.store(elements, rounded, mask=write[:, :, None] & _in_head(entry, entries, _elements_of(KIND), HEAD_DIM))


@triton.jit
def _term(
    entry: tl.tensor, entries: tl.tensor, messages: tl.tuple, rows: tl.tensor, indexed: tl.tensor, at: tl.tuple,
    read: tl.tensor, KIND: tl.constexpr, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, STEPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns `[units, steps, elements]` elements of a message."""
    source = _in_messages(entry, entries, messages, rows, indexed, at, STEPS)
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
    entry: tl.tensor, entries: tl.tensor, tensors: tl.tuple, strides: tl.tuple, index: tl.tensor, message: tl.tensor,
    rows: tl.tensor, at: tl.tuple, KIND: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr,
    HEAD_DIM: tl.constexpr, STEPS: tl.constexpr,
) -> None:  # fmt: skip
    """Codes heads as `exchange.coding.encode` does."""
    held = _held(_live(entry, entries), rows, at, STEPS)
    indexed = None if index is None else _indexed(index, held, at, STEPS)
    source = _in_tensors(entry, entries, tensors, strides, indexed, at, STEPS)
    target = _in_messages(entry, entries, (message,), rows, None, at, STEPS)
    inside = held[:, :, None] & _in_head(entry, entries, _elements_of(KIND), HEAD_DIM)
    x = tl.load(_elements(source, _type_of(KIND), HEAD_DIM, _elements_of(KIND)), mask=inside, other=0).to(tl.float32)
    # As integers, numbers without signs have the same order, and NaN is the largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, LARGEST)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays
    tl.store(_scale(entry, entries, target), scale, mask=held)  # before the division, which needs the registers
    code = tl.div_rn(x, scale[:, :, None])
    if FORMAT == tl.int8:  # noqa: SIM300
        code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to a whole number, halves to the even one
    code = code.to(FORMAT).to(tl.int8, bitcast=True)
    tl.store(_elements(target, tl.int8, HEAD_DIM, _elements_of(KIND)), code, mask=inside)


@triton.jit
def _in_head(entry: tl.tensor, entries: tl.tensor, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Returns `[heads, 1, HEAD_DIM]`: True for the elements of a head, whose number is a multiple of `ALIGNED`."""
    head_dim = tl.multiple_of(tl.load(entry + entries * _HEAD_DIM), [ALIGNED])
    return (tl.arange(0, HEAD_DIM)[None, :] < head_dim[:, None])[:, None, :]


@triton.jit
def _scale(entry: tl.tensor, entries: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Returns `[heads, rows]` pointers to the scales of heads at these addresses of a message."""
    return (head + tl.load(entry + entries * _SCALE)[:, None]).to(tl.pointer_type(tl.float32))
