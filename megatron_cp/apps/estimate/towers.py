"""Reads the text model and the vision tower of a vision-language model's `config.json`. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_cp.apps.estimate.model_fields import Fields
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.planner import Tower, tile_sizes

TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "internvl", "llava")
# Fields of published configurations' `text_config` that are left out where they have these values.
_OF_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"num_attention_heads": 8, "vocab_size": 262208},
    "llava": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000,
    },
}  # fmt: skip
_OF_VISION = {"deepstack_visual_indexes": [8, 16, 24], "fullatt_block_indexes": [7, 15, 23, 31]}


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the text model of a vision-language model; those of another model as they are."""
    if not values.get("vision_config"):
        return dict(values)
    kind = str(values.get("model_type"))
    whole = {name: value for name, value in values.items() if name != "vision_config"}
    own = values.get("text_config", whole | {"model_type": f"{kind}_text"})  # Qwen2-VL's first files have all in one
    if not isinstance(own, dict):
        raise ArgumentError("text_config", own, "values by name")
    tied = {name: whole[name] for name in ("tie_word_embeddings",) if whole.get(name) is not None}
    return _OF_TEXT.get(kind, {}) | own | tied


def read_tower(values: Mapping[str, Any], hidden_size: int) -> Tower | None:
    """Returns the vision tower of a model of one of the types in `TOWERS`; None of others.

    Args:
        values: the fields of its config.json.
        hidden_size: that of its text model.

    Raises:
        ArgumentError: sizes that are missing or impossible.
    """
    kind, config = str(values.get("model_type")), Fields(values)
    if kind not in TOWERS or "vision_config" not in config:
        return None
    vision = config.part("vision_config")
    if not kind.startswith("qwen"):
        return _of_tiles(kind, config, vision, hidden_size)
    return _of_grids(kind, Fields(_OF_VISION | values["vision_config"]))


def _of_grids(kind: str, vision: Fields) -> Tower:
    first, has_windows = kind == "qwen2_vl", kind == "qwen2_5_vl"
    layers, merge, patch = vision.layers("depth"), vision.size("spatial_merge_size", 2), vision.size("patch_size")
    width = vision.size("embed_dim" if first else "hidden_size")
    ratio = vision.number("mlp_ratio", 4) or 4
    inner = int(ratio * width) if first else vision.size("intermediate_size")
    out, merged = vision.size("hidden_size" if first else "out_hidden_size"), width * merge**2
    outputs = 1 + (len(vision.indices("deepstack_visual_indexes")) if kind.startswith("qwen3_vl") else 0)
    pixels = vision.size("in_channels", 3) * vision.size("temporal_patch_size", 2) * patch**2
    whole = vision.indices("fullatt_block_indexes") if has_windows else range(layers)
    return Tower(
        kind, layers, width, _heads("num_heads", vision, width),
        weights=pixels * width + layers * (4 * width**2 + (3 if has_windows else 2) * width * inner),
        projector=outputs * (merged**2 + merged * out), features=outputs * out, patches=merge**2, rows=1, merge=merge,
        window=max(vision.size("window_size", 112) // merge // patch, 1),
        windowed=sum(number not in whole for number in range(layers)),
    )  # fmt: skip


def _of_tiles(kind: str, config: Fields, vision: Fields, out: int) -> Tower:
    sides = {}
    for name in ("image_size", "patch_size"):
        given = vision.get(name)
        pair = given if isinstance(given, list) and len(given) == 2 else [given, given]
        sides[name] = [checked_integer(name, each, 1) for each in pair]
    ratio = config.number("downsample_ratio", 0.5) or 0.5
    patches, rows = tile_sizes(
        SimpleNamespace(
            model_type=kind, mm_tokens_per_image=config.size("mm_tokens_per_image", 256), downsample_ratio=ratio,
            vision_feature_select_strategy=config.get("vision_feature_select_strategy", "default"),
            vision_config=SimpleNamespace(model_type=vision.get("model_type"), **sides),
        )
    )  # fmt: skip
    layers, width = vision.layers("num_hidden_layers"), vision.size("hidden_size")
    pixels = vision.size("num_channels", 3) * math.prod(sides["patch_size"])
    products = {"gemma3": width * out, "llava": width * out + out**2, "internvl": int(width / ratio**2) * out + out**2}
    return Tower(
        kind, layers, width, _heads("num_attention_heads", vision, width),
        weights=pixels * width + layers * (4 * width**2 + 2 * width * vision.size("intermediate_size")),
        projector=products[kind], features=out, patches=checked_integer("image_size", patches, 1),
        rows=checked_integer("image_size", rows, 1),
    )  # fmt: skip


def _heads(name: str, vision: Fields, width: int) -> int:
    heads = vision.size(name)
    vision.quotient("head_dim", width, name, heads)  # refuses heads that do not divide the width
    return heads
