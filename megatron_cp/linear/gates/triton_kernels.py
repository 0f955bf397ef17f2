"""The kernels behind `triton.py`: norms of keys and queries, write strengths, decays, step sizes, and their gradients.

Each token and head is computed by itself, in float32. What is added up is added in the same order on every rank: the
squares of a norm, and the sums over tokens for the parameters, which every program keeps for its tokens and a second
kernel adds up. That order follows from a tile's size and from how wide its accesses are, so neither may depend on how
many heads a rank has or where its rows begin: rows of whole units of 16 bytes are told to begin on one, which `dense`
sees to, and of nothing else is Triton told what it is aligned to.

`x` is what a decay or a step is made of, `[T, h, c]`, with one channel a head (Gated DeltaNet, Mamba-2) or one for each
feature (KDA). Columns are those of `[T, h * c]`; a tile has some of all heads, or those of one.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as in Triton's own

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

_WIDEST = tl.constexpr(16)  # bytes of an access


@triton.jit(do_not_specialize=range(23))
def delta_forward(
    q: tl.tensor, k: tl.tensor, beta: tl.tensor, x: tl.tensor,
    q_stride: tl.int64, k_stride: tl.int64, beta_stride: tl.int64, x_stride: tl.int64,
    rates: tl.tensor, bias: tl.tensor, first: tl.int64, lower_bound: tl.float32,
    tokens: tl.int64, key_heads: tl.int64, head_units: tl.int64, heads: tl.int64, channel_units: tl.int64,
    norm_programs: tl.int32, beta_programs: tl.int32,
    q_out: tl.tensor, k_out: tl.tensor, beta_out: tl.tensor, g_out: tl.tensor,
    EPS: tl.constexpr, UNIT: tl.constexpr, NORM_TOKENS: tl.constexpr, DIM: tl.constexpr, BETA_TOKENS: tl.constexpr,
    BETA_COLUMNS: tl.constexpr, X_UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, PER_FEATURE: tl.constexpr, BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    """`q / |q|`, `k / |k|`, and if there is an x `sigmoid(beta)` and, of x and heads' `rates`, decays' logarithms."""
    program = tl.program_id(0)
    if program < norm_programs:
        head_dim = head_units * UNIT
        _normalise(q, q_out, q_stride, program, tokens, key_heads, head_dim, EPS, UNIT, NORM_TOKENS, DIM)
        _normalise(k, k_out, k_stride, program, tokens, key_heads, head_dim, EPS, UNIT, NORM_TOKENS, DIM)
    elif x is not None:
        if program < norm_programs + beta_programs:
            _strengths(beta, beta_out, beta_stride, program - norm_programs, tokens, heads, BETA_TOKENS, BETA_COLUMNS)
        else:
            _decays(
                x, g_out, x_stride, rates, bias, first, lower_bound, program - norm_programs - beta_programs,
                tokens, heads, channel_units * X_UNIT, X_UNIT, TOKENS, COLUMNS, STEPS, PER_FEATURE, BOUNDED,
            )  # fmt: skip


@triton.jit(do_not_specialize=range(32))
def delta_backward(
    q: tl.tensor, k: tl.tensor, beta: tl.tensor, x: tl.tensor,
    q_stride: tl.int64, k_stride: tl.int64, beta_stride: tl.int64, x_stride: tl.int64,
    rates: tl.tensor, bias: tl.tensor, first: tl.int64, lower_bound: tl.float32,
    tokens: tl.int64, key_heads: tl.int64, head_units: tl.int64, heads: tl.int64, channel_units: tl.int64,
    norm_programs: tl.int32, beta_programs: tl.int32,
    dq_out: tl.tensor, dk_out: tl.tensor, dbeta_out: tl.tensor, dg: tl.tensor,
    dq_stride: tl.int64, dk_stride: tl.int64, dbeta_stride: tl.int64, dg_stride: tl.int64,
    dq: tl.tensor, dk: tl.tensor, dbeta: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    EPS: tl.constexpr, UNIT: tl.constexpr, NORM_TOKENS: tl.constexpr, DIM: tl.constexpr, BETA_TOKENS: tl.constexpr,
    BETA_COLUMNS: tl.constexpr, X_UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, PER_FEATURE: tl.constexpr, BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    """The gradients of what `delta_forward` takes, from those of what it wrote (`dq_out` and so on, and `dg`).

    `sums` `[blocks, 2, h * c]` become the rates' logarithms' gradients, divided by the rates, and the bias's.
    """
    program = tl.program_id(0)
    if program < norm_programs:
        head_dim = head_units * UNIT
        _normalise_backward(
            q, dq_out, dq, q_stride, dq_stride, program, tokens, key_heads, head_dim, EPS, UNIT,
            NORM_TOKENS, DIM,
        )  # fmt: skip
        _normalise_backward(
            k, dk_out, dk, k_stride, dk_stride, program, tokens, key_heads, head_dim, EPS, UNIT,
            NORM_TOKENS, DIM,
        )  # fmt: skip
    elif x is not None:
        if program < norm_programs + beta_programs:
            _strengths_backward(
                beta, dbeta_out, dbeta, beta_stride, dbeta_stride, program - norm_programs, tokens, heads,
                BETA_TOKENS, BETA_COLUMNS,
            )  # fmt: skip
        else:
            _decays_backward(
                x, dg, dx, sums, x_stride, dg_stride, rates, bias, first, lower_bound,
                program - norm_programs - beta_programs, tokens, heads, channel_units * X_UNIT,
                X_UNIT, TOKENS, COLUMNS, STEPS, PER_FEATURE, BOUNDED,
            )  # fmt: skip


@triton.jit(do_not_specialize=range(8))
def delta_parameters(
    sums: tl.tensor, rates: tl.tensor, drates: tl.tensor, dbias: tl.tensor,
    blocks: tl.int64, first: tl.int64, heads: tl.int64, channels: tl.int64,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """From `sums` the gradients of all heads' parameters, zero for those of other ranks; a program for each head."""
    head = tl.program_id(0).to(tl.int64)
    rate_sum = _added(sums, 0, 2, head - first, blocks, heads, channels, BLOCKS, CHANNELS)
    shift_sum = _added(sums, 1, 2, head - first, blocks, heads, channels, BLOCKS, CHANNELS)
    rate = tl.exp(tl.load(rates + head).to(tl.float32))
    is_own = (head >= first) & (head < first + heads)
    drate = tl.where(is_own, tl.sum(rate_sum, 0) * rate, 0.0)
    tl.store(drates + head, drate.to(drates.dtype.element_ty))
    channel = tl.arange(0, CHANNELS)
    tl.store(dbias + head * channels + channel, shift_sum.to(dbias.dtype.element_ty), channel < channels)


@triton.jit(do_not_specialize=range(11))
def step_forward(
    x: tl.tensor, x_stride: tl.int64, rates: tl.tensor, bias: tl.tensor, first: tl.int64,
    least: tl.float32, most: tl.float32, tokens: tl.int64, heads: tl.int64,
    out: tl.tensor, decays: tl.tensor,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, CLAMPED: tl.constexpr,
) -> None:  # fmt: skip
    """`x + bias`, through softplus and limits if told so; and `decays`, `-exp(rates)` of own heads."""
    token, column, there = _tile(tl.program_id(0), tokens, heads, TOKENS, COLUMNS)
    y = _unlimited(x, x_stride, bias, first, token, column, there, heads, SOFTPLUS)
    if CLAMPED:
        y = tl.where(y < least, least, y)
        y = tl.where(y > most, most, y)
    tl.store(_at(out, heads, token, column, 1), y, there)
    if rates is not None:  # noqa: SIM102 - the one is asked when this is compiled
        if tl.program_id(0) < tl.cdiv(heads, COLUMNS):  # those of the first tokens
            decay = -tl.exp(tl.load(rates + first + column, column < heads, 0.0).to(tl.float32))
            tl.store(decays + column, decay, column < heads)


@triton.jit(do_not_specialize=range(12))
def step_backward(
    x: tl.tensor, x_stride: tl.int64, bias: tl.tensor, first: tl.int64,
    least: tl.float32, most: tl.float32, tokens: tl.int64, heads: tl.int64,
    dout: tl.tensor, dout_stride: tl.int64, dx: tl.tensor, sums: tl.tensor,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, CLAMPED: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of x, and of the bias sums `[blocks, h]`."""
    token, column, there = _tile(tl.program_id(0), tokens, heads, TOKENS, COLUMNS)
    gradient = tl.load(_at(dout, dout_stride, token, column, 1), there, 0.0).to(tl.float32)
    if CLAMPED:
        y = _unlimited(x, x_stride, bias, first, token, column, there, heads, SOFTPLUS)
        gradient = tl.where((y >= least) & (y <= most), gradient, 0.0)
    if SOFTPLUS:
        gradient *= sigmoid(_unlimited(x, x_stride, bias, first, token, column, there, heads, False))
    tl.store(_at(dx, heads, token, column, 1), gradient.to(dx.dtype.element_ty), there)
    if bias is not None:
        block = tl.program_id(0) // tl.cdiv(heads, COLUMNS)
        bias_sum = tl.sum(tl.where(there, gradient, 0.0), 0, keep_dims=True)
        tl.store(sums + block * heads + column, bias_sum, column < heads)


@triton.jit(do_not_specialize=range(8))
def step_parameters(
    sums: tl.tensor, rates: tl.tensor, ddecays: tl.tensor, drates: tl.tensor, dbias: tl.tensor,
    blocks: tl.int64, first: tl.int64, heads: tl.int64,
    BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """The gradients of all heads' parameters, zero for those of other ranks; a program for each head."""
    head = tl.program_id(0).to(tl.int64)
    if rates is not None:
        is_own = (head >= first) & (head < first + heads)
        ddecay = tl.load(ddecays + head - first, is_own, 0.0).to(tl.float32)
        drate = tl.where(is_own, ddecay * -tl.exp(tl.load(rates + head).to(tl.float32)), 0.0)
        tl.store(drates + head, drate.to(drates.dtype.element_ty))
    if dbias is not None:
        total = tl.sum(_added(sums, 0, 1, head - first, blocks, heads, 1, BLOCKS, 1), 0)
        tl.store(dbias + head, total.to(dbias.dtype.element_ty))


# -- parts -----------------------------------------------------------------------------------------------------------


@triton.jit
def _normalise(
    x: tl.tensor, out: tl.tensor, stride: tl.tensor, program: tl.tensor, tokens: tl.tensor, heads: tl.tensor,
    head_dim: tl.tensor, EPS: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Some tokens of one head."""
    token, column, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(_at(x, stride, token, column, UNIT), there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    tl.store(_at(out, heads * head_dim, token, column, UNIT), (full * scale).to(out.dtype.element_ty), there)


@triton.jit
def _normalise_backward(
    x: tl.tensor, dout: tl.tensor, dx: tl.tensor, stride: tl.tensor, dout_stride: tl.tensor, program: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, EPS: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(_at(x, stride, token, column, UNIT), there, 0.0).to(tl.float32)
    gradient = tl.load(_at(dout, dout_stride, token, column, UNIT), there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    along = tl.sum(gradient * full, 1, keep_dims=True) * (scale * scale * scale)
    of_x = gradient * scale - along * full
    tl.store(_at(dx, heads * head_dim, token, column, UNIT), of_x.to(dx.dtype.element_ty), there)


@triton.jit
def _strengths(
    beta: tl.tensor, out: tl.tensor, stride: tl.tensor, block: tl.tensor, tokens: tl.tensor, heads: tl.tensor,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _tile(block, tokens, heads, TOKENS, COLUMNS)
    logits = tl.load(_at(beta, stride, token, column, 1), there, 0.0).to(tl.float32)
    tl.store(_at(out, heads, token, column, 1), sigmoid(logits), there)


@triton.jit
def _strengths_backward(
    beta: tl.tensor, dout: tl.tensor, dbeta: tl.tensor, stride: tl.tensor, dout_stride: tl.tensor, block: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _tile(block, tokens, heads, TOKENS, COLUMNS)
    y = sigmoid(tl.load(_at(beta, stride, token, column, 1), there, 0.0).to(tl.float32))
    gradient = tl.load(_at(dout, dout_stride, token, column, 1), there, 0.0).to(tl.float32) * (y * (1 - y))
    tl.store(_at(dbeta, heads, token, column, 1), gradient.to(dbeta.dtype.element_ty), there)


@triton.jit
def _decays(
    x: tl.tensor, g: tl.tensor, stride: tl.tensor, rates: tl.tensor, bias: tl.tensor, first: tl.tensor,
    lower_bound: tl.tensor, block: tl.tensor, tokens: tl.tensor, heads: tl.tensor, channels: tl.tensor,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PER_FEATURE: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    across, head, column, is_column = _columns(block, heads, channels, COLUMNS, PER_FEATURE)
    rate, shift = _of_columns(rates, bias, first, head, column, is_column, heads, channels)
    for step in range(STEPS):
        token, there = _tokens(block // across, step, tokens, is_column, TOKENS, STEPS)
        shifted = tl.load(_at(x, stride, token, column, UNIT), there, 0.0).to(tl.float32) + shift
        activated = lower_bound * sigmoid(rate * shifted) if BOUNDED else -rate * _softplus(shifted)
        tl.store(_at(g, heads * channels, token, column, UNIT), activated, there)


@triton.jit
def _decays_backward(
    x: tl.tensor, dg: tl.tensor, dx: tl.tensor, sums: tl.tensor, stride: tl.tensor, dg_stride: tl.tensor,
    rates: tl.tensor, bias: tl.tensor, first: tl.tensor, lower_bound: tl.tensor, block: tl.tensor, tokens: tl.tensor,
    heads: tl.tensor, channels: tl.tensor, UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, PER_FEATURE: tl.constexpr, BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    columns = heads * channels
    across, head, column, is_column = _columns(block, heads, channels, COLUMNS, PER_FEATURE)
    rate, shift = _of_columns(rates, bias, first, head, column, is_column, heads, channels)
    rate_sum, shift_sum = tl.zeros([1, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    for step in range(STEPS):
        token, there = _tokens(block // across, step, tokens, is_column, TOKENS, STEPS)
        shifted = tl.load(_at(x, stride, token, column, UNIT), there, 0.0).to(tl.float32) + shift
        gradient = tl.load(_at(dg, dg_stride, token, column, UNIT), there, 0.0).to(tl.float32)
        if BOUNDED:
            y = sigmoid(rate * shifted)
            gradient = gradient * lower_bound * (y * (1 - y))
            of_rate, of_shifted = gradient * shifted, gradient * rate
        else:
            of_rate, of_shifted = -(gradient * _softplus(shifted)), gradient * -rate * sigmoid(shifted)
        tl.store(_at(dx, columns, token, column, UNIT), of_shifted.to(dx.dtype.element_ty), there)
        rate_sum += tl.sum(tl.where(there, of_rate, 0.0), 0, keep_dims=True)
        shift_sum += tl.sum(tl.where(there, of_shifted, 0.0), 0, keep_dims=True)
    kept = sums + (block // across) * 2 * columns + column
    tl.store(kept, rate_sum, is_column)
    tl.store(kept + columns, shift_sum, is_column)


@triton.jit
def _rows_of_head(
    program: tl.tensor, tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, TOKENS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Tokens `[TOKENS, 1]`, the columns of a head `[1, DIM]`, and which of `[TOKENS, DIM]` there are."""
    head, block = program % heads, (program // heads).to(tl.int64)
    token, dim = block * TOKENS + tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    return token, head * head_dim + dim, (token < tokens) & (dim < head_dim)


@triton.jit
def _tile(
    block: tl.tensor, tokens: tl.tensor, heads: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tuple:
    """Tokens `[TOKENS, 1]`, heads `[1, COLUMNS]`, and which of both there are; blocks go along the heads first."""
    across, _, column, is_column = _columns(block, heads, 1, COLUMNS, False)
    token, there = _tokens(block // across, 0, tokens, is_column, TOKENS, 1)
    return token, column, there


@triton.jit
def _columns(
    block: tl.tensor, heads: tl.tensor, channels: tl.tensor, COLUMNS: tl.constexpr, PER_FEATURE: tl.constexpr
) -> tl.tuple:
    """How many blocks there are side by side; of one its heads, its columns `[1, COLUMNS]`, and which there are."""
    lane = tl.arange(0, COLUMNS)[None, :]
    if PER_FEATURE:
        across, head = heads, block % heads
        column, is_column = head * channels + lane, lane < channels
    else:
        across = tl.cdiv(heads, COLUMNS)
        column = (block % across) * COLUMNS + lane
        head, is_column = column, column < heads
    return across, head, column, is_column


@triton.jit
def _tokens(
    block: tl.tensor, step: tl.tensor, tokens: tl.tensor, is_column: tl.tensor, TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The tokens `[TOKENS, 1]` of a step of a block, and where in `[TOKENS, COLUMNS]` there is something."""
    token = (block.to(tl.int64) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return token, (token < tokens) & is_column


@triton.jit
def _at(table: tl.tensor, stride: tl.tensor, token: tl.tensor, column: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Addresses, of which those of a unit are told to lie side by side from a multiple of its size on."""
    places = table + token * stride + column
    return tl.multiple_of(places, [1, _WIDEST]) if UNIT > 1 else places


@triton.jit
def _of_columns(
    rates: tl.tensor, bias: tl.tensor, first: tl.tensor, head: tl.tensor, column: tl.tensor, is_column: tl.tensor,
    heads: tl.tensor, channels: tl.tensor,
) -> tl.tuple:  # fmt: skip
    """The rates of heads and the bias of columns."""
    rate = tl.exp(tl.load(rates + first + head, head < heads, 0.0).to(tl.float32))
    return rate, tl.load(bias + first * channels + column, is_column, 0.0).to(tl.float32)


@triton.jit
def _unlimited(
    x: tl.tensor, x_stride: tl.tensor, bias: tl.tensor, first: tl.tensor, token: tl.tensor, column: tl.tensor,
    there: tl.tensor, heads: tl.tensor, SOFTPLUS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A step before its limits."""
    y = tl.load(_at(x, x_stride, token, column, 1), there, 0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + first + column, column < heads, 0.0).to(tl.float32)
    return _softplus(y) if SOFTPLUS else y


@triton.jit
def _added(
    sums: tl.tensor, which: tl.constexpr, kinds: tl.constexpr, head: tl.tensor, blocks: tl.tensor, heads: tl.tensor,
    channels: tl.tensor, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of a head over all blocks, `[CHANNELS]`: zero if the head is not there."""
    channel = tl.arange(0, CHANNELS)
    end = tl.where((head >= 0) & (head < heads), blocks, 0)
    total = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, end, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)[:, None]
        there = (block < end) & (channel < channels)[None, :]
        of_block = sums + (block * kinds + which) * (heads * channels) + head * channels + channel[None, :]
        total += tl.sum(tl.load(of_block, there, 0.0), 0)
    return total


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """`1 / (1 + exp(-x))`."""
    return 1 / (1 + tl.exp(-x))  # exp overflows to inf, whose reciprocal is right: 0


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + exp(x))`, without overflow and with a logarithm of one plus something that may be very small."""
    small = tl.exp(-tl.abs(x))
    one = 1 + small  # what was lost here is given back by the quotient
    return tl.maximum(x, 0.0) + tl.where(one == 1, small, tl.log(one) * (small / (one - 1)))
