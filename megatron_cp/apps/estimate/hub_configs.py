"""`MODEL_TYPES`: reads the `config.json` of each type of Hugging Face model. No torch in here.

Keys and their defaults are those of the model types' configuration classes in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_cp.apps.estimate.mixers import (
    AttentionMixer,
    LinearMixer,
    Mixer,
    gated_delta_net,
    kimi_delta_attention,
    mamba2,
)
from megatron_cp.apps.estimate.model_fields import Fields, chosen_blocks
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.errors import ArgumentError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
Blocks = tuple[Block, ...]
# The defaults of transformers for num_key_value_heads, which a saved configuration leaves out; of other types, and
# where it is null, all heads.
_KEY_HEADS = dict.fromkeys(("mistral", "mixtral", "gpt_oss", "nemotron_h", "bamba"), 8)
_KEY_HEADS |= dict.fromkeys(("qwen3_moe", "gemma2", "gemma3_text", "qwen3_5_text"), 4)
_KEY_HEADS |= dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), 8) | {"qwen3_vl_moe_text": 16}
_KEY_HEADS |= dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), 2)


def _attention(config: Fields, *, head_dim: int | None = None, bias: bool = False) -> AttentionMixer:
    """Returns attention with a causal mask.

    Args:
        config: the model's configuration.
        head_dim: the default of its head size; if None, hidden_size / num_attention_heads.
        bias: the default of its `attention_bias`.
    """
    heads = config.size("num_attention_heads")
    if head_dim is None:
        head_dim = config.quotient("head_dim", config.size("hidden_size"), "num_attention_heads", heads)
    else:
        head_dim = config.size("head_dim", head_dim)
    has_bias = config.flag("attention_bias", bias)
    is_usual = "num_key_value_heads" not in config.nulls
    usual = _KEY_HEADS.get(str(config.get("model_type")), heads) if is_usual else heads
    kv_heads = config.size("num_key_value_heads", usual)
    return AttentionMixer(heads, kv_heads, head_dim, head_dim, bias=has_bias, output_bias=has_bias)


def _sliding(mixer: AttentionMixer, config: Fields, default: int | None = None) -> AttentionMixer:
    """Returns the mixer with a window of `sliding_window` tokens, which includes the query itself."""
    return replace(mixer, mask=f"window:{config.size('sliding_window', default) - 1},0")


def _alternating(config: Fields, full: Block, sliding: Block, interval: int) -> Blocks:
    """Returns layers of which every `interval`-th is full and the others slide, unless `layer_types` says otherwise."""
    layers = config.layers("num_hidden_layers")
    types = [SLIDING if number % interval else FULL for number in range(1, layers + 1)]
    return chosen_blocks("layer_types", config.get("layer_types", types), {FULL: full, SLIDING: sliding}, layers)


def _experts(config: Fields, size: str, experts: str, chosen: str = "num_experts_per_tok", **rest: Any) -> MLP:
    """Returns a mixture whose sizes have these names."""
    return MLP(config.size(size), experts=config.size(experts), experts_per_token=config.size(chosen), **rest)


def _mlp(config: Fields, *, gated: bool = True) -> MLP:
    return MLP(config.size("intermediate_size"), gated, config.flag("mlp_bias"))


def _llama(config: Fields) -> Blocks:
    return (Block(_attention(config), _mlp(config)),) * config.layers("num_hidden_layers")


def _mistral(config: Fields, mlp: MLP | None = None) -> Blocks:
    mixer = _attention(config)
    if "sliding_window" in config:
        mixer = _sliding(mixer, config)
    return (Block(mixer, mlp or _mlp(config)),) * config.layers("num_hidden_layers")


def _mixtral(config: Fields) -> Blocks:
    experts = config.size("num_local_experts", 8)
    chosen = config.size("num_experts_per_tok", 2)
    return _mistral(config, MLP(config.size("intermediate_size"), experts=experts, experts_per_token=chosen))


def _qwen(config: Fields, mixer: AttentionMixer) -> Blocks:
    """Returns layers that slide after the first `max_window_layers` if `use_sliding_window` is set."""
    layers, mlp = config.layers("num_hidden_layers"), _mlp(config)
    first = layers
    types = {FULL: Block(mixer, mlp)}
    if config.flag("use_sliding_window"):
        first = config.size("max_window_layers", 28, least=0)
        types[SLIDING] = Block(_sliding(mixer, config, 4096), mlp)
    default = [FULL if number < first else SLIDING for number in range(layers)]
    return chosen_blocks("layer_types", config.get("layer_types", default), types, layers)


def _qwen2(config: Fields) -> Blocks:
    return _qwen(config, replace(_attention(config), bias=True, output_bias=False))


def _qwen3(config: Fields) -> Blocks:
    return _qwen(config, replace(_attention(config, head_dim=128), qk_norm=True))


def _qwen_mixture(config: Fields, number: int, experts: MLP) -> MLP:
    """Returns a layer's MLP: dense if `mlp_only_layers` or `decoder_sparse_step` says so for `number`, from 0."""
    is_sparse = (number + 1) % config.size("decoder_sparse_step", 1) == 0
    return experts if is_sparse and number not in config.indices("mlp_only_layers") else _mlp(config)


def _qwen_experts(config: Fields, *, shared_size: int = 0) -> MLP:
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return _experts(config, "moe_intermediate_size", name, shared_size=shared_size, shared_gate=shared_size > 0)


def _qwen3_moe(config: Fields) -> Blocks:
    mixer = replace(_attention(config), qk_norm=True)
    if config.flag("use_sliding_window"):
        mixer = _sliding(mixer, config, 4096)
    experts, layers = _qwen_experts(config), range(config.layers("num_hidden_layers"))
    return tuple(Block(mixer, _qwen_mixture(config, number, experts)) for number in layers)


def _qwen3_next(config: Fields) -> Blocks:
    mixers = _qwen3_next_mixers(config)
    experts = _qwen_experts(config, shared_size=config.size("shared_expert_intermediate_size", 0, least=0))
    return tuple(replace(block, mlp=_qwen_mixture(config, n, experts)) for n, block in enumerate(mixers))


def _qwen3_5(config: Fields) -> Blocks:
    return tuple(replace(block, mlp=_mlp(config)) for block in _qwen3_next_mixers(config))


def _qwen3_next_mixers(config: Fields) -> Blocks:
    linear = gated_delta_net(
        config.size("linear_num_value_heads"),
        config.size("linear_num_key_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim", 4),
    )
    full = replace(_attention(config, head_dim=256), output_gate=True, qk_norm=True)
    layers = config.layers("num_hidden_layers")
    interval = config.size("full_attention_interval", 4)
    types = [LINEAR if number % interval else FULL for number in range(1, layers + 1)]
    blocks = {LINEAR: Block(linear), FULL: Block(full)}
    return chosen_blocks("layer_types", config.get("layer_types", types), blocks, layers)


def _gemma(config: Fields, mixer: AttentionMixer, interval: int, softcap: float | None = None) -> Blocks:
    config.refuse("use_bidirectional_attention")
    if "attn_logit_softcapping" in config.nulls:
        softcap = None
    scale = (config.number("query_pre_attn_scalar", 256) or 1) ** -0.5
    mixer = replace(mixer, softcap=config.number("attn_logit_softcapping", softcap) or 0.0, softmax_scale=scale)
    full = Block(mixer, _mlp(config), post_norms=True)
    return _alternating(config, full, replace(full, mixer=_sliding(mixer, config, 4096)), interval)


def _gemma2(config: Fields) -> Blocks:
    return _gemma(config, _attention(config, head_dim=256), 2, softcap=50.0)


def _gemma3(config: Fields) -> Blocks:
    name = "_sliding_window_pattern" if "_sliding_window_pattern" in config else "sliding_window_pattern"
    return _gemma(config, replace(_attention(config, head_dim=256), qk_norm=True), config.size(name, 6))


def _gpt_oss(config: Fields) -> Blocks:
    mixer = replace(_attention(config, head_dim=64, bias=True), sink=True)
    experts = MLP(
        config.size("intermediate_size"),
        bias=True,
        experts=config.size("num_local_experts"),
        experts_per_token=config.size("num_experts_per_tok", 4),
    )
    full = Block(mixer, experts)
    return _alternating(config, full, replace(full, mixer=_sliding(mixer, config, 128)), 2)


# The types of layers of Nemotron-H: the letters of hybrid_override_pattern, and the words of layers_block_type, some of
# which older files spell otherwise.
_HYBRID_WORDS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_OLDER_WORDS = {"mamba": LINEAR, "attention": FULL}


def _nemotron_h(config: Fields) -> Blocks:
    config.refuse("moe_latent_size", "num_nextn_predict_layers", "use_bias", "mamba_proj_bias")
    types = {
        LINEAR: Block(_mamba(config, "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel")),
        FULL: Block(_attention(config, head_dim=128)),
        "mlp": Block(mlp=_mlp(config, gated=False)),
    }
    if "n_routed_experts" in config:
        shared = config.size("moe_shared_expert_intermediate_size", 0, least=0)
        experts = _experts(config, "moe_intermediate_size", "n_routed_experts", gated=False, shared_size=shared)
        types["moe"] = Block(mlp=experts)
    name, words = "hybrid_override_pattern", config.get("hybrid_override_pattern")
    if isinstance(words, str):
        types = {letter: types[word] for letter, word in _HYBRID_WORDS.items() if word in types}
    else:
        name, words = "layers_block_type", config.get("layers_block_type")
        if not isinstance(words, list):
            allowed = "a list of the types of all layers, or hybrid_override_pattern with a letter for each"
            raise ArgumentError(name, words, allowed)
        types |= {older: types[word] for older, word in _OLDER_WORDS.items()}
    return chosen_blocks(name, words, types, config.size("num_hidden_layers", len(words)))


def _mamba(config: Fields, heads: str, groups: str, state: str, head_dim: str, width: str) -> LinearMixer:
    """Returns a Mamba-2 layer whose sizes have these names."""
    bias_name = "mamba_conv_bias" if "mamba_conv_bias" in config else "use_conv_bias"
    return mamba2(
        config.size(heads),
        config.size(groups, 8),
        config.size(state),
        config.size(head_dim),
        config.size(width, 4),
        conv_bias=config.flag(bias_name, True),
    )


def _mamba2(config: Fields) -> Blocks:
    config.refuse("use_bias")
    layer = Block(_mamba(config, "num_heads", "n_groups", "state_size", "head_dim", "conv_kernel"))
    return (layer,) * config.layers("num_hidden_layers")


def _mamba_of_bamba(config: Fields) -> LinearMixer:
    config.refuse("mamba_proj_bias")
    heads, inner = config.size("mamba_n_heads"), config.size("mamba_expand", 2) * config.size("hidden_size")
    is_given = not isinstance(config.get("mamba_d_head"), str | None)  # else it is "auto"
    own = config if is_given else Fields({})
    return mamba2(
        heads,
        config.size("mamba_n_groups", 1),
        config.size("mamba_d_state"),
        own.quotient("mamba_d_head", inner, "mamba_n_heads", heads),
        config.size("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
    )


def _bamba(config: Fields) -> Blocks:
    mlp, full = _mlp(config), config.indices("attn_layer_indices")
    linear, attention = Block(_mamba_of_bamba(config), mlp), Block(_attention(config), mlp)
    return tuple(attention if number in full else linear for number in range(config.layers("num_hidden_layers")))


def _granite_hybrid(config: Fields) -> Blocks:
    shared = config.size("shared_intermediate_size", 1024)
    experts = config.size("num_local_experts", 8, least=0)
    mlp = MLP(shared)
    if experts:
        chosen = config.size("num_experts_per_tok", 2)
        mlp = MLP(config.size("intermediate_size"), experts=experts, experts_per_token=chosen, shared_size=shared)
    layers = config.layers("num_hidden_layers")
    scaled = replace(_attention(config), softmax_scale=config.number("attention_multiplier", 1.0))
    linear, attention = Block(_mamba_of_bamba(config), mlp), Block(scaled, mlp)
    types = {"mamba": linear, "attention": attention, LINEAR: linear, FULL: attention}
    return chosen_blocks("layer_types", config.get("layer_types", [LINEAR] * layers), types, layers)


def _latent(config: Fields) -> AttentionMixer:
    shared_key, heads = config.size("qk_rope_head_dim", 64, least=0), config.size("num_attention_heads")
    head_dim = config.size("qk_nope_head_dim", 128) + shared_key
    return AttentionMixer(
        heads,
        heads,
        head_dim,
        config.size("v_head_dim", 128),
        qk_norm=True,
        kv_rank=config.size("kv_lora_rank"),
        query_rank=config.optional("q_lora_rank"),
        shared_key_dim=shared_key,
        softmax_scale=_scale_of_longer(config, head_dim),
    )


def _scale_of_longer(config: Fields, head_dim: int) -> float | None:
    """Returns the factor of scores of a model whose rotary positions were stretched (YaRN, arXiv 2309.00071)."""
    rope = config.part("rope_scaling", "rope_parameters")
    weight = rope.number("mscale_all_dim") if rope.get("mscale_all_dim") else None
    factor = rope.number("factor", 1.0) or 1.0
    if weight is None or factor <= 1:
        return None
    return float(head_dim**-0.5 * (0.1 * weight * math.log(factor) + 1) ** 2)


def _deepseek_v3(config: Fields) -> Blocks:
    config.refuse("attention_bias")
    mixers = [_latent(config)] * config.layers("num_hidden_layers")
    return _after_dense(config, mixers, 3, "n_shared_experts", "n_routed_experts")


def _after_dense(config: Fields, mixers: Sequence[Mixer], usual: int, shared: str, *names: str) -> Blocks:
    """Returns layers with mixtures, except the first `first_k_dense_replace` and those between `moe_layer_freq`.

    `usual` is the number of the first that are dense where the configuration does not say. Only dense layers read
    `intermediate_size`.
    """
    size = config.size("moe_intermediate_size") * config.size(shared, 0, least=0)
    experts = _experts(config, "moe_intermediate_size", *names, shared_size=size, router_bias=True)
    dense, step = config.size("first_k_dense_replace", usual, least=0), config.size("moe_layer_freq", 1)
    return tuple(
        Block(mixer, MLP(config.size("intermediate_size")) if number < dense or number % step else experts)
        for number, mixer in enumerate(mixers)
    )


def _kimi_linear(config: Fields) -> Blocks:
    config.refuse("routed_expert_hidden_size", "attn_res_block_size", "num_nextn_predict_layers")
    linear_config = config.get("linear_attn_config")
    if not isinstance(linear_config, dict):
        raise ArgumentError("linear_attn_config", linear_config, "the sizes of the linear layers, by name")
    own = Fields(linear_config)
    rank = own.size("head_dim")
    gate_rank = None if own.flag("use_full_rank_gate") else rank
    heads, width = own.size("num_heads"), own.size("short_conv_kernel_size", 4)
    linear = kimi_delta_attention(heads, heads, rank, width, decay_rank=rank, gate_rank=gate_rank)
    latent = replace(_latent(config), output_gate=config.flag("mla_use_output_gate"))
    full, layers = own.indices("full_attn_layers"), config.layers("num_hidden_layers")
    mixers = [latent if number in full else linear for number in range(1, layers + 1)]
    return _after_dense(config, mixers, 0, "num_shared_experts", "num_experts", "num_experts_per_token")


MODEL_TYPES: dict[str, Callable[[Fields], Blocks]] = {
    "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "qwen2": _qwen2, "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe, "qwen3_next": _qwen3_next, "gemma2": _gemma2, "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss, "nemotron_h": _nemotron_h, "kimi_linear": _kimi_linear, "mamba2": _mamba2, "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid, "deepseek_v3": _deepseek_v3,
    # The text models of vision-language models.
    "qwen2_vl_text": _qwen2, "qwen2_5_vl_text": _qwen2, "qwen3_vl_text": _qwen3, "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_5_text": _qwen3_5, "qwen3_5_moe_text": _qwen3_next,
}  # fmt: skip

# Fields that add other layers, which the model's own code in `transformers` does not build either.
LEFT_OUT = {"deepseek_v3": {"num_nextn_predict_layers": "layers of multi-token prediction"}}
TIED = ("gemma2", "gemma3_text")  # the output head has the embedding's weights by default
