"""Mamba-2 over a packed batch: the bare recurrence, and the whole mixer between its projections."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError, as_number, checked_flag
from megatron_cp.exchange.sections import Section
from megatron_cp.executor.arguments import accumulation_dtype, check_dense, check_plan, check_tensor
from megatron_cp.executor.autocast import lowered, widened
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.gates.steps import step_gates
from megatron_cp.linear.kernels import LinearKernel, StateSpace
from megatron_cp.linear.on_rank import LinearChunk, LinearOnRank, MixerParameters, check_mixer
from megatron_cp.linear.reductions import expand_to_tokens
from megatron_cp.plan.plan import Plan

_MAKER = 'plan_linear(kind="mamba")'
_ANY_STEP = (0.0, math.inf)  # the range of softplus


@no_compile
def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the names of the paper and of mamba_ssm
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    plan: Plan,
    group: Group | None = None,
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes Mamba-2's recurrence within each document, over the ranks of `group`; differentiable.

    `S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T`, `y_t = S_t^T C_t + D x_t` (Mamba-2, arXiv 2405.21060, eq. 1). The
    state S of a head is `[state, head_dim]`, and zero where a document starts.

    Args:
        x: `[t, heads, head_dim]`, this rank's rows in the plan's layout.
        dt: `[t, heads]`, step sizes, which must be positive after `dt_bias`, `dt_softplus` and `dt_limit`.
        A: `[heads]`, below 0, whole on every rank.
        B, C: `[t, groups, state]`; consecutive heads share a group.
        plan: from `plan_linear(kind="mamba")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        D: `[heads]` or `[heads, head_dim]`, whole on every rank.
        dt_bias: `[heads]`, added to dt, whole on every rank.
        dt_softplus: True to apply softplus to dt.
        dt_limit: lower and upper limit to which dt is clamped.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, head_dim]`, zero in pad rows.

    Raises:
        ArgumentError: tensors, group, kernel or cache that do not fit the plan. Raised before anything is sent.
    """
    check_plan(plan, "mamba", _MAKER)
    x, B, C = widened(x, B, C)  # noqa: N806
    layer, blocks = LinearOnRank(plan, group, kernel, "x", x, cache), plan.sections.blocks
    for name, tensor, block in zip("xBC", (x, B, C), blocks[:3], strict=True):
        check_tensor(
            name, tensor, (layer.rows, block.num_heads, block.head_dim), like=x, same_dtype=True, layout=plan.layout
        )
    heads = blocks[0].num_heads
    check_tensor("dt", dt, (layer.rows, heads), like=x, layout=plan.layout)
    check_tensor("A", A, (heads,), like=x)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, (heads,), like=x)
    skip = _checked_skip(D, blocks[0], x)
    _check_limit(dt_limit)
    checked_flag("dt_softplus", dt_softplus)
    comm = layer.agree(
        "mamba2",
        {"x": x, "B": B, "C": C, "dt": dt, "A": A, "D": D, "dt_bias": dt_bias},
        dt_softplus=dt_softplus,
        dt_limit=tuple(map(float, dt_limit)),
    )
    limit = None if dt_softplus and dt_limit == _ANY_STEP else dt_limit

    def gates(chunk: LinearChunk, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> list[Tensor]:
        step, _ = step_gates(dt, heads=chunk.heads, A_log=None, bias=dt_bias, limit=limit, softplus=dt_softplus)
        return [x, step, A[chunk.heads].to(step.dtype), b, c]

    return layer.run(
        comm,
        [x.flatten(1), B.flatten(1), C.flatten(1), dt],
        conv=LinearChunk.sections,
        gates=gates,
        rule=partial(_rule, skip),
    )


@no_compile
def mamba2_mixer(
    xBC: Tensor,  # noqa: N803
    dt: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes a Mamba-2 layer between its projections: convolution, steps and recurrence; differentiable.

    A headwise plan takes one collective before and one after; a chunkwise plan takes a halo and an exchange of states.
    The caller applies the gate z and its norm to the result.

        x, B, C = silu(causal_conv1d(xBC));  y = mamba2(x, softplus(dt + dt_bias), -exp(A_log), B, C, D=D)

    Args:
        xBC: `[t, heads * head_dim + 2 * groups * state]`, this rank's rows, before the convolution.
        dt: `[t, heads]`, before the softplus.
        plan: from `plan_linear(kind="mamba")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]`, weight over the channels of xBC, whole on every rank.
        conv_bias: `[channels]`.
        A_log, dt_bias: `[heads]`, whole on every rank.
        D: `[heads]`, or with a number for each feature `[heads, head_dim]`; whole on every rank.
        dt_limit: lower and upper limit to which the step sizes are clamped.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, head_dim]` in the type of xBC, zero in pad rows. A parameter's gradient is this rank's share, which
        must be summed over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group, kernel or cache that do not fit the plan. Raised before anything is
            sent.
    """
    check_plan(plan, "mamba", _MAKER)
    (xBC,) = lowered(xBC)  # noqa: N806
    inputs, parameters = {"xBC": xBC, "dt": dt}, MixerParameters(conv, conv_bias, A_log, dt_bias)
    layer, taps = check_mixer(plan, group, kernel, cache, inputs, parameters, decay="dt")
    skip = _checked_skip(D, plan.sections.blocks[0], xBC)
    _check_limit(dt_limit)
    comm = layer.agree("mamba2_mixer", {**inputs, **parameters._asdict(), "D": D}, dt_limit=tuple(map(float, dt_limit)))
    limit = None if dt_limit == _ANY_STEP else dt_limit

    def gates(chunk: LinearChunk, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> list[Tensor]:
        step, decay = step_gates(dt, heads=chunk.heads, A_log=A_log, bias=dt_bias, limit=limit)
        assert decay is not None
        return [x, step, decay, b, c]

    return layer.run(
        comm,
        [xBC, dt],
        conv=lambda chunk, *arrived: chunk.convolved(arrived, taps, conv_bias, count=3),
        gates=gates,
        rule=partial(_rule, skip),
    )


def _rule(skip: Tensor | None, chunk: LinearChunk, *inputs: Tensor) -> list[Tensor]:
    """Computes `y = S^T C + D x`, where D is `skip`."""
    x, y = inputs[0], chunk.recurrence(StateSpace(*inputs), 1.0)
    if skip is None:
        return [y]
    acc_dtype = accumulation_dtype(y.dtype)
    local_skip = skip[chunk.heads].to(acc_dtype)
    weights = expand_to_tokens(local_skip.flatten(), len(x)).unflatten(1, local_skip.shape)
    weights = weights if weights.ndim == 3 else weights[..., None]
    return [(y.to(acc_dtype) + weights * x.to(acc_dtype)).to(y.dtype)]


def _checked_skip(skip: Tensor | None, block: Section, like: Tensor) -> Tensor | None:
    """Returns D as `[heads]` or `[heads, head_dim]`. It also accepts the latter flattened, Megatron's shape."""
    if skip is None:
        return None
    shape = (block.num_heads, block.head_dim)
    check_dense("D", skip)
    if skip.shape == (block.width,) and block.head_dim > 1:
        skip = skip.view(shape)
    check_tensor("D", skip, shape if skip.ndim == 2 else shape[:1], like=like)
    return skip


def _check_limit(limit: tuple[float, float]) -> None:
    least, most = map(as_number, limit) if isinstance(limit, tuple) and len(limit) == 2 else (math.nan, math.nan)
    largest = torch.finfo(torch.float32).max
    if not (0 <= least <= most and least <= largest and (most <= largest or most == math.inf)):
        raise ArgumentError("dt_limit", limit, "a tuple of two numbers from 0 on, the smaller one first and finite")
