"""The kernels behind `triton.py`: norms of keys and queries, write strengths, decays, step sizes, and their gradients.

Each token and head is computed by itself, in float32, by code that is compiled once for all numbers, strides and
alignments: an access that were wider where memory is aligned would add up a norm's squares in another order, and a
rank's bits would depend on where its rows begin. Tiles of parameters' gradients have one size whatever the number of
heads; a tile's sums are kept, and a second kernel adds them up in the order of the tokens.

`x` is what a decay or a step is made of, `[T, h, c]`, with one channel a head (Gated DeltaNet, Mamba-2) or one for each
feature (KDA); a tile is of tokens and columns, of which there are `h * c`.
"""

# ruff: noqa: N803 - constants of a kernel are in capitals, as in Triton's own

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=range(19))
def delta_forward(
    q: tl.tensor, k: tl.tensor, beta: tl.tensor, x: tl.tensor,
    q_stride: tl.int64, k_stride: tl.int64, beta_stride: tl.int64, x_stride: tl.int64,
    rates: tl.tensor, bias: tl.tensor, first: tl.int64, lower_bound: tl.float32,
    tokens: tl.int64, key_heads: tl.int64, head_dim: tl.int64, heads: tl.int64, channels: tl.int64,
    norm_programs: tl.int32, beta_programs: tl.int32,
    q_out: tl.tensor, k_out: tl.tensor, beta_out: tl.tensor, g_out: tl.tensor,
    EPS: tl.constexpr, NORM_TOKENS: tl.constexpr, DIM: tl.constexpr, BETA_TOKENS: tl.constexpr,
    BETA_COLUMNS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    """`q / |q|`, `k / |k|`, and if there is an x `sigmoid(beta)` and, of x and heads' `rates`, decays' logarithms."""
    program = tl.program_id(0)
    if program < norm_programs:
        _normalise(q, q_out, q_stride, program, tokens, key_heads, head_dim, EPS, NORM_TOKENS, DIM)
        _normalise(k, k_out, k_stride, program, tokens, key_heads, head_dim, EPS, NORM_TOKENS, DIM)
    elif x is not None:
        if program < norm_programs + beta_programs:
            token, column, there = _tile(program - norm_programs, tokens, heads, BETA_TOKENS, BETA_COLUMNS)
            logits = tl.load(_at(beta, beta_stride, token, column), there, 0.0).to(tl.float32)
            tl.store(_at(beta_out, heads, token, column), _sigmoid(logits), there)
        else:
            block = program - norm_programs - beta_programs
            rate, shift = _of_columns(rates, bias, first, block, heads, channels, COLUMNS)
            for step in range(STEPS):
                token, column, there = _step_tile(block, step, tokens, heads * channels, TOKENS, COLUMNS, STEPS)
                shifted = tl.load(_at(x, x_stride, token, column), there, 0.0).to(tl.float32) + shift
                g = lower_bound * _sigmoid(rate * shifted) if BOUNDED else -rate * _softplus(shifted)
                tl.store(_at(g_out, heads * channels, token, column), g, there)


@triton.jit(do_not_specialize=range(27))
def delta_backward(
    q: tl.tensor, k: tl.tensor, beta: tl.tensor, x: tl.tensor,
    q_stride: tl.int64, k_stride: tl.int64, beta_stride: tl.int64, x_stride: tl.int64,
    rates: tl.tensor, bias: tl.tensor, first: tl.int64, lower_bound: tl.float32,
    tokens: tl.int64, key_heads: tl.int64, head_dim: tl.int64, heads: tl.int64, channels: tl.int64,
    norm_programs: tl.int32, beta_programs: tl.int32,
    dq_out: tl.tensor, dk_out: tl.tensor, dbeta_out: tl.tensor, dg: tl.tensor,
    dq_stride: tl.int64, dk_stride: tl.int64, dbeta_stride: tl.int64, dg_stride: tl.int64,
    dq: tl.tensor, dk: tl.tensor, dbeta: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    EPS: tl.constexpr, NORM_TOKENS: tl.constexpr, DIM: tl.constexpr, BETA_TOKENS: tl.constexpr,
    BETA_COLUMNS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    """The gradients of what `delta_forward` takes, from those of what it wrote (`dq_out` and so on, and `dg`).

    `sums` `[blocks, 2, h * c]` become the rates' logarithms' gradients, divided by the rates, and the bias's.
    """
    program = tl.program_id(0)
    if program < norm_programs:
        _normalise_backward(
            q, dq_out, dq, q_stride, dq_stride, program, tokens, key_heads, head_dim, EPS, NORM_TOKENS, DIM
        )
        _normalise_backward(
            k, dk_out, dk, k_stride, dk_stride, program, tokens, key_heads, head_dim, EPS, NORM_TOKENS, DIM
        )
    elif x is not None:
        if program < norm_programs + beta_programs:
            token, column, there = _tile(program - norm_programs, tokens, heads, BETA_TOKENS, BETA_COLUMNS)
            y = _sigmoid(tl.load(_at(beta, beta_stride, token, column), there, 0.0).to(tl.float32))
            dy = tl.load(_at(dbeta_out, dbeta_stride, token, column), there, 0.0).to(tl.float32)
            tl.store(_at(dbeta, heads, token, column), (dy * (y * (1 - y))).to(dbeta.dtype.element_ty), there)
        else:
            _decays_backward(
                x, x_stride, rates, bias, first, lower_bound, tokens, heads, channels, dg, dg_stride, dx, sums,
                program - norm_programs - beta_programs, TOKENS, COLUMNS, STEPS, BOUNDED,
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
    tl.store(_at(out, heads, token, column), y, there)
    if rates is not None:
        is_first = (tl.program_id(0) < tl.cdiv(heads, COLUMNS)) & (column < heads)
        decay = -tl.exp(tl.load(rates + first + column, is_first, 0.0).to(tl.float32))
        tl.store(decays + column, decay, is_first)


@triton.jit(do_not_specialize=range(12))
def step_backward(
    x: tl.tensor, x_stride: tl.int64, bias: tl.tensor, first: tl.int64,
    least: tl.float32, most: tl.float32, tokens: tl.int64, heads: tl.int64,
    dout: tl.tensor, dout_stride: tl.int64, dx: tl.tensor, sums: tl.tensor,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, CLAMPED: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of x, and of the bias sums `[blocks, h]`."""
    token, column, there = _tile(tl.program_id(0), tokens, heads, TOKENS, COLUMNS)
    gradient = tl.load(_at(dout, dout_stride, token, column), there, 0.0).to(tl.float32)
    if CLAMPED:
        y = _unlimited(x, x_stride, bias, first, token, column, there, heads, SOFTPLUS)
        gradient = tl.where((y >= least) & (y <= most), gradient, 0.0)
    if SOFTPLUS:
        gradient *= _sigmoid(_unlimited(x, x_stride, bias, first, token, column, there, heads, False))
    tl.store(_at(dx, heads, token, column), gradient.to(dx.dtype.element_ty), there)
    if bias is not None:
        sums_of_tile = tl.sum(tl.where(there, gradient, 0.0), 0, keep_dims=True)
        _keep(sums, 0, 1, sums_of_tile, tl.program_id(0), heads, COLUMNS)


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
    head_dim: tl.tensor, EPS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Some tokens of one head."""
    token, head, dim, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(x + token * stride + head * head_dim + dim, there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    tl.store(out + (token * heads + head) * head_dim + dim, (full * scale).to(out.dtype.element_ty), there)


@triton.jit
def _normalise_backward(
    x: tl.tensor, dout: tl.tensor, dx: tl.tensor, stride: tl.tensor, dout_stride: tl.tensor, program: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, EPS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:  # fmt: skip
    token, head, dim, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(x + token * stride + head * head_dim + dim, there, 0.0).to(tl.float32)
    gradient = tl.load(dout + token * dout_stride + head * head_dim + dim, there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    along = tl.sum(gradient * full, 1, keep_dims=True) * (scale * scale * scale)
    of_x = gradient * scale - along * full
    tl.store(dx + (token * heads + head) * head_dim + dim, of_x.to(dx.dtype.element_ty), there)


@triton.jit
def _decays_backward(
    x: tl.tensor, x_stride: tl.tensor, rates: tl.tensor, bias: tl.tensor, first: tl.tensor, lower_bound: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, channels: tl.tensor, dg: tl.tensor, dg_stride: tl.tensor, dx: tl.tensor,
    sums: tl.tensor, block: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    columns = heads * channels
    rate, shift = _of_columns(rates, bias, first, block, heads, channels, COLUMNS)
    rate_sum, shift_sum = tl.zeros([1, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    for step in range(STEPS):
        token, column, there = _step_tile(block, step, tokens, columns, TOKENS, COLUMNS, STEPS)
        shifted = tl.load(_at(x, x_stride, token, column), there, 0.0).to(tl.float32) + shift
        gradient = tl.load(_at(dg, dg_stride, token, column), there, 0.0).to(tl.float32)
        if BOUNDED:
            y = _sigmoid(rate * shifted)
            gradient = gradient * lower_bound * (y * (1 - y))
            of_rate, of_shifted = gradient * shifted, gradient * rate
        else:
            of_rate, of_shifted = -(gradient * _softplus(shifted)), gradient * -rate * _sigmoid(shifted)
        tl.store(_at(dx, columns, token, column), of_shifted.to(dx.dtype.element_ty), there)
        rate_sum += tl.sum(tl.where(there, of_rate, 0.0), 0, keep_dims=True)
        shift_sum += tl.sum(tl.where(there, of_shifted, 0.0), 0, keep_dims=True)
    _keep(sums, 0, 2, rate_sum, block, columns, COLUMNS)
    _keep(sums, 1, 2, shift_sum, block, columns, COLUMNS)


@triton.jit
def _rows_of_head(
    program: tl.tensor, tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, TOKENS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Tokens `[TOKENS, 1]`, the head, features `[1, DIM]`, and which of `[TOKENS, DIM]` there are."""
    head, block = program % heads, (program // heads).to(tl.int64)
    token, dim = block * TOKENS + tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    return token, head, dim, (token < tokens) & (dim < head_dim)


@triton.jit
def _tile(
    block: tl.tensor, tokens: tl.tensor, columns: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tuple:
    """Tokens `[TOKENS, 1]`, columns `[1, COLUMNS]`, and which of both there are; blocks go along the columns first."""
    return _step_tile(block, 0, tokens, columns, TOKENS, COLUMNS, 1)


@triton.jit
def _step_tile(
    block: tl.tensor, step: tl.tensor, tokens: tl.tensor, columns: tl.tensor, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """A step of a block, which has `STEPS` tiles, one after the other along the tokens."""
    across = tl.cdiv(columns, COLUMNS)
    token = ((block // across) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return token, column, (token < tokens) & (column < columns)


@triton.jit
def _at(table: tl.tensor, stride: tl.tensor, token: tl.tensor, column: tl.tensor) -> tl.tensor:
    return table + token * stride + column


@triton.jit
def _of_columns(
    rates: tl.tensor, bias: tl.tensor, first: tl.tensor, block: tl.tensor, heads: tl.tensor, channels: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The rates and the bias of a block's columns, `[1, COLUMNS]` each."""
    columns = heads * channels
    column = (block % tl.cdiv(columns, COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rate = tl.exp(tl.load(rates + first + column // channels, column < columns, 0.0).to(tl.float32))
    return rate, tl.load(bias + first * channels + column, column < columns, 0.0).to(tl.float32)


@triton.jit
def _unlimited(
    x: tl.tensor, x_stride: tl.tensor, bias: tl.tensor, first: tl.tensor, token: tl.tensor, column: tl.tensor,
    there: tl.tensor, heads: tl.tensor, SOFTPLUS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A step before its limits."""
    y = tl.load(_at(x, x_stride, token, column), there, 0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + first + column, column < heads, 0.0).to(tl.float32)
    return _softplus(y) if SOFTPLUS else y


@triton.jit
def _keep(
    sums: tl.tensor, which: tl.constexpr, kinds: tl.constexpr, values: tl.tensor, block: tl.tensor,
    columns: tl.tensor, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A block's sums in their place of `[blocks along the tokens, kinds, columns]`."""
    across = tl.cdiv(columns, COLUMNS)
    column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(sums + ((block // across) * kinds + which) * columns + column, values, column < columns)


@triton.jit
def _added(
    sums: tl.tensor, which: tl.constexpr, kinds: tl.constexpr, head: tl.tensor, blocks: tl.tensor, heads: tl.tensor,
    channels: tl.tensor, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums of a head over all blocks, `[CHANNELS]`: zero if the head is not there."""
    channel = tl.arange(0, CHANNELS)
    is_own = (head >= 0) & (head < heads)
    total = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)[:, None]
        there = is_own & (block < blocks) & (channel < channels)[None, :]
        of_block = sums + (block * kinds + which) * (heads * channels) + head * channels + channel[None, :]
        total += tl.sum(tl.load(of_block, there, 0.0), 0)
    return total


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1 / (1 + tl.exp(-x))  # exp overflows to inf, whose reciprocal is right: 0


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """`log(1 + exp(x))`, without overflow and with a logarithm of one plus something that may be very small."""
    small = tl.exp(-tl.abs(x))
    one = 1 + small  # what was lost here is given back by the quotient
    return tl.maximum(x, 0.0) + tl.where(one == 1, small, tl.log(one) * (small / (one - 1)))
