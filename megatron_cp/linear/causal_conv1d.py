"""The causal depthwise convolution over a packed batch."""

from __future__ import annotations

from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.arguments import check_plan, check_tensor
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.linear.on_rank import LinearChunk, LinearOnRank, check_conv, saved_for_backward
from megatron_cp.plan.plan import Plan


@no_compile
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    group: Group | None = None,
    *,
    activation: str | None = None,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes the causal depthwise convolution of each document, over the ranks of `group`; differentiable.

    `y_t = bias + sum_s weight[:, -1 - s] x_{t - s}`, where tokens before the document are zero.

    Args:
        x: `[t, channels]`, this rank's rows in the plan's layout.
        weight: `[channels, width]` or `[channels, 1, width]`, whole on every rank.
        bias: `[channels]`, whole on every rank, or None.
        plan: from `plan_linear(kind="conv1d")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        activation: "silu" (or "swish"), or None.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, channels]` in the type of x, zero in pad rows. A parameter's gradient is this rank's share, which must be
        summed over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, group, kernel or cache that do not fit the plan. Raised before anything is sent.
    """
    check_plan(plan, "conv1d", 'plan_linear(kind="conv1d")')
    (x,) = lowered(x)
    layer = LinearOnRank(plan, group, kernel, "x", x, cache, convolves=True)
    (block,) = plan.sections.blocks
    check_tensor("x", x, (layer.rows, block.width), like=x, layout=plan.layout)
    taps = check_conv(plan, weight, bias, block.width, x, name="weight", bias_name="bias")
    if activation is not None and (not isinstance(activation, str) or activation not in ("silu", "swish")):
        raise ArgumentError("activation", activation, "silu, swish or None")
    comm = layer.agree("causal_conv1d", {"x": x, "weight": weight, "bias": bias}, activation=activation)

    def conv(chunk: LinearChunk, *arrived: Tensor) -> list[Tensor]:
        (y,) = chunk.convolved(arrived, taps, bias, count=1, silu=activation is not None)
        return [saved_for_backward(y)]

    return layer.run(comm, [x], conv=conv).flatten(1)
