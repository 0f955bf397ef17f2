"""Reads the spec of a softmax attention, its sizes and mask, from its module and the model's configuration."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from megatron_cp.errors import ArgumentError
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.transformers.indexers import selects_keys
from megatron_cp.transformers.sources import passes

# transformers' names of layers whose attention sees all earlier tokens. A layer that has attention and a state-space
# mixer side by side is "hybrid".
_CAUSAL_TYPES = ("full_attention", "attention", "hybrid")
_WINDOWED, _CHUNKED = "sliding_attention", "chunked_attention"
# Attention that selects keys by their content.
_MASKS_BY_CONTENT = ("DogeAttention",)
# DeepSeek-V4's, which are `sliding_attention` beside compressed keys.
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_TYPES = (*_CAUSAL_TYPES, _WINDOWED, _CHUNKED)


def is_attention(module: nn.Module, config: Any) -> bool:
    """True if the module is a decoder layer's softmax attention, by transformers' naming conventions."""
    name = type(module).__name__
    if not name.endswith("Attention") or not hasattr(module, "layer_idx"):
        return False
    return not name.endswith("LinearAttention") or _layer_type(module, config) in _TYPES


def mask_of(module: Any, config: Any) -> str:
    """Returns the layer's mask, as `Mask.named` spells it."""
    if getattr(module, "is_causal", True) is False:
        remedy = "Leave encoders and vision towers on their own attention: pass the text model alone."
        raise ArgumentError("model", f"{type(module).__name__} with is_causal=False", "causal attention", remedy)
    if "CrossAttention" in type(module).__name__:
        remedy = "Its keys are those of images or of an encoder. Train it without cp."
        raise ArgumentError("model", type(module).__name__, "attention of a document's tokens to one another", remedy)
    if type(module).__name__ in _MASKS_BY_CONTENT:
        remedy = "A rank has only its own rows' scores, and no mask of all keys. Train it without cp."
        raise ArgumentError("model", type(module).__name__, "attention whose mask does not depend on its input", remedy)
    if selects_keys(module):
        return "causal"
    if (indexer := getattr(module, "indexer", None)) is not None:
        remedy = "It chooses blocks, or among keys that it makes of several tokens. Train it without cp."
        raise ArgumentError(
            "model", f"{type(module).__name__} with a {type(indexer).__name__}",
            "attention whose indexer scores single tokens", remedy,
        )  # fmt: skip
    kind = _layer_type(module, config)
    if kind == _CHUNKED:
        return f"chunk:{config.attention_chunk_size}"
    if kind in _CAUSAL_TYPES:
        return "causal"
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    is_in_mask = passes(inspect.unwrap(type(module).forward), "sliding_window") is False
    if window is not None and (is_in_mask or getattr(module, "sliding_window", window) is None):
        remedy = (
            "This layer leaves the window to the mask, which megatron_cp does not make. Remove the window "
            "from the configuration, or train without cp."
        )
        raise ArgumentError("model.config.sliding_window", window, f"None for {type(module).__name__}", remedy)
    return window_mask(window)


def window_mask(window: int | None) -> str:
    """Returns the mask's name for transformers' window size, which counts the query itself; None is no window."""
    return "causal" if window is None else f"window:{window - 1},0"


def is_mask_of(mask: object, window: int | None) -> bool:
    """True if a layer with this mask passes this window. Layers with chunks pass no window."""
    return window is None if str(mask).startswith("chunk:") else window_mask(window) == mask


def _layer_type(module: nn.Module, config: Any) -> str | None:
    """Returns the layer's type; None where the configuration is the same for all layers."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    found: str = types[module.layer_idx]
    if found not in _TYPES:
        remedy = "Its mask is not known here; open an issue with the model's name."
        if found in _COMPRESSED:
            remedy = "megatron_cp does not make keys of several tokens over ranks. docs/more-layers.md has a recipe."
        raise ArgumentError("model", f"a layer of type {found!r}", " or ".join(_TYPES), remedy)
    return found


def attention_slot(module: Any, config: Any, *, latents: bool = False, **options: Any) -> AttentionSpec:
    """Returns the spec of a softmax attention.

    Args:
        latents: True for latents that travel, where the module expands them in a method of its own. They always do
            where an indexer chooses keys.
    """
    heads = getattr(module, "num_heads", None) or config.num_attention_heads
    latent = getattr(module, "kv_lora_rank", None)
    if latent is not None:  # one latent vector gives every head its own key and value
        kv_heads, head_dim, value_dim = heads, module.qk_head_dim, module.v_head_dim
        shared = module.qk_rope_head_dim
        if selects_keys(module) and not shared:  # without positions: a shared feature of zeros
            head_dim, shared = head_dim + 1, 1
        if (latents or selects_keys(module)) and hasattr(module, "expand_kv"):
            options["latent"] = (shared, latent)
        if selects_keys(module):
            if dropout := getattr(module, "attention_dropout", 0.0):
                raise ArgumentError(
                    "attention_dropout", dropout, "0 in layers that choose keys", "These layers have no dropout here."
                )
            indexer = module.indexer
            options["topk"] = config.index_topk if indexer is None else indexer.index_topk
            options["indexer"] = None if indexer is None else (indexer.n_heads, indexer.head_dim)
    else:
        head_dim = getattr(module, "head_dim", None) or config.hidden_size // heads
        value_dim = getattr(module, "v_head_dim", None) or head_dim
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shared = getattr(module, "num_key_value_groups", None)  # query heads of a key head, which layers may differ in
        if shared and heads % shared == 0:
            kv_heads = heads // shared
    return AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_dim, mask=mask_of(module, config),
        **options,
    )  # fmt: skip
