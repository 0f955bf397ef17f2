"""Batches without images in other people's trainers, beside replicas that have some."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_cp.transformers.batch import RankTokens
from megatron_cp.transformers.image_items import IMAGE, MODALITIES
from megatron_cp.transformers.images import tower_rows
from megatron_cp.transformers.sources import refers_to


def always_run_tower(model: Any) -> None:
    """Makes a model that takes images run its tower for batches without images and videos too, on an image of zeros.

    Where FSDP or ZeRO-3 shards the tower, a replica whose batch has images waits for those whose batches have none. The
    outputs are the same, and the tower's gradients are zero. Towers without a size of images, Gemma 4's, are left out.
    """
    if not any(hasattr(model.config.vision_config, name) for name in ("spatial_merge_size", "image_size")):
        return
    owner = next(each for each in model.modules() if refers_to(inspect.unwrap(type(each).forward), IMAGE.method))
    owner.register_forward_pre_hook(_embed_with_tower, with_kwargs=True)


def _embed_with_tower(
    model: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    ids = given.get("input_ids")
    if ids is None or given.get("cp_batch") is None or any(given.get(each.pixels) is not None for each in MODALITIES):
        return None
    embeds = model.get_input_embeddings()(RankTokens.plain(ids))
    for rows in tower_rows(getattr(model, IMAGE.method)(**_blank(model.config.vision_config, embeds))):
        embeds = embeds + 0 * rows.sum().to(embeds)
    return args, {**given, "input_ids": None, "inputs_embeds": embeds}


def _blank(vision: Any, like: Tensor) -> dict[str, Tensor]:
    """Returns the smallest image that a tower takes."""
    merge = getattr(vision, "spatial_merge_size", None)
    if merge is None:
        size = vision.image_size
        return {IMAGE.pixels: like.new_zeros(1, 3, *((size, size) if isinstance(size, int) else size))}
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge]], device=like.device)
    return {IMAGE.pixels: like.new_zeros(merge**2, patch), IMAGE.grids: grid}
