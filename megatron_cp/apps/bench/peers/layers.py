"""Whole linear layers of a model: ours, and megatron-core's own with the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron_cp.layout import Layout
from megatron_cp.linear import (
    Delta,
    FlaRule,
    LinearCall,
    LinearKernel,
    StateSpace,
    choose_conv,
    choose_rule,
    l2_normalised,
    softplus,
)
from megatron_cp.megatron import (
    LinearModule,
    TransformerConfig,
    exchanged,
    gated_delta_net_without_fla,
    mamba_mixer_without_its_kernels,
    run_megatron_on_cpu,
    specs,
)
from megatron_cp.plan import KINDS, MAMBA
from megatron_cp.testing import Case

Function = Callable[..., Any]
Exchange = Callable[[], AbstractContextManager[None]]


@dataclass
class Layer:
    """A linear layer of a model on one rank.

    Attributes:
        forward: `[t, 1, hidden]` to the same, without the bias that it leaves to others.
    """

    forward: Callable[[Tensor], Tensor]
    module: nn.Module


@dataclass
class Layers:
    """Our layer and Megatron's, with the same parameters; Megatron's is None if it cannot be built.

    `words` name the functions that replace others, or say why Megatron's layer is missing.
    """

    ours: Layer
    stock: Layer | None
    words: str


def start(cp_size: int, *, on_cpu: bool) -> None:
    """Makes Megatron's process groups over the ranks of this job, all of them context parallel."""
    if on_cpu:
        run_megatron_on_cpu()
    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=cp_size)
    model_parallel_cuda_manual_seed(1)


def layers(case: Case, hidden_size: int, watched: Callable[[Function], Function], kernel: LinearKernel) -> Layers:
    """Builds both layers over the batch of a case, in Megatron's zigzag order.

    If kernels that Megatron's layer calls are missing or for other devices, it is given ours under their names.
    `watched` wraps what both sides compute alike: projections, and the kernels that Megatron's layer calls; `kernel`
    computes our layer.
    """
    config = _configured(case, hidden_size)
    module = _built(case.layer, _spec_of(case.layer, case.device), config, case.device)
    assert isinstance(module, LinearModule)
    module.kernel = kernel
    ours = _layer(module, case)
    make = {"gdn": _stock_gated_delta_net, "mamba": _stock_mamba}[case.layer]
    try:
        stock, words = make(case, config, watched)
    except ImportError as error:
        stock, words = None, str(error)
    if stock is not None:
        module.load_state_dict(stock.module.state_dict())
    for layer in (ours, *([stock] if stock else [])):
        for name in ("in_proj", "out_proj"):
            projection: Any = getattr(layer.module, name)
            projection.forward = watched(projection.forward)
    return Layers(ours, stock, words)


def _configured(case: Case, hidden_size: int) -> TransformerConfig:
    shape: dict[str, Any] = {
        "mamba_num_heads": case.heads, "mamba_head_dim": case.value_head_dim, "mamba_state_dim": case.head_dim,
        "mamba_num_groups": case.groups,
    } if KINDS[case.layer] is MAMBA else {
        "linear_num_value_heads": case.heads, "linear_num_key_heads": case.groups,
        "linear_key_head_dim": case.head_dim, "linear_value_head_dim": case.value_head_dim,
        "linear_conv_kernel_dim": case.conv_width,
    }  # fmt: skip
    return TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=1, params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16, fp16=case.dtype == torch.float16, context_parallel_size=case.cp,
        normalization="RMSNorm", activation_func=silu, gated_linear_unit=True, add_bias_linear=False,
        hidden_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
        use_cpu_initialization=case.device == "cpu",
        transformer_impl="local" if case.device == "cpu" else "transformer_engine",
        linear_cp_mode=case.scheme, cp_head_chunks=case.head_chunks,
        cp_transport=case.transport, cp_codec=case.codec, cp_packed_order="document", calculate_per_token_loss=True,
        **shape,
    )  # fmt: skip


def _spec_of(layer: str, device: str) -> ModuleSpec:
    parts = (specs.local_hybrid_stack_spec if device == "cpu" else specs.hybrid_stack_spec).submodules
    found = parts.mamba_layer.submodules.mixer if KINDS[layer] is MAMBA else parts.gdn_layer.submodules.self_attention
    assert isinstance(found, ModuleSpec)
    return found


def _built(layer: str, spec: ModuleSpec, config: TransformerConfig, device: str) -> nn.Module:
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    arguments = {"d_model": config.hidden_size} if KINDS[layer] is MAMBA else {}
    built: nn.Module = build_module(spec, config=config, layer_number=1, pg_collection=groups, **arguments)
    return built.to(device)  # torch's own norms are made on the host, as Megatron has them


def _layer(module: nn.Module, case: Case, *exchanges: Exchange) -> Layer:
    """Makes a layer from a module, with other values for names of Megatron's while it runs."""
    cu_seqlens = torch.from_numpy(case.packing.cu_seqlens.astype(np.int32)).to(case.device)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=case.packing.max_length,
        max_seqlen_kv=case.packing.max_length, total_tokens=case.packing.total,
    )  # fmt: skip
    others = {} if KINDS[case.layer] is MAMBA else {"attention_mask": None}

    def forward(hidden: Tensor) -> Tensor:
        with ExitStack() as stack:
            for exchange in exchanges:
                stack.enter_context(exchange())
            out: Tensor = module(hidden, packed_seq_params=params, **others)[0]
        return out

    return Layer(forward, module)


def _call_of(case: Case, channels: int) -> LinearCall:
    """Returns the call that describes whole documents on some heads to our kernels."""
    device = torch.device(case.device)
    return LinearCall(
        case.layer, case.packing, case.dtype, device, case.head_dim, case.conv_width, channels=(channels,)
    )


def _stock_gated_delta_net(
    case: Case, config: TransformerConfig, watched: Callable[[Function], Function]
) -> tuple[Layer, str]:
    conv, rule, norm, words = gdn.causal_conv1d, gdn.chunk_gated_delta_rule, common.l2norm, ""
    refusal = FlaRule().refusal(_call_of(case, case.heads * case.value_head_dim))
    if refusal is not None or not common.HAVE_FLA:
        (conv, rule), norm = _in_place_of_fla(case), l2_normalised
        words = f"ours stand in for fla's kernels: {refusal or 'Megatron does not find them'}"
    with gated_delta_net_without_fla():
        module = _built("gdn", replace(_spec_of("gdn", case.device), module=gdn.GatedDeltaNet), config, case.device)
    module.gated_delta_rule = watched(rule)  # type: ignore[assignment]
    names = partial(exchanged, gdn, causal_conv1d=watched(conv)), partial(exchanged, common, l2norm=norm)
    return _layer(module, case, *names), words


def _in_place_of_fla(case: Case) -> tuple[Function, Function]:
    def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **_: Any) -> tuple[Tensor, None]:
        call = _call_of(case, len(weight))
        y = choose_conv("auto", call).conv(x[0], weight, bias, call, silu=activation in ("silu", "swish"))
        return y.to(x.dtype)[None], None

    def rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
        call = _call_of(case, v.shape[2])
        named = Delta(q[0], k[0], v[0], g[0], beta[0])  # keys are repeated for each head already
        out = choose_rule("auto", call).rule(named, list(range(v.shape[2])), q.shape[-1] ** -0.5, call)
        return out[None], None

    return conv, rule


def _stock_mamba(case: Case, config: TransformerConfig, watched: Callable[[Function], Function]) -> tuple[Layer, str]:
    """Builds Megatron's layer; its exchange needs Transformer Engine's indices of tokens, which ours replace too."""
    if not mamba_mixer.HAVE_EINOPS:
        raise ImportError("Megatron's Mamba needs einops")
    spec, names, words = replace(_spec_of("mamba", case.device), module=mamba_mixer.MambaMixer), [], []
    if case.device == "cpu" or not mamba_mixer.HAVE_MAMBA_SSM:
        with mamba_mixer_without_its_kernels():
            module = _built("mamba", spec, config, case.device)
        names.append(partial(
            exchanged, mamba_mixer, mamba_split_conv1d_scan_combined=_in_place_of_mamba_ssm(case, watched),
            MAMBA_HAS_STATE_DTYPE=False, _check_mamba_sequence_packing_support=lambda **_: (True, None),
        ))  # fmt: skip
        words.append("mamba_ssm's kernel is not for this device or not installed: ours stand in for it")
    else:
        module = _built("mamba", spec, config, case.device)
        fused = mamba_mixer.mamba_split_conv1d_scan_combined
        names.append(partial(exchanged, mamba_mixer, mamba_split_conv1d_scan_combined=watched(fused)))
    if mamba_context_parallel.tex is None or case.device == "cpu":
        indices = {"tex": _Indices(case), "is_te_min_version": lambda *_: True}
        names.append(partial(exchanged, mamba_context_parallel, **indices))
        words.append("Transformer Engine's indices of tokens were made beforehand")
    return _layer(module, case, *names), "; ".join(words)


def _in_place_of_mamba_ssm(case: Case, watched: Callable[[Function], Function]) -> Function:
    """Replaces its fused kernel; only convolution and recurrence are watched, as in our layer."""

    def scan(
        rows: Tensor, taps: Tensor, bias: Tensor, dt_bias: Tensor, rate: Tensor, *, D: Tensor, ngroups: int, **_: Any  # noqa: N803
    ) -> Tensor:  # fmt: skip
        heads, dim, state = len(rate), case.value_head_dim, case.head_dim
        z, xbc, dt = rows[0].split([heads * dim, heads * dim + 2 * ngroups * state, heads], -1)
        call = _call_of(case, len(taps))
        convolved = watched(choose_conv("auto", call).conv)(xbc, taps, bias, call, silu=True).to(rows.dtype)
        x, b, c = convolved.split([heads * dim, ngroups * state, ngroups * state], -1)
        x, b, c = x.unflatten(1, (heads, dim)), b.unflatten(1, (ngroups, state)), c.unflatten(1, (ngroups, state))
        named = StateSpace(x, softplus(dt.float() + dt_bias), rate, b, c)
        groups = [head * ngroups // heads for head in range(heads)]
        y = watched(choose_rule("auto", call).rule)(named, groups, 1.0, call)
        y = (y.float() + D.view(heads, -1) * x.float()).flatten(1) * silu(z.float())
        return y.to(rows.dtype)[None]

    return scan


class _Indices:
    """Replaces Transformer Engine's Torch extension: returns each rank's tokens of a batch, computed beforehand."""

    def __init__(self, case: Case) -> None:
        layout = Layout.zigzag(case.packing, case.cp)
        self._tokens = [
            torch.from_numpy(np.array(layout.tokens(rank), dtype=np.int32)).to(case.device) for rank in range(case.cp)
        ]

    def thd_get_partitioned_indices(self, cu_seqlens: Tensor, total: int, size: int, rank: int) -> Tensor:
        return self._tokens[rank]
