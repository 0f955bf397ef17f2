"""Gated DeltaNet-2 over a packed batch: the bare rule, and the whole mixer between its projections."""

from __future__ import annotations

from torch import Tensor

from megatron_cp.executor.arguments import check_plan
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.cache import LayerCache
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.gated_delta_net import delta_mixer, delta_rule
from megatron_cp.linear.gates.delta import channel_gates
from megatron_cp.linear.kernels import LinearKernel
from megatron_cp.linear.on_rank import LinearChunk, MixerParameters
from megatron_cp.plan.kinds import GDN2
from megatron_cp.plan.plan import Plan


@no_compile
def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes Gated DeltaNet-2's rule within each document, over the ranks of `group`; differentiable.

    `S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T`, `o_t = scale S_t^T q_t` (Gated
    DeltaNet-2, arXiv 2605.22791): `kda` with a gate for each feature of the key, by which the state is erased, and one
    for each feature of the value, by which it is written.

    Args:
        q: `[t, key_heads, head_dim]`, this rank's rows in the plan's layout.
        k: `[t, key_heads, head_dim]`.
        v: `[t, heads, value_head_dim]`.
        g: `[t, key_heads, head_dim]`, log decay, at most 0.
        b: `[t, key_heads, head_dim]`, erase gate, in (0, 1).
        w: `[t, heads, value_head_dim]`, write gate, in (0, 1).
        plan: from `plan_linear(kind="gdn2")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        scale: queries are multiplied by it; `head_dim ** -0.5` if None.
        use_qk_l2norm_in_kernel: True to divide q and k by their norms first.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, value_head_dim]`, zero in pad rows.

    Raises:
        ArgumentError: tensors, group, kernel or cache that do not fit the plan. Raised before anything is sent.
    """
    return delta_rule(
        GDN2, "gdn2", {"q": q, "k": k, "v": v, "g": g, "b": b, "w": w}, plan, group, scale, use_qk_l2norm_in_kernel,
        kernel, cache, arranged=_arranged,
    )  # fmt: skip


def _arranged(chunk: LinearChunk, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
    return [q, k, (w * v).to(v.dtype), chunk.of_heads(g), chunk.of_heads(b)]


@no_compile
def gdn2_mixer(
    qkv: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    conv: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,  # noqa: N803 - the parameter's name everywhere
    dt_bias: Tensor,
    scale: float | None = None,
    kernel: str | LinearKernel = "auto",
    cache: LayerCache | None = None,
) -> Tensor:
    """Computes a Gated DeltaNet-2 layer between its projections; differentiable.

    A headwise plan takes one collective before and one after; a chunkwise plan takes a halo and an exchange of states.
    The caller applies the output gate and its norm to the result.

        q, k, v = silu(causal_conv1d(qkv));  q, k = q / |q|, k / |k|
        g = -exp(A_log) softplus(g + dt_bias);  out = gdn2(q, k, v, g, sigmoid(b), sigmoid(w))

    Args:
        qkv: `[t, 2 * key_heads * head_dim + heads * value_head_dim]`, this rank's rows, before the convolution.
        g: `[t, key_heads * head_dim]`, before its activation.
        b: `[t, key_heads * head_dim]`, before the sigmoid.
        w: `[t, heads * value_head_dim]`, before the sigmoid.
        plan: from `plan_linear(kind="gdn2")`, the same on every rank.
        group: the plan's ranks: a torch.distributed group, a `RankGroup`, or None for a plan over one rank.
        conv: `[channels, width]` or `[channels, 1, width]`, weight over the channels of qkv, whole on every rank.
        conv_bias: `[channels]`.
        A_log: `[key_heads]`, whole on every rank.
        dt_bias: `[key_heads * head_dim]`, whole on every rank.
        scale: queries are multiplied by it; `head_dim ** -0.5` if None.
        kernel: "auto", a kernel that `megatron-cp doctor` lists, or a `LinearKernel`.
        cache: the layer's part of a `Cache`, such as `cache.layer(0)`: documents continue its states, which become
            those after the new tokens.

    Returns:
        `[t, heads, value_head_dim]` in the type of qkv, zero in pad rows. A parameter's gradient is this rank's share,
        which must be summed over the group, as data parallelism over the group does.

    Raises:
        ArgumentError: tensors, parameters, group, kernel or cache that do not fit the plan. Raised before anything is
            sent.
    """
    check_plan(plan, "gdn2", 'plan_linear(kind="gdn2")')
    (qkv,) = lowered(qkv)
    inputs, parameters = {"qkv": qkv, "g": g, "b": b, "w": w}, MixerParameters(conv, conv_bias, A_log, dt_bias)

    def gates(chunk: LinearChunk, q: Tensor, k: Tensor, v: Tensor, x: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        q, k, v, g, erase = channel_gates(q, k, v, x, b, w, heads=chunk.key_heads, A_log=A_log, dt_bias=dt_bias)
        return [q, k, v, chunk.of_heads(g), chunk.of_heads(erase)]

    return delta_mixer("gdn2_mixer", inputs, "g", parameters, plan, group, scale, kernel, cache, gates)
