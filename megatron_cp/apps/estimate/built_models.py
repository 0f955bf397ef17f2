"""`read_built`: reads a model of any type that transformers builds, from its modules on the meta device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_cp.apps.estimate.mixers import AttentionMixer
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.errors import ArgumentError

if TYPE_CHECKING:
    from megatron_cp.planner import AttentionSpec


def can_build() -> bool:
    """True if torch and transformers are installed."""
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


def read_built(values: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Returns the model that transformers builds from a configuration.

    Args:
        values: the fields of a config.json.
        name, source: those of the model's spec.

    Raises:
        ArgumentError: no such model, or a layer with parameters that are not understood.
    """
    from megatron_cp.transformers import build_on_meta

    model, layers = build_on_meta(values)
    config: Any = model.config
    if not layers or len(layers) != config.num_hidden_layers:
        allowed = "a model whose every layer has softmax attention"
        raise ArgumentError(
            "model_type", values["model_type"], allowed, "You can describe the model by Megatron's flags instead."
        )
    blocks = tuple(_block(layer, spec, attention, config.hidden_size) for layer, spec, attention in layers)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return ModelSpec(name, config.hidden_size, config.vocab_size, tied, blocks, source)


def _block(layer: Any, spec: AttentionSpec, attention: Any, hidden_size: int) -> Block:
    """Returns a layer, all of whose parameters must be counted."""
    mlp = next((getattr(layer, name) for name in _MLPS if getattr(layer, name, None) is not None), None)
    norms = sum(name.endswith(("norm", "norm1", "norm2")) for name, _ in layer.named_children())
    block = Block(_mixer(attention, spec), _mlp(mlp), post_norms=norms == 4)
    built = sum(parameter.numel() for parameter in layer.parameters())
    counted = sum(block.parameters(hidden_size))
    if built != counted:
        given = f"{type(layer).__name__} with {built} parameters, of which {counted} are understood"
        remedy = "The model has products or weights of other kinds. You can describe it by Megatron's flags instead."
        raise ArgumentError("model_type", given, "layers of attention and an MLP or a mixture of experts", remedy)
    return block


def _scale(module: Any, head_dim: int) -> float | None:
    """Returns the factor of a module's scores; None for the usual one."""
    scale = getattr(module, "scaling", None)
    return None if scale is None or math.isclose(scale, head_dim**-0.5) else float(scale)


_MLPS = ("mlp", "block_sparse_moe", "feed_forward", "moe")


def _mixer(module: Any, spec: AttentionSpec) -> AttentionMixer:
    latent = getattr(module, "kv_lora_rank", None)
    ranks = {}
    if latent is not None:
        ranks = {"kv_rank": latent, "query_rank": module.q_lora_rank, "shared_key_dim": module.qk_rope_head_dim}
    children = dict(module.named_children())
    return AttentionMixer(
        spec.heads, spec.kv_heads, spec.head_dim, spec.value_head_dim or spec.head_dim, str(spec.mask),
        qk_norm=latent is not None or any(name in children for name in ("q_norm", "query_layernorm")),
        bias=_has_bias(children.get("q_proj")), output_bias=_has_bias(children.get("o_proj")),
        sink=getattr(module, "sinks", None) is not None,
        softcap=getattr(module, "attn_logit_softcapping", None) or 0.0, softmax_scale=_scale(module, spec.head_dim),
        **ranks,
    )  # fmt: skip


def _mlp(module: Any) -> MLP | None:
    """Returns a dense MLP or a mixture, by the sizes of its modules; None without one."""
    if module is None:
        return None
    experts = getattr(module, "experts", None)
    if not hasattr(experts, "num_experts"):
        children = dict(module.named_children())
        down = children.get("down_proj") or children.get("fc2") or children.get("w2")
        if down is None:
            return None
        gated = any(name in children for name in ("gate_proj", "gate_up_proj", "w1"))
        return MLP(down.in_features, gated, _has_bias(down))
    assert experts is not None
    shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
    top_k = next((each.top_k for each in module.modules() if hasattr(each, "top_k")), None)
    size = getattr(experts, "intermediate_dim", None) or experts.intermediate_size
    return MLP(
        size, getattr(experts, "has_gate", True), getattr(experts, "has_bias", False),
        experts=experts.num_experts, experts_per_token=top_k or 1,
        shared_size=0 if shared is None else shared.down_proj.in_features,
        shared_gate=getattr(module, "shared_expert_gate", None) is not None,
    )  # fmt: skip


def _has_bias(module: Any) -> bool:
    return getattr(module, "bias", None) is not None
