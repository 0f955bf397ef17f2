"""Reads images and videos from a batch as the items of which a tower makes rows: one table of models, three readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.layout.packing import IntArray
from megatron_cp.planner.images import TILES, image_costs
from megatron_cp.transformers.documents import check_on_host, on_host


class Modality(NamedTuple):
    """The names by which transformers' models take images, or videos."""

    name: str
    pixels: str
    grids: str
    places: str
    token: str
    method: str
    number: int  # in `mm_token_type_ids`


IMAGE = Modality(
    "image", "pixel_values", "image_grid_thw", "image_position_ids", "image_token_id", "get_image_features", 1
)
VIDEO = Modality(
    "video", "pixel_values_videos", "video_grid_thw", "video_position_ids", "video_token_id", "get_video_features", 2
)
MODALITIES = (IMAGE, VIDEO)
TYPES = ("token_type_ids", "mm_token_type_ids")
_PIXELS = (IMAGE.pixels, VIDEO.pixels)
_GRIDS = (IMAGE.grids, VIDEO.grids)
_PLACES = (IMAGE.places, VIDEO.places)
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # between the frames of each video
_FRAMES = "num_frames_per_video"
# Keys whose tensors have rows of images, or of their patches, and none of tokens.
IMAGE_KEYS = (*_PIXELS, *_GRIDS, *_PLACES, _FRAMES, *_SECONDS)


@dataclass(frozen=True)
class Items:
    """Images, or frames of videos, in the order of their tokens.

    Attributes:
        pixels: the tower's pixels of all.
        rows: `[items + 1]` where each item's rows of `pixels` begin, and their end.
        beside: other arguments of the tower with a row for each item, such as its grid.
        tokens: `[items]` the number of tokens of each.
        costs: `[items]` the tower's work for each.
    """

    pixels: Tensor
    rows: IntArray
    beside: dict[str, Tensor]
    tokens: IntArray
    costs: IntArray

    def inputs(self, modality: Modality, chosen: IntArray) -> dict[str, Tensor]:
        """Returns the tower's arguments for some of the items."""
        found = {name: each[chosen] for name, each in self.beside.items()}
        found[modality.pixels] = torch.cat([self.pixels[self.rows[each] : self.rows[each + 1]] for each in chosen])
        if VIDEO.places in found:
            found[_FRAMES] = torch.tensor([len(chosen)])
        return found


@dataclass(frozen=True)
class Family:
    """The keys and readers of images of one type of model.

    Attributes:
        read: makes items from the configuration, a modality, its pixels and the batch.
        keys: the arguments that their processor makes of images, but for types of tokens.
        one_token: True if frames of videos have the token of images; a batch then has images or videos.
        types: where models see both ways inside images, the types of tokens that they read for it; None elsewhere.
        in_windows: True if they do so in layers with windows alone, and only where the configuration says so.
    """

    read: Callable[[Any, Modality, Tensor, Mapping[str, Any]], Items]
    keys: tuple[str, ...]
    one_token: bool = False
    types: str | None = None
    in_windows: bool = False

    def sees_both_ways(self, config: Any, batch: Mapping[str, Any]) -> bool:
        """True if attention sees both ways inside images: it sees causally in a batch without types of tokens."""
        asked = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
        if self.types is None or (self.in_windows and not asked):
            return False
        if batch.get(self.types) is not None:
            return True
        for other in TYPES:
            if batch.get(other) is not None:
                remedy = (
                    f"This model reads {self.types} and would attend causally inside images without them: rename them."
                )
                raise ArgumentError(other, "types of tokens", f"None for {config.model_type}", remedy)
        return False

    def places(
        self, config: Any, ids: Tensor, pixels: Mapping[Modality, Tensor | None]
    ) -> dict[Modality, IntArray]:  # fmt: skip
        """Returns the places of each modality's tokens in the stream."""
        found = {each: np.flatnonzero(ids.numpy() == getattr(config, each.token, None)) for each in MODALITIES}
        if not self.one_token or pixels[VIDEO] is None:
            return found
        if pixels[IMAGE] is not None:
            raise ArgumentError(IMAGE.pixels, "images beside videos", "batches with images alone, or videos alone")
        return {VIDEO: found[IMAGE], IMAGE: found[VIDEO]}


def tensor_of(batch: Mapping[str, Any], name: str) -> Tensor | None:
    """Returns a tensor of a batch, which must be on the host."""
    value = batch.get(name)
    if value is not None and not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, "a tensor, as a processor returns it with return_tensors='pt'")
    check_on_host(name, value)
    return value


def seconds_of(batch: Mapping[str, Any], count: int) -> Tensor | list[float] | tuple[float, ...] | None:
    """Returns the seconds between frames of each video; None without them."""
    name = next((name for name in _SECONDS if batch.get(name) is not None), None)
    if name is None:
        return None
    check_on_host(name, seconds := batch[name])
    is_sequence = isinstance(seconds, Tensor | list | tuple)
    if not is_sequence or len(seconds) != count:
        given = len(seconds) if is_sequence else type(seconds).__name__
        raise ArgumentError(name, given, f"a number for each of {count} videos")
    return seconds


def _read_tiles(config: Any, modality: Modality, pixels: Tensor, _: Mapping[str, Any]) -> Items:
    """Reads images, or tiles of them, of one size."""
    if pixels.ndim != 4:
        remedy = "Concatenate the images of all documents along axis 0."
        raise ArgumentError(modality.pixels, list(pixels.shape), "[images, channels, height, width]", remedy)
    tokens = np.full(len(pixels), TILES[config.model_type](config))
    return Items(pixels, np.arange(len(pixels) + 1), {}, tokens, np.ones(len(pixels), np.int64))


def _read_grids(config: Any, modality: Modality, pixels: Tensor, batch: Mapping[str, Any]) -> Items:
    """Reads patches of any number of images, by their grids, which attend within each frame."""
    if (grids := tensor_of(batch, modality.grids)) is None:
        raise ArgumentError(modality.grids, None, f"the grid of each of the {modality.name}s", "Processors return it.")
    sizes, merge = on_host(modality.grids, grids), int(config.vision_config.spatial_merge_size)
    if sizes.ndim != 2 or sizes.shape[1] != 3 or (sizes < 1).any() or (sizes[:, 1:] % merge).any():
        allowed = f"[{modality.name}s, 3]: frames, and rows and columns of patches that are multiples of {merge}"
        raise ArgumentError(modality.grids, sizes.tolist(), allowed, "The processor of this model returns such grids.")
    if pixels.ndim != 2 or len(pixels) != sizes.prod(1).sum():
        allowed = f"[{sizes.prod(1).sum()}, features], the patches of {modality.grids}"
        remedy = f"Concatenate {modality.pixels} and {modality.grids} of the same {modality.name}s along axis 0."
        raise ArgumentError(modality.pixels, list(pixels.shape), allowed, remedy)
    frames = np.repeat(sizes, sizes[:, 0], axis=0)
    frames[:, 0] = 1
    patches = frames.prod(1)
    rows, beside = np.concatenate([[0], np.cumsum(patches)]), {modality.grids: torch.from_numpy(frames)}
    return Items(pixels, rows, beside, patches // merge**2, _costs(config, patches))


def _read_places(config: Any, modality: Modality, pixels: Tensor, batch: Mapping[str, Any]) -> Items:
    """Reads a row of patches for each image, filled up, with their places: -1 where there is none."""
    places = tensor_of(batch, modality.places)
    if places is None or places.shape != (*pixels.shape[:2], 2):
        given = None if places is None else list(places.shape)
        raise ArgumentError(
            modality.places, given, f"[{modality.name}s, patches, 2], the places of {modality.pixels}"
        )  # fmt: skip
    patches = (on_host(modality.places, places) != -1).all(-1).sum(1)
    tokens = patches // int(config.vision_config.pooling_kernel_size) ** 2
    filled = np.full(len(patches), pixels.shape[1])  # the tower computes them too
    return Items(pixels, np.arange(len(pixels) + 1), {modality.places: places}, tokens, _costs(config, filled))


def _costs(config: Any, patches: IntArray) -> IntArray:
    width = int(getattr(config.vision_config, "embed_dim", None) or config.vision_config.hidden_size)
    return image_costs(patches, width)


_WITH_GRIDS = Family(_read_grids, (*_PIXELS, *_GRIDS, *_SECONDS))
_WITH_ONE_TOKEN = replace(_WITH_GRIDS, one_token=True)
_WITH_PLACES = Family(_read_places, (*_PIXELS, *_PLACES, _FRAMES))
_WITH_TILES = Family(_read_tiles, (IMAGE.pixels,))
# By the type of a model's configuration.
FAMILIES = {
    "qwen2_vl": _WITH_GRIDS,
    "qwen2_5_vl": _WITH_GRIDS,
    "qwen2_5_omni_thinker": _WITH_GRIDS,
    "qwen3_vl": _WITH_GRIDS,
    "qwen3_vl_moe": _WITH_GRIDS,
    "qwen3_5": _WITH_GRIDS,
    "qwen3_5_moe": _WITH_GRIDS,
    "qwen3_omni_moe_thinker": _WITH_GRIDS,
    "glm4v": _WITH_ONE_TOKEN,
    "glm4v_moe": _WITH_ONE_TOKEN,
    "glm46v": _WITH_ONE_TOKEN,
    "gemma4": replace(_WITH_PLACES, types="mm_token_type_ids", in_windows=True),
    "gemma3": replace(_WITH_TILES, types="token_type_ids"),
    "internvl": _WITH_TILES,
    "llava": _WITH_TILES,
}
