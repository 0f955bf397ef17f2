"""Linear layers of transformers' models: runs the part between their projections over the context-parallel group.

A family of classes shares a forward. Projections, gated norm and output projection stay the model's own modules:
parameters keep their names, and wrappers around a projection, such as LoRA, are called as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.linear.causal_conv1d import causal_conv1d
from megatron_cp.linear.gated_delta_net import gated_delta_net
from megatron_cp.linear.kimi_delta_attention import kda_mixer
from megatron_cp.linear.mamba2 import mamba2_mixer
from megatron_cp.planner.batch import LinearSpec
from megatron_cp.transformers.batch import PlannedBatch


class MixerFamily(NamedTuple):
    """A family of linear layers that share one forward.

    Attributes:
        classes: names of transformers' classes.
        slot: returns a module's spec, given options that are the same for all layers.
        mixed: the layer's forward; takes a module, this rank's hidden states `[t, hidden]` and the batch's plans, and
            returns `[t, hidden]`.
    """

    classes: tuple[str, ...]
    slot: Callable[..., LinearSpec]
    mixed: Callable[[Any, Tensor, PlannedBatch], Tensor]


def mixer_family(module: nn.Module) -> MixerFamily | None:
    """Returns the family that lists the module's class or one of its base classes."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return next((family for family in FAMILIES if names & set(family.classes)), None)


def check_activation(module: Any) -> None:
    """Refuses an activation after the convolution other than SiLU, which all mixers here compute."""
    activation = getattr(module, "activation", "silu")  # a short convolution has none
    if activation not in ("silu", "swish"):
        remedy = (
            "Only SiLU may follow the convolution. Set it in the configuration (mamba_hidden_act in Nemotron-H), "
            "or train without cp."
        )
        raise ArgumentError("model.config.hidden_act", activation, f"silu or swish for {type(module).__name__}", remedy)


@no_compile
def _planned(
    mix: Callable[..., Tensor], inputs: tuple[Tensor, ...], module: Any, batch: PlannedBatch, **parameters: Any
) -> Tensor:
    """Runs a mixer of the package by the batch's plan, outside of compiled graphs."""
    conv = module.conv1d
    return mix(
        *inputs, batch.plan(module, module.cp_slot), batch.group, conv=conv.weight, conv_bias=conv.bias,
        kernel=batch.kernel, **parameters,
    )  # fmt: skip


# -- Gated DeltaNet ----------------------------------------------------------------------------------------------------


def _gdn_slot(module: Any, **options: Any) -> LinearSpec:
    return LinearSpec(
        "gdn", heads=module.num_v_heads, key_heads=module.num_k_heads, head_dim=module.head_k_dim,
        value_head_dim=module.head_v_dim, conv_width=module.conv_kernel_size, **options,
    )  # fmt: skip


def _gdn(module: Any, hidden: Tensor, batch: PlannedBatch) -> Tensor:
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves them by key head
        *parts, z, beta, alpha = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden[None]), module.in_proj_ba(hidden[None])
        )
        qkv = torch.cat([part[0].flatten(1) for part in parts], dim=-1)
        z, beta, alpha = z[0], beta[0], alpha[0]
    elif hasattr(module, "q_proj"):  # OLMo-Hybrid
        qkv = torch.cat([project(hidden) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        z, beta, alpha = module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden)
    else:
        qkv, z, beta, alpha = (getattr(module, f"in_proj_{name}")(hidden) for name in ("qkv", "z", "b", "a"))
    out = _planned(
        gated_delta_net, (qkv, beta, alpha), module, batch, A_log=module.A_log, dt_bias=module.dt_bias,
        allow_neg_eigval=getattr(module, "allow_neg_eigval", False),
    )  # fmt: skip
    norm, project = (module.o_norm, module.o_proj) if hasattr(module, "o_proj") else (module.norm, module.out_proj)
    rows = norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
    return project(rows.reshape(-1, module.value_dim))


# -- Kimi Delta Attention ----------------------------------------------------------------------------------------------


def _kda_slot(module: Any, **options: Any) -> LinearSpec:
    return LinearSpec(
        "kda", heads=module.num_heads, key_heads=module.num_heads, head_dim=module.head_dim,
        value_head_dim=module.head_dim, conv_width=module.conv_kernel_size, **options,
    )  # fmt: skip


def _kda(module: Any, hidden: Tensor, batch: PlannedBatch) -> Tensor:
    qkv = torch.cat([project(hidden) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    gate, is_whole = module.forget_gate, hasattr(module, "g_proj")  # Bailing's projections are one matrix each
    decay = gate.f_proj(hidden) if is_whole else gate.f_b_proj(gate.f_a_proj(hidden))
    out = _planned(
        kda_mixer, (qkv, decay, module.b_proj(hidden)), module, batch, A_log=gate.A_log.flatten(),
        dt_bias=gate.dt_bias, lower_bound=_decay_limit(gate),
    )  # fmt: skip
    z = module.g_proj(hidden) if is_whole else module.g_b_proj(module.g_a_proj(hidden))
    return module.o_proj(module.o_norm(out, z.unflatten(-1, (module.num_heads, module.head_dim))).flatten(1))


def _decay_limit(gate: Any) -> float | None:
    """Returns the limit of a forget gate's log decay; None for no limit."""
    if hasattr(gate, "safe_gate"):  # Bailing
        limit = gate.lower_bound if gate.safe_gate else None
    else:
        limit = getattr(gate, "safe_gate_lower_bound", None)
    return limit


# -- Mamba-2 -----------------------------------------------------------------------------------------------------------


def _mamba_slot(module: Any, **options: Any) -> LinearSpec:
    return LinearSpec(
        "mamba", heads=module.num_heads, key_heads=module.n_groups, head_dim=module.ssm_state_size,
        value_head_dim=module.head_dim, conv_width=module.conv_kernel_size, **options,
    )  # fmt: skip


def _mamba(module: Any, hidden: Tensor, batch: PlannedBatch) -> Tensor:
    scales = hasattr(module, "mup_vector")  # Falcon-H1's multipliers
    projected = module.in_proj(hidden * module.ssm_in_multiplier if scales else hidden)
    projected = projected * module.mup_vector[0] if scales else projected
    gate, x, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    low, high = _step_limits(module)
    out = _planned(
        mamba2_mixer, (x, dt), module, batch, A_log=module.A_log, D=module.D, dt_bias=module.dt_bias,
        dt_limit=(low, high),
    ).flatten(1)  # fmt: skip
    if getattr(module, "mamba_rms_norm", True):
        out = module.norm(out, gate)
    else:
        out = out * functional.silu(gate)
    return module.out_proj(out.to(hidden.dtype))


def _step_limits(module: Any) -> tuple[float, float]:
    """Returns the limits to which a Mamba-2 layer clamps its steps.

    NemotronH and Zamba2 clamp from `time_step_min` on. In transformers 5.5 they do so in PyTorch only, and their CUDA
    kernels clamp to a `time_step_limit` that may be None; later releases clamp from `time_step_min` on in both.
    """
    names = {kind.__name__ for kind in type(module).__mro__}
    if names & {"NemotronHMamba2Mixer", "Zamba2MambaMixer"} and hasattr(module, "time_step_min"):
        return float(module.time_step_min), math.inf
    low, high = module.time_step_limit
    return float(low), float(high)


# -- Short convolution -------------------------------------------------------------------------------------------------


def _conv_slot(module: Any, **options: Any) -> LinearSpec:
    channels = module.conv.in_channels
    return LinearSpec(
        "conv1d", heads=channels, key_heads=channels, head_dim=1, value_head_dim=1,
        conv_width=module.conv.kernel_size[0],
        **options,
    )  # fmt: skip


def _short_conv(module: Any, hidden: Tensor, batch: PlannedBatch) -> Tensor:
    before, after, x = module.in_proj(hidden).chunk(3, dim=-1)
    return module.out_proj(after * _convolved(before * x, module, batch))


@no_compile
def _convolved(x: Tensor, module: Any, batch: PlannedBatch) -> Tensor:
    plan, conv = batch.plan(module, module.cp_slot), module.conv
    return causal_conv1d(x, conv.weight, conv.bias, plan, batch.group, kernel=batch.kernel)


FAMILIES = (
    MixerFamily(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _conv_slot, _short_conv),
    MixerFamily(
        (
            "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
        ),
        _gdn_slot,
        _gdn,
    ),
    MixerFamily(
        ("BailingHybridDeltaAttention", "Glm5NextTextLinearAttention", "KimiLinearDeltaAttention"), _kda_slot, _kda
    ),
    MixerFamily(
        (
            "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        _mamba_slot,
        _mamba,
    ),
)  # fmt: skip
