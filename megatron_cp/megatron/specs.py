"""Layer specs for `--spec megatron_cp.megatron.specs NAME`: hybrid_stack_spec (HybridModel), gpt_layer_spec (GPTModel).

Prefer HybridModel: Megatron 0.19.2 and main call GPTModel deprecated.

They are Megatron's own specs with the modules replaced that mix tokens: self-attention with its core attention, Gated
DeltaNet, and Mamba's mixer. gated_delta_product_stack_spec is HybridModel's with Gated DeltaProduct in Mamba's place,
for Megatron-Core 0.20 or newer. Linear layers and norms are Transformer Engine's if it is installed, else Megatron's
and torch's, which `--transformer-impl local` also chooses; HybridModel's specs for it begin with local_.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

from torch import Tensor

from megatron_cp.megatron import compat
from megatron_cp.versions import warn_if_untested

with compat.refused_if_incomplete():
    from megatron.core import __version__ as megatron_version
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm import gated_delta_net as megatron_gdn
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention as megatron_attention
    from megatron.core.transformer import multi_latent_attention as megatron_mla
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )

    from megatron_cp.megatron.layers.attention import CoreAttention, SelfAttention
    from megatron_cp.megatron.layers.base import LinearModule
    from megatron_cp.megatron.layers.experts import mask_pads, replace_router
    from megatron_cp.megatron.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
    from megatron_cp.megatron.layers.gated_delta_product import GatedDeltaProductMixer
    from megatron_cp.megatron.layers.mamba_mixer import MambaMixer
    from megatron_cp.megatron.layers.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
    from megatron_cp.megatron.layers.multi_token_prediction import MultiTokenPredictionLayer
    from megatron_cp.megatron.layers.norms import Norm
    from megatron_cp.megatron.layers.redistribution import arrange_run, arrange_runs
    from megatron_cp.megatron.layers.refusals import refuse_other_implementation, uses_transformer_engine
    from megatron_cp.megatron.layers.sparse_attention import (
        DuplicatedLinear,
        SparseCoreAttention,
        SparseMLASelfAttention,
    )
    from megatron_cp.megatron.patches import exchange_mtp_block_spec, gated_delta_net_2_is
    from megatron_cp.megatron.rules import refuse, unsupported_spec

warn_if_untested(**{"megatron-core": megatron_version})

# -- GPTModel --------------------------------------------------------------------------------------------------------


def gpt_layer_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the spec of GPTModel's decoder, for `--spec megatron_cp.megatron.specs gpt_layer_spec`.

    It is Megatron's block for the configuration, with mixtures of experts in `moe_layer_freq` of its layers.

    Args:
        config: Megatron's `TransformerConfig`, or a `GPTModelConfig` that has one.

    Raises:
        ArgumentError: a kind of attention that is not supported, or a block that Megatron builds in another way.
    """
    config = getattr(config, "transformer", config)
    if config.mtp_num_layers:
        config.mtp_layers_are_ours = True
        exchange_mtp_block_spec(_replace_mtp_block)
    variant, use_te = config.experimental_attention_variant, uses_transformer_engine(config)
    for error in unsupported_spec(config, has_gdn2=compat.HAS_GDN2):
        raise error
    refuse_other_implementation(config, te=use_te)
    if use_te and variant:
        block = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
        layers = [_replace_modules(layer) for layer in block.layer_specs]
        return TransformerBlockSubmodules(_mark_runs(layers), block.layer_norm)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # Megatron builds the variant with Transformer Engine only
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        plain, use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
    )
    layers = [_replace_modules(layer) for layer in block.layer_specs]
    if variant == "dsa":
        for layer in layers:
            layer.submodules.self_attention = _local_sparse_attention()
    elif variant:
        pattern = variants.get_linear_attention_pattern(config)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        for layer, is_linear in zip(layers, pattern[first:], strict=False):
            if is_linear:
                layer.submodules.self_attention = _local_gated_delta_net(_LINEAR_VARIANTS.get(variant, GatedDeltaNet))
                layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    # Megatron's final norm without Transformer Engine refuses sequence parallelism.
    return TransformerBlockSubmodules(_mark_runs(layers), block.layer_norm if use_te else Norm)


def gpt_mtp_block_spec(config: Any, vp_stage: int | None = None) -> MultiTokenPredictionBlockSubmodules | None:
    """Returns the spec of GPTModel's multi-token prediction, for `mtp_block_spec` of a model of `gpt_layer_spec`.

    `GPTModelBuilder`, which `pretrain` uses, finds it itself. Returns None if this pipeline stage has no such layers.
    """
    config = getattr(config, "transformer", config)
    use_te = uses_transformer_engine(config)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # the last layer is softmax attention, as in GPTModelBuilder
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
        plain, use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
    )
    gpt_layer_spec(config, vp_stage)
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layers[-1], use_te, vp_stage=vp_stage)


def _replace_mtp_block(config: Any, block: Any) -> Any:
    """Replaces the modules of multi-token prediction by ours if the decoder's are ours."""
    if block is None or not getattr(config, "mtp_layers_are_ours", False):
        return block
    return MultiTokenPredictionBlockSubmodules([_replace_mtp_layer(layer) for layer in block.layer_specs])


def _replace_mtp_layer(layer: ModuleSpec) -> ModuleSpec:
    layer = copy.copy(layer)
    layer.module, layer.submodules = MultiTokenPredictionLayer, copy.copy(layer.submodules)
    for name, value in vars(layer.submodules).items():
        if value is WrappedTorchNorm:
            setattr(layer.submodules, name, Norm)
    if layer.submodules.mtp_model_layer is not None:
        inner = layer.submodules.mtp_model_layer = _replace_modules(layer.submodules.mtp_model_layer)
        inner.module = getattr(inner.module, "outside_of_run", inner.module)  # of the decoder's
    return layer


def _mark_runs(layers: list[ModuleSpec]) -> list[ModuleSpec]:
    """Tells each Gated DeltaNet layer the run of consecutive such layers that it is in."""
    for is_linear, group in itertools.groupby(layers, _is_linear):
        run = list(group) if is_linear else []
        for layer in run:
            layer.module = _run_member(layer.module, len(run), is_first=layer is run[0], is_last=layer is run[-1])
    return layers


def _is_linear(layer: ModuleSpec) -> bool:
    mixer = getattr(layer.submodules.self_attention, "module", None)
    return isinstance(mixer, type) and issubclass(mixer, LinearModule)


def _run_member(layer_class: type, count: int, *, is_first: bool, is_last: bool) -> type:
    """Returns a class of layers that are members of a run of `count` equal layers."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        layer_class.__init__(self, config, *args, **kwargs)  # type: ignore[misc]
        own = self.self_attention
        arrange_run([self], [own], [own.slot] * count, config, is_first=is_first, is_last=is_last)

    attributes = {"__init__": __init__, "__doc__": layer_class.__doc__, "outside_of_run": layer_class}
    return type(f"{layer_class.__name__}InRun", (layer_class,), attributes)


_ATTENTION = {
    megatron_attention.SelfAttention: SelfAttention,
    megatron_mla.MLASelfAttention: MLASelfAttention,
    megatron_mla.FusedMLASelfAttention: FusedMLASelfAttention,
}


def _replace_modules(layer: ModuleSpec) -> ModuleSpec:
    """Returns a transformer layer's spec with our attention or Gated DeltaNet, and norms without Megatron's limits."""
    layer = copy.deepcopy(layer)
    mixer = layer.submodules.self_attention
    if mixer.module in _ATTENTION:
        mixer.module = _ATTENTION[mixer.module]
        mixer.submodules.core_attention = CoreAttention
    elif mixer.module is absorbed_mla.AbsorbedMLASelfAttention:
        mixer.module = SparseMLASelfAttention
        mixer.submodules.core_attention.module = SparseCoreAttention
    elif mixer.module is megatron_gdn.GatedDeltaNet:
        mixer.module = GatedDeltaNet
    elif GatedDeltaNet2 is not None and mixer.module is megatron_gdn.GatedDeltaNet2:
        mixer.module = GatedDeltaNet2
    for owner in (layer.submodules, mixer.submodules):
        for name, value in vars(owner).items():
            if value is WrappedTorchNorm:
                setattr(owner, name, Norm)
    return _replace_experts(layer)


def _replace_experts(layer: ModuleSpec) -> ModuleSpec:
    mlp = replace_router(layer.submodules.mlp)
    if mlp is not layer.submodules.mlp:
        layer.submodules.mlp, layer.module = mlp, mask_pads(layer.module)
    return layer


_LINEAR_VARIANTS = {"gdn2": GatedDeltaNet2}  # others are GatedDeltaNet


def _local_gated_delta_net(module: Any = GatedDeltaNet) -> ModuleSpec:
    return ModuleSpec(
        module=module,
        submodules=megatron_gdn.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        ),
    )


def _local_sparse_attention() -> ModuleSpec:
    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=DuplicatedLinear, linear_wk=DuplicatedLinear, k_norm=Norm, linear_weights_proj=DuplicatedLinear
    )
    core = dsa.DSAttentionSubmodules(indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
    names = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    return ModuleSpec(
        module=SparseMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
            **dict.fromkeys(names, ColumnParallelLinear), linear_proj=RowParallelLinear, q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp, core_attention=ModuleSpec(module=SparseCoreAttention, submodules=core),
        ),
    )  # fmt: skip


# -- HybridModel -----------------------------------------------------------------------------------------------------


class TEHybridStack(HybridStack):
    """Megatron's stack with our attention, also where `--mla-down-proj-fusion` replaces it."""

    def __init__(self, config: Any, submodules: Any, **others: Any) -> None:
        refuse_other_implementation(config, te=True)
        _refuse_other_stacks(config, others)
        with gated_delta_net_2_is(GatedDeltaNet2):
            super().__init__(config, submodules, **others)
        arrange_runs(self.layers, config)

    def _fuse_mla_down_proj(self, submodules: HybridStackSubmodules) -> HybridStackSubmodules:
        fused: HybridStackSubmodules = super()._fuse_mla_down_proj(submodules)
        fused.mla_layer = _replace_modules(fused.mla_layer)
        return fused


class LocalHybridStack(HybridStack):
    """Megatron's stack with torch's final norm, since Megatron's needs Transformer Engine."""

    def __init__(self, config: Any, submodules: Any, post_layer_norm: bool = True, **others: Any) -> None:
        refuse_other_implementation(config, te=False)
        _refuse_other_stacks(config, others)
        with gated_delta_net_2_is(GatedDeltaNet2):
            super().__init__(config, submodules, post_layer_norm=False, **others)
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        arrange_runs(self.layers, config)

    def _fuse_mla_down_proj(self, submodules: HybridStackSubmodules) -> HybridStackSubmodules:
        return submodules  # there is no fused projection in Megatron's local spec of GPTModel either

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden_states = super().forward(*args, **kwargs)
        return self.final_norm(hidden_states) if hasattr(self, "final_norm") else hidden_states


def _refuse_other_stacks(config: Any, others: dict[str, Any]) -> None:
    """Refuses layers that are not in our stacks; Megatron would build its own, or none, in their place."""
    for error in unsupported_spec(config, has_gdn2=compat.HAS_GDN2):
        raise error
    compat.refuse_other_layers(others.get("layer_type_list") or ())


def _te_stack() -> ModuleSpec:
    spec = copy.deepcopy(hybrid_layer_specs.hybrid_stack_spec)
    layers = spec.submodules
    spec.module = TEHybridStack
    for field in ("attention_layer", "mla_layer", "gdn_layer", "dsa_layer"):
        if hasattr(layers, field):
            setattr(layers, field, _replace_modules(getattr(layers, field)))
    layers.mamba_layer.submodules.mixer.module = MambaMixer
    layers.moe_layer = _replace_experts(layers.moe_layer)
    mtp = layers.mtp_block_spec.submodules
    mtp.layer_specs = [_replace_mtp_layer(layer) for layer in mtp.layer_specs]
    return spec


def _local_stack() -> ModuleSpec:
    attention = _replace_modules(gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"))
    # None takes the configuration's norm, as in Megatron's hybrid spec.
    norms = attention.submodules.self_attention.submodules
    norms.q_layernorm = norms.k_layernorm = None
    latent = _replace_modules(
        gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    )
    linear, sparse = copy.deepcopy(attention), copy.deepcopy(attention)
    linear.submodules.self_attention = _local_gated_delta_net()
    sparse.submodules.self_attention = _local_sparse_attention()
    for layer, projection in ((attention, "linear_qkv"), (linear, "in_proj"), (latent, None), (sparse, None)):
        kept = ("input_layernorm", "self_attention", "self_attn_bda")
        # Names in checkpoints are those of Transformer Engine's fused modules, as in Megatron's local specs.
        fused = {"input_layernorm.": f"self_attention.{projection}.layer_norm_"} if projection else {}
        layer.submodules = TransformerLayerSubmodules(
            **{name: getattr(layer.submodules, name) for name in kept}, sharded_state_dict_keys_map=fused
        )
    mamba_layer = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=Norm,
            mixer=ModuleSpec(
                module=MambaMixer,
                submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
            ),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm,
            mlp=partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention,
            gdn_layer=linear,
            mlp_layer=mlp_layer,
            mamba_layer=mamba_layer,
            dsa_layer=sparse,
            **compat.layers_taken({"mla_layer": latent}),
            moe_layer=_replace_experts(
                ModuleSpec(
                    module=TransformerLayer,
                    submodules=TransformerLayerSubmodules(
                        pre_mlp_layernorm=Norm,
                        mlp=get_moe_module_spec(use_te=False, num_experts=1),  # the configuration has the real number
                        mlp_bda=get_bias_dropout_add,
                    ),
                )
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    [
                        ModuleSpec(
                            module=MultiTokenPredictionLayer,
                            submodules=MultiTokenPredictionLayerSubmodules(
                                enorm=Norm, hnorm=Norm, layer_norm=Norm, eh_proj=ColumnParallelLinear
                            ),
                        )
                    ]
                ),
            ),
        ),
    )


local_hybrid_stack_spec = _local_stack()
hybrid_stack_spec = _te_stack() if HAVE_TE else local_hybrid_stack_spec


class _NoSuchStack:
    """Takes the place of a stack whose layers this Megatron does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        remedy = "Megatron-Core has Gated DeltaProduct since 0.20."
        refuse("spec", "gated_delta_product_stack_spec", f"hybrid_stack_spec with {megatron_version}", remedy)


def _with_delta_product(stack: ModuleSpec) -> ModuleSpec:
    """Returns a stack's spec with Gated DeltaProduct where it has Mamba."""
    if GatedDeltaProductMixer is None:
        return ModuleSpec(module=_NoSuchStack, submodules=stack.submodules)
    stack = copy.deepcopy(stack)
    mixer = stack.submodules.mamba_layer.submodules.mixer
    mixer.module = GatedDeltaProductMixer
    return stack


local_gated_delta_product_stack_spec = _with_delta_product(local_hybrid_stack_spec)
gated_delta_product_stack_spec = _with_delta_product(hybrid_stack_spec)
