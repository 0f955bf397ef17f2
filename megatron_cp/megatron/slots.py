"""The slots of softmax attention, made from a configuration or from an object with its names.

It imports neither torch nor Megatron, so that `megatron-cp doctor --megatron` refuses what a model's layers would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron.options import scheme_name, schemes_of
from megatron_cp.megatron.rules import named_by_flags, refuse
from megatron_cp.plan.schemes import AUTO, may_assign_tiles, scheme_named
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.planner.capabilities import require


def attention_slot(
    config: Any,
    cp_size: int,
    cp_comm_type: str | None,
    mask: str,
    options: Mapping[str, Any],
    *,
    tp_size: int = 1,
    k_channels: int | None = None,
    v_channels: int | None = None,
) -> AttentionSpec:
    """Returns the spec of a softmax layer.

    Args:
        mask: the layer's mask, as `Mask.named` spells it.
        options: what the specs of all kinds of layers have: head_chunks, transport, codec, hardware and item_size.
        tp_size: the number of tensor-parallel ranks, which share the heads.
        k_channels: the size of a key, if there are as many keys as queries; else the configuration's, and its number.
        v_channels: the size of a value, if it is not that of a key.

    Raises:
        ArgumentError: an option that no scheme of the layers takes, by Megatron's flag.
    """
    scheme = comm_scheme(cp_comm_type, cp_size)
    options = dict(options)
    if _is_for_others(config, scheme, lambda each: scheme_named(each).takes_chunks):
        options["head_chunks"] = None
    return plannable(
        cp_size,
        heads=config.num_attention_heads // tp_size,
        kv_heads=(config.num_query_groups if k_channels is None else config.num_attention_heads) // tp_size,
        head_dim=config.kv_channels if k_channels is None else k_channels,
        value_head_dim=config.kv_channels if v_channels is None else v_channels,
        mask=mask,
        scheme=scheme,
        ulysses_degree=ulysses_degree(config, scheme, cp_size),
        **_latents(config, k_channels),
        **options,
        **_search(config, scheme),
    )


def comm_scheme(cp_comm_type: str | None, cp_size: int) -> str:
    """Returns the scheme that `--cp-comm-type` names; "auto" if it names none, or on one rank."""
    if cp_comm_type is None or cp_size == 1:
        return "auto"
    return require("scheme", scheme_name(cp_comm_type), name="--cp-comm-type")


def _is_for_others(config: Any, scheme: str, takes: Callable[[str], bool]) -> bool:
    """True if an option is for other layers: their schemes in a list take it, and this layer's does not.

    An option that no layer takes stays in the layer's spec, so that planning refuses it by name.
    """
    return not takes(scheme) and any(takes(each) for each in schemes_of(config))


def ulysses_degree(config: Any, scheme: str, cp_size: int) -> int | None:
    """Returns the number of ranks that exchange heads, of `--hierarchical-context-parallel-sizes`."""
    sizes = config.hierarchical_context_parallel_sizes
    if (
        not sizes
        or cp_size == 1
        or _is_for_others(config, scheme, lambda each: each == AUTO or scheme_named(each).is_product)
    ):
        return None
    if len(sizes) > 2:
        remedy = "Heads change places within groups of the first number of ranks; keys travel among the groups."
        refuse("hierarchical_context_parallel_sizes", sizes, "two numbers", remedy)
    return int(sizes[0])


def _search(config: Any, scheme: str) -> dict[str, Any]:
    """Returns the options of the search for tiles, or none for a scheme without tiles, since other layers may have."""
    if not may_assign_tiles(scheme):
        return {}
    return {"search_seconds": config.cp_search} if hasattr(config, "cp_search") else {}


def _latents(config: Any, k_channels: int | None) -> dict[str, Any]:
    """Returns the sizes of latents and what is done with them, for multi-latent attention whose latents may travel."""
    mode = getattr(config, "cp_latent_mode", "heads")
    if k_channels is None or mode == "heads":
        return {}
    return {"latent": (config.qk_pos_emb_head_dim, config.kv_lora_rank), "latent_mode": mode}


def plannable(cp_size: int, **arguments: Any) -> AttentionSpec:
    """Returns a spec, and plans a batch of one token, so that refusals are raised while the model is built."""
    with named_by_flags():
        slot = AttentionSpec(**arguments)
        slot.plan(_one_token(cp_size))
    return slot


@lru_cache(maxsize=8)
def _one_token(cp_size: int) -> Layout:
    """Returns one layout for all layers of a model: it remembers prices, so that layers alike are priced once."""
    return Layout.contiguous(Packing([1]), cp_size)
