"""The kernels behind `triton.py`: norms of keys and queries, write strengths, decays, step sizes, and their gradients.

Tokens and heads are independent, and computed in float32. Sums are added in the same order on every rank: the squares
of a norm, and the parameters' sums over tokens, of which every program adds those of its tokens and a second kernel the
rest. The order follows from the size of a tile and the width of its accesses, so neither may depend on the number of
heads of a rank or on the address of its rows. Where rows are whole units of 16 bytes, Triton is told that they begin on
one, which `dense` ensures; it is told no other alignment.

`x` `[T, h, c]` is the input of a decay or a step, with one channel a head (Gated DeltaNet, Mamba-2) or one for each
feature (KDA). Columns are those of `[T, h * c]`; a tile has columns of several heads, or of one head.
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
    """Computes `q / |q|` and `k / |k|`, and unless x is None `sigmoid(beta)` and the logarithms of the decays."""
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
    """Computes the gradients of the inputs of `delta_forward`, given those of its results (`dq_out`, ..., `dg`).

    It writes to `sums` `[blocks, 2, h * c]` the gradients of the rates' logarithms, divided by the rates, and those of
    the bias.
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
    """Adds `sums` to the gradients of all heads' parameters, zero for other ranks' heads; one program a head."""
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
    """Computes steps from `x + bias`, with softplus and limits if asked for, and `decays`, `-exp(rates)`."""
    token, column, there = _tile(tl.program_id(0), tokens, heads, TOKENS, COLUMNS)
    y = _unlimited(x, x_stride, bias, first, token, column, there, heads, SOFTPLUS)
    if CLAMPED:
        y = tl.where(y < least, least, y)
        y = tl.where(y > most, most, y)
    tl.store(_addresses(out, heads, token, column, 1), y, there)
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
    """Computes the gradient of x, and the bias's sums `[blocks, h]`."""
    token, column, there = _tile(tl.program_id(0), tokens, heads, TOKENS, COLUMNS)
    gradient = tl.load(_addresses(dout, dout_stride, token, column, 1), there, 0.0).to(tl.float32)
    if CLAMPED:
        y = _unlimited(x, x_stride, bias, first, token, column, there, heads, SOFTPLUS)
        gradient = tl.where((y >= least) & (y <= most), gradient, 0.0)
    if SOFTPLUS:
        gradient *= sigmoid(_unlimited(x, x_stride, bias, first, token, column, there, heads, False))
    tl.store(_addresses(dx, heads, token, column, 1), gradient.to(dx.dtype.element_ty), there)
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
    """Computes the gradients of all heads' parameters, zero for other ranks' heads; one program a head."""
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
    """Normalises some tokens of one head."""
    token, column, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(_addresses(x, stride, token, column, UNIT), there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    tl.store(_addresses(out, heads * head_dim, token, column, UNIT), (full * scale).to(out.dtype.element_ty), there)


@triton.jit
def _normalise_backward(
    x: tl.tensor, dout: tl.tensor, dx: tl.tensor, stride: tl.tensor, dout_stride: tl.tensor, program: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, EPS: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _rows_of_head(program, tokens, heads, head_dim, TOKENS, DIM)
    full = tl.load(_addresses(x, stride, token, column, UNIT), there, 0.0).to(tl.float32)
    gradient = tl.load(_addresses(dout, dout_stride, token, column, UNIT), there, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, 1, keep_dims=True) + EPS)
    along = tl.sum(gradient * full, 1, keep_dims=True) * (scale * scale * scale)
    dx_values = gradient * scale - along * full
    tl.store(_addresses(dx, heads * head_dim, token, column, UNIT), dx_values.to(dx.dtype.element_ty), there)


@triton.jit
def _strengths(
    beta: tl.tensor, out: tl.tensor, stride: tl.tensor, block: tl.tensor, tokens: tl.tensor, heads: tl.tensor,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _tile(block, tokens, heads, TOKENS, COLUMNS)
    logits = tl.load(_addresses(beta, stride, token, column, 1), there, 0.0).to(tl.float32)
    tl.store(_addresses(out, heads, token, column, 1), sigmoid(logits), there)


@triton.jit
def _strengths_backward(
    beta: tl.tensor, dout: tl.tensor, dbeta: tl.tensor, stride: tl.tensor, dout_stride: tl.tensor, block: tl.tensor,
    tokens: tl.tensor, heads: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token, column, there = _tile(block, tokens, heads, TOKENS, COLUMNS)
    y = sigmoid(tl.load(_addresses(beta, stride, token, column, 1), there, 0.0).to(tl.float32))
    gradient = tl.load(_addresses(dout, dout_stride, token, column, 1), there, 0.0).to(tl.float32) * (y * (1 - y))
    tl.store(_addresses(dbeta, heads, token, column, 1), gradient.to(dbeta.dtype.element_ty), there)


@triton.jit
def _decays(
    x: tl.tensor, g: tl.tensor, stride: tl.tensor, rates: tl.tensor, bias: tl.tensor, first: tl.tensor,
    lower_bound: tl.tensor, block: tl.tensor, tokens: tl.tensor, heads: tl.tensor, channels: tl.tensor,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PER_FEATURE: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    across, head, column, is_column = _columns(block, heads, channels, COLUMNS, PER_FEATURE)
    rate, shift = _column_parameters(rates, bias, first, head, column, is_column, heads, channels)
    for step in range(STEPS):
        token, there = _tokens(block // across, step, tokens, is_column, TOKENS, STEPS)
        shifted = tl.load(_addresses(x, stride, token, column, UNIT), there, 0.0).to(tl.float32) + shift
        activated = lower_bound * sigmoid(rate * shifted) if BOUNDED else -rate * _softplus(shifted)
        tl.store(_addresses(g, heads * channels, token, column, UNIT), activated, there)


@triton.jit
def _decays_backward(
    x: tl.tensor, dg: tl.tensor, dx: tl.tensor, sums: tl.tensor, stride: tl.tensor, dg_stride: tl.tensor,
    rates: tl.tensor, bias: tl.tensor, first: tl.tensor, lower_bound: tl.tensor, block: tl.tensor, tokens: tl.tensor,
    heads: tl.tensor, channels: tl.tensor, UNIT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, PER_FEATURE: tl.constexpr, BOUNDED: tl.constexpr,
) -> None:  # fmt: skip
    columns = heads * channels
    across, head, column, is_column = _columns(block, heads, channels, COLUMNS, PER_FEATURE)
    rate, shift = _column_parameters(rates, bias, first, head, column, is_column, heads, channels)
    rate_sum, shift_sum = tl.zeros([1, COLUMNS], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    for step in range(STEPS):
        token, there = _tokens(block // across, step, tokens, is_column, TOKENS, STEPS)
        shifted = tl.load(_addresses(x, stride, token, column, UNIT), there, 0.0).to(tl.float32) + shift
        gradient = tl.load(_addresses(dg, dg_stride, token, column, UNIT), there, 0.0).to(tl.float32)
        if BOUNDED:
            y = sigmoid(rate * shifted)
            gradient = gradient * lower_bound * (y * (1 - y))
            drate, dshifted = gradient * shifted, gradient * rate
        else:
            drate, dshifted = -(gradient * _softplus(shifted)), gradient * -rate * sigmoid(shifted)
        tl.store(_addresses(dx, columns, token, column, UNIT), dshifted.to(dx.dtype.element_ty), there)
        rate_sum += tl.sum(tl.where(there, drate, 0.0), 0, keep_dims=True)
        shift_sum += tl.sum(tl.where(there, dshifted, 0.0), 0, keep_dims=True)
    kept = sums + (block // across) * 2 * columns + column
    tl.store(kept, rate_sum, is_column)
    tl.store(kept + columns, shift_sum, is_column)


@triton.jit
def _rows_of_head(
    program: tl.tensor, tokens: tl.tensor, heads: tl.tensor, head_dim: tl.tensor, TOKENS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Returns tokens `[TOKENS, 1]`, the columns of a head `[1, DIM]`, and a mask `[TOKENS, DIM]`."""
    head, block = program % heads, (program // heads).to(tl.int64)
    token, dim = block * TOKENS + tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    return token, head * head_dim + dim, (token < tokens) & (dim < head_dim)


@triton.jit
def _tile(
    block: tl.tensor, tokens: tl.tensor, heads: tl.tensor, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tuple:
    """Returns tokens `[TOKENS, 1]`, heads `[1, COLUMNS]`, and a mask; consecutive blocks are along the heads."""
    across, _, column, is_column = _columns(block, heads, 1, COLUMNS, False)
    token, there = _tokens(block // across, 0, tokens, is_column, TOKENS, 1)
    return token, column, there


@triton.jit
def _columns(
    block: tl.tensor, heads: tl.tensor, channels: tl.tensor, COLUMNS: tl.constexpr, PER_FEATURE: tl.constexpr
) -> tl.tuple:
    """Returns the number of blocks along the columns, and a block's heads, its columns `[1, COLUMNS]` and a mask."""
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
    """Returns the tokens `[TOKENS, 1]` of a step of a block, and a mask `[TOKENS, COLUMNS]`."""
    token = (block.to(tl.int64) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
    return token, (token < tokens) & is_column


@triton.jit
def _addresses(
    table: tl.tensor, stride: tl.tensor, token: tl.tensor, column: tl.tensor, UNIT: tl.constexpr
) -> tl.tensor:
    """Returns addresses, with a hint that those of a unit are consecutive and begin on a multiple of its size."""
    places = table + token * stride + column
    return tl.multiple_of(places, [1, _WIDEST]) if UNIT > 1 else places


@triton.jit
def _column_parameters(
    rates: tl.tensor, bias: tl.tensor, first: tl.tensor, head: tl.tensor, column: tl.tensor, is_column: tl.tensor,
    heads: tl.tensor, channels: tl.tensor,
) -> tl.tuple:  # fmt: skip
    """Loads the rates of heads and the bias of columns."""
    rate = tl.exp(tl.load(rates + first + head, head < heads, 0.0).to(tl.float32))
    return rate, tl.load(bias + first * channels + column, is_column, 0.0).to(tl.float32)


@triton.jit
def _unlimited(
    x: tl.tensor, x_stride: tl.tensor, bias: tl.tensor, first: tl.tensor, token: tl.tensor, column: tl.tensor,
    there: tl.tensor, heads: tl.tensor, SOFTPLUS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns steps before they are clamped."""
    y = tl.load(_addresses(x, x_stride, token, column, 1), there, 0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + first + column, column < heads, 0.0).to(tl.float32)
    return _softplus(y) if SOFTPLUS else y


@triton.jit
def _added(
    sums: tl.tensor, which: tl.constexpr, kinds: tl.constexpr, head: tl.tensor, blocks: tl.tensor, heads: tl.tensor,
    channels: tl.tensor, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds the sums of a head over all blocks, `[CHANNELS]`; zero for another rank's head."""
    channel = tl.arange(0, CHANNELS)
    end = tl.where((head >= 0) & (head < heads), blocks, 0)
    total = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, end, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)[:, None]
        there = (block < end) & (channel < channels)[None, :]
        addresses = sums + (block * kinds + which) * (heads * channels) + head * channels + channel[None, :]
        total += tl.sum(tl.load(addresses, there, 0.0), 0)
    return total


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Computes `1 / (1 + exp(-x))`."""
    return 1 / (1 + tl.exp(-x))  # exp overflows to inf, whose reciprocal 0 is right


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """Computes `log(1 + exp(x))` without overflow, and precisely where exp(x) is very small."""
    small = tl.exp(-tl.abs(x))
    one = 1 + small  # the quotient below corrects this sum's rounding
    return tl.maximum(x, 0.0) + tl.where(one == 1, small, tl.log(one) * (small / (one - 1)))
