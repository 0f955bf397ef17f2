"""A whole Gated DeltaNet layer of a model: ours, and megatron-core's own with the same parameters."""

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
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron_cp.linear import (
    Delta,
    FlaRule,
    LinearCall,
    choose_conv,
    choose_rule,
    l2_normalised,
)
from megatron_cp.megatron import (
    TransformerConfig,
    exchanged,
    gated_delta_net_without_fla,
    run_megatron_on_cpu,
    specs,
)
from megatron_cp.testing import Case

Function = Callable[..., Any]
Exchange = Callable[[], AbstractContextManager[None]]


@dataclass
class Layer:
    """A linear layer of a model on one rank: `forward` takes `[t, 1, hidden]` to the same."""

    forward: Callable[[Tensor], Tensor]
    module: nn.Module


def start(cp_size: int, *, on_cpu: bool) -> None:
    """Makes Megatron's process groups over the ranks of this job, all of them context parallel."""
    if on_cpu:
        run_megatron_on_cpu()
    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=cp_size)
    model_parallel_cuda_manual_seed(1)


def layers(case: Case, hidden_size: int) -> tuple[Layer, Layer, str]:
    """Builds our layer and Megatron's with the same parameters over a batch in Megatron's zigzag order.

    If kernels that Megatron's layer calls are missing or for other devices, it is given ours under their names; the
    text says which.
    """
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=1, params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16, fp16=case.dtype == torch.float16, context_parallel_size=case.cp,
        normalization="RMSNorm", activation_func=silu, gated_linear_unit=True, add_bias_linear=False,
        hidden_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
        use_cpu_initialization=case.device == "cpu",
        transformer_impl="local" if case.device == "cpu" else "transformer_engine",
        linear_cp_mode=case.scheme, cp_head_chunks=case.head_chunks,
        cp_transport=case.transport, cp_codec=case.codec, cp_packed_order="document", calculate_per_token_loss=True,
        linear_num_value_heads=case.heads, linear_num_key_heads=case.groups, linear_key_head_dim=case.head_dim,
        linear_value_head_dim=case.value_head_dim, linear_conv_kernel_dim=case.conv_width,
    )  # fmt: skip
    spec = (specs.local_hybrid_stack_spec if case.device == "cpu" else specs.hybrid_stack_spec).submodules
    mixer = spec.gdn_layer.submodules.self_attention
    module = _built(mixer, config, case.device)
    stock, words = _stock(mixer, case, config)
    module.load_state_dict(stock.module.state_dict())
    return _layer(module, case), stock, words


def _built(spec: ModuleSpec, config: TransformerConfig, device: str) -> nn.Module:
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    built: nn.Module = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    return built.to(device)  # torch's own norms are made on the host, as Megatron has them


def _layer(module: nn.Module, case: Case, *exchanges: Exchange) -> Layer:
    """Makes a layer from a module, with other values for names of Megatron's while it runs."""
    cu_seqlens = torch.from_numpy(case.packing.cu_seqlens.astype(np.int32)).to(case.device)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=case.packing.max_length,
        max_seqlen_kv=case.packing.max_length, total_tokens=case.packing.total,
    )  # fmt: skip

    def forward(hidden: Tensor) -> Tensor:
        with ExitStack() as stack:
            for exchange in exchanges:
                stack.enter_context(exchange())
            out: Tensor = module(hidden, attention_mask=None, packed_seq_params=params)[0]
        return out

    return Layer(forward, module)


def _call_of(case: Case, channels: int) -> LinearCall:
    """Returns the call that describes whole documents on some heads to our kernels."""
    device = torch.device(case.device)
    return LinearCall(
        case.layer, case.packing, case.dtype, device, case.head_dim, case.conv_width, channels=(channels,)
    )


def _stock(spec: ModuleSpec, case: Case, config: TransformerConfig) -> tuple[Layer, str]:
    conv, rule, norm, words = gdn.causal_conv1d, gdn.chunk_gated_delta_rule, common.l2norm, ""
    refusal = FlaRule().refusal(_call_of(case, case.heads * case.value_head_dim))
    if refusal is not None or not common.HAVE_FLA:
        (conv, rule), norm = _in_place_of_fla(case), l2_normalised
        words = f"ours stand in for fla's kernels: {refusal or 'Megatron does not find them'}"
    with gated_delta_net_without_fla():
        module = _built(replace(spec, module=gdn.GatedDeltaNet), config, case.device)
    module.gated_delta_rule = rule
    names = partial(exchanged, gdn, causal_conv1d=conv), partial(exchanged, common, l2norm=norm)
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
